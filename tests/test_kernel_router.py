"""Stage 4, the norm, its MXFP8 and the router's scores, run as part of the traced kernel."""

import struct

import pytest
import torch
from expert_steps import POOL, equal_scores, four_tokens, one_token, three_tokens

from m3lab.model.formats import dequantize_mxfp8

LIVE = [one_token, three_tokens, four_tokens]


def residual_sum(step, views):
    """fp64 of the attention row plus the residual, unrounded."""
    return views.a.double() + step.inputs.h_in.double()


def normed(step, views):
    """The Gemma norm in fp64."""
    x = residual_sum(step, views)
    rms = (x.square().mean(-1, keepdim=True) + step.model.rms_eps).sqrt()
    return x / rms * (1 + step.weights.g_post.double())


@pytest.mark.parametrize("run", LIVE)
def test_every_stage_agrees_with_the_reference(run):
    step, result = run()
    verdicts = step.verify(result)
    assert {"xn8", "xsc", "sigmoid", "keys", "copies"} <= {v.name for v in verdicts}
    assert not [v for v in verdicts if not v.passed]


@pytest.mark.parametrize("run", LIVE)
def test_the_quantized_row_is_the_norm_of_the_unrounded_sum(run):
    step, result = run()
    views = result.ranks[0]
    want = normed(step, views)
    got = dequantize_mxfp8(views.xn8, views.xsc).double()
    scale = torch.exp2(views.xsc.double() - 127).repeat_interleave(32, -1)
    # half an E4M3 step, or half its smallest subnormal, and the bf16 rounding before it
    bound = want.abs() * (2**-4 + 2**-8) + scale * 2**-10
    assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("run", LIVE)
def test_a_blocks_scale_is_the_least_power_of_two_that_fits_its_largest_value(run):
    step, result = run()
    views = result.ranks[0]
    amax = normed(step, views).abs().unflatten(-1, (-1, 32)).amax(-1)
    limit = 448 * torch.exp2(views.xsc.double() - 127)
    assert (amax <= limit * (1 + 2**-8)).all()
    assert (amax > limit / 2 * (1 - 2**-8)).all()


def test_one_token_leaves_the_rounded_residual_sum_in_h_mid():
    step, result = one_token()
    views = result.ranks[0]
    assert torch.equal(views.h_mid, residual_sum(step, views).float().bfloat16().float())


@pytest.mark.parametrize("run", LIVE)
def test_a_sigmoid_is_the_logits_a_bf16_rounding_apart(run):
    step, result = run()
    views = result.ranks[0]
    logit = normed(step, views).float().bfloat16().double() @ step.weights.w_gate.double().T
    got = views.sigmoids[0].double()
    assert ((got - torch.sigmoid(logit)).abs() <= logit.abs() * 2**-9 + 1e-5).all()


def key_of(score, expert):
    """The routing key by plain integers: the float's order, ties to the lower expert."""
    (bits,) = struct.unpack("<I", struct.pack("<f", score))
    ordered = bits if bits < 1 << 31 else -1 - (bits & 0x7FFFFFFF)
    return ordered // 128 * 128 + 127 - expert


@pytest.mark.parametrize("run", LIVE)
def test_keys_are_the_biased_scores_bits_with_the_expert_below(run):
    step, result = run()
    views = result.ranks[0]
    for sigmoids, keys in zip(views.sigmoids[0], views.keys[0], strict=True):
        scores = (sigmoids + step.weights.bias).tolist()
        assert min(scores) < 0 < max(scores)
        assert keys.tolist() == [key_of(score, e) for e, score in enumerate(scores)]


@pytest.mark.parametrize("run", LIVE)
def test_all_eight_copies_hold_the_same_scores(run):
    views = run()[1].ranks[0]
    assert len(views.keys) == 8
    for copy in range(1, 8):
        assert torch.equal(views.keys[copy], views.keys[0])
        assert torch.equal(views.sigmoids[copy], views.sigmoids[0])


def test_a_row_of_zeros_has_the_least_scale_and_equal_scores():
    views = equal_scores()[1].ranks[0]
    assert (views.xn8[1] == 0).all()
    assert (views.xsc[1] == 1).all()
    assert (views.sigmoids[:, 1] == 0.5).all()
    assert views.keys[0, 1].argsort(descending=True).tolist() == list(range(128))


def test_the_router_does_not_know_which_experts_hold_data():
    """Scores of all 128 experts are finite, whatever the tables hold."""
    views = one_token()[1].ranks[0]
    assert len(POOL) < 128
    assert views.sigmoids.isfinite().all()
