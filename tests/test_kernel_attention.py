"""Stages 1 and 2b, split attention and merge, run as part of the traced kernel: against the kernel
reference fed with the published inputs, and against a plain softmax in fp64."""

import pytest
import torch
from kernel_steps import (
    failures,
    four_rows,
    long_rows,
    one_row,
    padded,
    pinned_row,
    silent,
    verified_rows,
)

from m3lab.model.formats import e4m3_decode

RUNS = [four_rows, long_rows, one_row, pinned_row, verified_rows]
ATTENTION = ("sparse_table", "sp_o", "sp_m", "sp_l", "attnq")


@pytest.mark.parametrize("run", RUNS)
def test_each_partition_agrees_with_the_reference_stage_by_stage(run):
    step, result = run()
    verdicts = step.verify(result)
    checked = [v for v in verdicts if v.name in ATTENTION and v.against == "stage"]
    assert {v.name for v in checked} >= {"sp_o", "sp_m", "sp_l"}
    assert not [v for v in checked if not v.passed]


def softmax_attention(step, row):
    """fp64 [heads, 128] of rank 0: softmax over the selected keys, nothing quantized but what the
    caches and the model's inputs hold."""
    selection = step.selections[0][row]
    ctx = step.inputs.contexts[row // step.q_len]
    keys, values = [], []
    for b in selection.blocks.tolist():
        k_scale, v_scale = ctx.k_scale(b)[:, 0], ctx.v_scale(b)[:, 0]
        if step.layout.static_scale:
            k_scale = torch.full((128,), ctx.k_scale_static)
            v_scale = torch.full((128,), ctx.v_scale_static)
        keys.append(e4m3_decode(ctx.k(b)[:, 0]).double() * k_scale.double()[:, None])
        values.append(e4m3_decode(ctx.v(b)[:, 0]).double() * v_scale.double()[:, None])
    n = selection.n_ctx
    q = step.inputs.q[row, :16].double()
    weights = torch.softmax(q @ torch.cat(keys)[:n].T * 128**-0.5, -1)
    return weights @ torch.cat(values)[:n]


@pytest.mark.parametrize(("run", "row"), [(four_rows, 0), (four_rows, 3), (verified_rows, 1)])
def test_merged_attention_is_a_softmax_to_fp8_accuracy(run, row):
    """Query, probabilities and result are rounded to E4M3, 2.6e-2 of a row each in the mean
    (three mantissa bits); together 4.5e-2."""
    step, result = run()
    views = result.ranks[0]
    got = e4m3_decode(views.attnq[row]).double().view(16, 128) * float(views.attnq_s[row])
    want = softmax_attention(step, row)
    assert float((got - want).norm() / want.norm()) < 6e-2


def test_a_partition_without_keys_weighs_nothing():
    """300 keys: partition 1 holds 44, the others none and publish m = NEG, l = 256, o = 0."""
    for views in one_row()[1].ranks:
        assert views.sp_m[0, 2:].eq(torch.tensor(-3.4e38)).all()
        assert views.sp_l[0, 2:].eq(256.0).all()
        assert views.sp_o[0, 2:].eq(0.0).all()
        assert views.sp_m[0, :2].gt(-1e30).all()
        assert views.sp_o[0, :2].ne(0.0).any(-1).all()


def test_a_partition_of_many_equal_scores_sums_to_their_number():
    """The padding row is one key, with a zero query: p = 1 and l = 1 + 255 masked zeros."""
    views = padded(0.0)[1].ranks[0]
    assert views.sp_m[1, 0].eq(0.0).all()
    assert views.sp_l[1, 0].eq(1.0).all()


def test_a_live_rows_bits_do_not_depend_on_a_padding_row():
    """The padding row's query and residual are zeros in one run and NaN in the other."""
    zeros, nans = (padded(v)[1].ranks[0] for v in (0.0, float("nan")))
    assert nans.sp_m[1, 0].isnan().all()
    for name in ("sp_o", "sp_m", "sp_l", "table", "attnq", "attnq_s", "partials", "a", "h_mid"):
        one, other = getattr(zeros, name), getattr(nans, name)
        if name == "partials":
            one, other = one[0], other[0]
        assert torch.equal(one[0], other[0]), name
        assert torch.isfinite(one[0].float()).all(), name


def test_a_zero_padding_row_stays_finite_to_the_end():
    views = padded(0.0)[1].ranks[0]
    assert torch.isfinite(views.h_mid).all()
    assert not failures(*padded(0.0))


def test_an_all_zero_row_is_quantized_to_zeros_with_scale_zero():
    """Not to 0 * rcp(0), a NaN, which the projection would spread over the padding row."""
    views = silent()[1].ranks[0]
    assert views.attnq[1].eq(0).all()
    assert views.attnq_s[1].eq(0.0).all()
    assert views.attnq[0].ne(0).any()
    assert torch.equal(views.h_mid[1], silent()[0].inputs.h_in[1].float())
