"""Stage 3, the output projection and its all-reduce, run as part of the traced kernel."""

import pytest
import torch
from kernel_steps import (
    HIDDEN,
    four_rows,
    one_row,
    pinned_row,
    rank_shape,
    run_step,
    verified_rows,
)

from m3lab.clock.clock import Clock
from m3lab.compile.trace import build
from m3lab.kernels.post_attn import build_post_attn_kernel, trace_args
from m3lab.model.formats import e4m3_decode
from m3lab.step.step import DecodeStep, kernel_parameters


@pytest.mark.parametrize("run", [four_rows, one_row, pinned_row, verified_rows])
def test_partials_sums_and_residual_agree_with_the_reference(run):
    step, result = run()
    verdicts = step.verify(result)
    assert {v.name for v in verdicts} >= {"partial", "a", "a_sum"}
    assert not [v for v in verdicts if not v.passed]


def test_every_rank_holds_every_ranks_partials_and_the_same_sum():
    ranks = verified_rows()[1].ranks
    assert len(ranks) == 4
    for views in ranks[1:]:
        assert torch.equal(views.partials, ranks[0].partials)
        assert torch.equal(views.a, ranks[0].a)


def test_the_sum_over_ranks_is_taken_in_fp32_and_rounded_once():
    views = verified_rows()[1].ranks[2]
    total = torch.zeros(2, HIDDEN)
    for partial in views.partials:
        total = total + partial.float()
    assert torch.equal(views.a, total.bfloat16().float())


def test_a_solo_ranks_sum_is_its_own_partial():
    views = four_rows()[1].ranks[0]
    assert torch.equal(views.a, views.partials[0].float())


def test_a_partial_is_the_plain_product_of_row_and_weights():
    """fp64 of the published fp8 row by this rank's columns, a bf16 rounding apart."""
    step, result = verified_rows()
    views = result.ranks[0]
    w = e4m3_decode(step.weights.w_o[:, :2048]).double() * step.weights.s_o.double()[:, None]
    row = e4m3_decode(views.attnq).double() * views.attnq_s.double().reshape(-1, 1)
    want = row @ w.T
    assert torch.allclose(
        views.partials[0].double(), want, rtol=2**-8, atol=1e-5 * want.abs().max()
    )


def test_h_mid_is_the_rounded_sum_plus_the_residual():
    """Of the sum as every rank holds it, already rounded to bf16."""
    step, result = verified_rows()
    views = result.ranks[3]
    want = (views.a + step.inputs.h_in.float()).bfloat16().float()
    assert torch.equal(views.h_mid, want)


def test_one_token_leaves_h_mid_to_the_router():
    step, _ = one_row()
    for rank in step._ranks:
        left = rank.placed["h_mid"].read(torch.bfloat16, (1, HIDDEN))
        assert left.isnan().all()


@pytest.mark.parametrize("schedule", [{"cta_groups": 3, "seed": 1}, {"cta_groups": 2, "seed": 7}])
def test_bits_do_not_depend_on_the_schedule(schedule):
    want = run_step(2, npes=1, context=700, seed=2)[1].ranks[0]
    got = run_step(2, npes=1, context=700, seed=2, schedule=schedule)[1].ranks[0]
    for name in ("sp_o", "sp_m", "sp_l", "attnq", "a", "h_mid"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("tokens", [1, 2])
def test_no_line_is_polled_by_more_than_one_wave_of_a_cta(tokens):
    """Every wave of an output task on the line of a scale, or of a head's sums, is a queue eight
    times as long as it need be."""
    step = DecodeStep(rank_shape(), tokens, npes=1, context=300).prepare()
    clock = Clock()
    step.run(clock=clock)
    ctas = HIDDEN // 32 + tokens  # the output tasks, and the merges
    assert 0 < max(waves for waves, _ in clock.census.polled.values()) <= ctas


def test_from_twelve_tokens_the_owner_rank_sums_and_gathers():
    step, result = run_step(12, npes=4, context=[130 * (i + 1) for i in range(12)])
    tag = {"step": result.step, "layer": step.layer, "tokens": 12}
    gathered = [step.peers.view(rank, "a_ag", **tag) for rank in range(4)]
    for values, current in gathered:
        assert current.all()
        assert torch.equal(values, gathered[0][0])
    owner = torch.arange(HIDDEN) // 32 % 4
    sums = torch.zeros(12, HIDDEN)
    for rank in range(4):
        partials, current = step.peers.view(rank, "attn", **tag)
        assert current[..., owner == rank].all()
        assert not current[..., owner != rank].any()
        total = torch.zeros(12, HIDDEN)
        for source in range(4):
            total = total + partials[source].float().view(12, HIDDEN)
        sums[:, owner == rank] = total[:, owner == rank]
    assert torch.equal(gathered[0][0].float().view(12, HIDDEN), sums.bfloat16().float())


def test_with_a_timeline_every_cta_writes_all_its_points():
    """The interpreter's clock reads 0 here, as an unstamped point does: what counts is that 32
    words of each of the 256 CTAs are written and nothing else changes."""
    want = one_row()[1].ranks[0]
    step = DecodeStep(rank_shape(), 1, npes=1, context=300)
    step.prepare()
    timeline = step._memory.alloc("tl", 256 * 32 * 8, rank=0)
    timeline.write(torch.full((256, 32), -1))
    launcher = build_post_attn_kernel(**kernel_parameters(step), timeline=True)
    step.build = build(launcher, trace_args(), emit=("program",))
    arguments = step._ranks[0].arguments
    step._ranks[0].arguments = lambda: arguments() | {"tl": timeline.addr}
    got = step.run().ranks[0]
    assert timeline.read(torch.int64, (256, 32)).eq(0).all()
    assert torch.equal(got.a, want.a)
