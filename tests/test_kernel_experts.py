"""Stage 5, routing, up / gate, down and the MLP all-reduce, run as part of the traced kernel."""

from functools import partial

import pytest
import torch
from expert_steps import (
    POOL,
    four_tokens,
    one_token,
    other_constants,
    rank_shape,
    run_whole,
    three_tokens,
)

from m3lab.clock.clock import Clock
from m3lab.model.formats import dequantize_mxfp8, quantize_mxfp8
from m3lab.model.weights import SHARED_TABLES
from m3lab.reference import kernel as ref
from m3lab.reference.compare import rel_l2
from m3lab.reference.numerics import mx_values
from m3lab.step import step as driver

LIVE = [one_token, three_tokens, four_tokens, other_constants]
STAGE_BOUND = 2e-3


def failed(step, result):
    return [v for v in step.verify(result) if not v.passed]


# --- routing ---


@pytest.mark.parametrize("run", LIVE)
def test_the_record_holds_the_four_largest_keys_in_order_then_the_shared_expert(run):
    views = run()[1].ranks[0]
    for row, keys in enumerate(views.keys[0].tolist()):
        best = sorted(range(128), key=lambda e: keys[e], reverse=True)[:4]
        assert views.experts[row].tolist() == [*best, 128]


@pytest.mark.parametrize("run", LIVE)
def test_weights_are_shares_of_the_chosen_sigmoids_without_bias(run):
    step, result = run()
    views = result.ranks[0]
    for row in range(step.tokens):
        chosen = views.sigmoids[0, row, views.experts[row, :4].long()].double()
        want = chosen / chosen.sum() * step.model.route_scale
        assert torch.allclose(views.weights[row, :4].double(), want, rtol=1e-6)
        assert views.weights[row, 4] == step.model.shared_weight


def test_of_equal_keys_the_lower_experts_are_picked():
    """A bias so large that a score's bits under it are lost: the pool ties, apart from the ids."""
    views = run_whole(2, bias=torch.full((128,), 2.0**20))[1].ranks[0]
    assert views.experts[:, :4].tolist() == [list(POOL[:4])] * 2


# --- products ---


def tables(step, rank, name, expert):
    """fp64 of a rank's shard of one expert's table."""
    shard = ref.RankShard(step.weights, step.shape, rank)
    return mx_values(*getattr(shard, name)(expert)).double()


def plain_mid(x, w13, limit):
    gate, up = (x @ w13.T).chunk(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


@pytest.mark.parametrize("run", LIVE)
def test_every_slots_intermediate_is_its_own_experts(run):
    step, result = run()
    views = result.ranks[0]
    x = dequantize_mxfp8(views.xn8, views.xsc).double()
    for row in range(step.tokens):
        for slot, expert in enumerate(views.experts[row].tolist()):
            want = plain_mid(x[row], tables(step, 0, "w13", expert), step.model.swiglu_limit)
            got = views.intermediates[row, slot].double()
            assert ((got - want).abs() <= want.abs() * 2**-8 + 1e-5).all(), (row, slot)


@pytest.mark.parametrize("run", LIVE)
def test_the_output_is_the_weighted_sum_of_the_slots_down_rows(run):
    step, result = run()
    views = result.ranks[0]
    for row in range(step.tokens):
        want = torch.zeros(step.model.hidden, dtype=torch.float64)
        for slot, expert in enumerate(views.experts[row].tolist()):
            mid = dequantize_mxfp8(*quantize_mxfp8(views.intermediates[row, slot])).double()
            down = tables(step, 0, "w2", expert) @ mid
            want += views.weights[row, slot].double() * down
        assert rel_l2(views.ar_out[row], want.float()) <= STAGE_BOUND


def test_rows_that_share_every_expert_keep_their_own_values():
    pool = (5, 17, 90, 127)
    step, result = run_whole(4, experts=pool)
    views = result.ranks[0]
    assert all(set(row[:4]) == set(pool) for row in views.experts.tolist())
    assert len({tuple(row.tolist()) for row in views.ar_out}) == 4
    assert failed(step, result) == []


def test_the_sum_over_ranks_is_taken_in_rank_order_and_rounded_once():
    step, result = run_whole(2, npes=4)
    for views in result.ranks:
        total = torch.zeros(2, step.model.hidden)
        for pushed in views.ffn:
            total = total + pushed
        assert torch.equal(views.ar_out, total.bfloat16().float())
    assert failed(step, result) == []


# --- shapes and builds ---


@pytest.mark.parametrize(
    ("tp", "tokens", "npes", "inter"),
    [
        (8, 4, 1, 3072),  # three chunks a down row: it ends within a wave, scales are padded
        (8, 2, 1, 1024),
        (4, 4, 1, 3072),
        (2, 2, 2, 256),
        (2, 1, 1, 3072),
    ],
)
def test_other_widths_run_the_same_stages(tp, tokens, npes, inter):
    step, result = run_whole(tokens, shape=rank_shape(tp, inter), npes=npes)
    assert failed(step, result) == []


def with_mxfp8_shared_expert(patch):
    """The driver with the shared expert's own MXFP8 tables."""
    parameters, shard = driver.kernel_parameters, ref.RankShard
    patch.setattr(driver, "MLP_WEIGHTS", (*driver.MLP_WEIGHTS, *SHARED_TABLES))
    patch.setattr(driver, "prepare", partial(driver.prepare, shared_fp8=True))
    patch.setattr(driver, "kernel_parameters", lambda s: parameters(s) | {"shared_fp8": True})
    patch.setattr(ref, "RankShard", partial(shard, shared_fp8=True))


@pytest.mark.parametrize(("tp", "tokens", "inter"), [(4, 1, 512), (4, 4, 512), (8, 2, 3072)])
def test_an_mxfp8_shared_expert_gives_the_same_layer(monkeypatch, tp, tokens, inter):
    with_mxfp8_shared_expert(monkeypatch)
    step, result = run_whole(tokens, shape=rank_shape(tp, inter))
    assert failed(step, result) == []


# --- the schedule, the timeline ---


@pytest.mark.parametrize(
    "schedule",
    [
        {"cta_groups": 4, "seed": 1},
        {"cta_groups": 3, "seed": 2, "delay": {"router": 40}},
        {"cta_groups": 2, "seed": 3, "delay": {"up_gate": 25}},
    ],
)
def test_bits_do_not_depend_on_the_schedule(schedule):
    want = four_tokens()[1].ranks[0].tensors()
    got = run_whole(4, run=schedule)[1].ranks[0].tensors()
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def stamped(tokens):
    """{point: CTAs that passed it}, the placement, of a launch with a modelled clock."""
    step, result = run_whole(tokens, timeline=True, run={"clock": Clock()})
    ticks = result.stamps[0]
    return {p: set((ticks[:, p] != 0).nonzero()[:, 0].tolist()) for p in range(32)}, step


@pytest.mark.parametrize("tokens", [1, 4])
def test_points_are_stamped_by_the_ctas_that_pass_them(tokens):
    from m3lab.kernels.plan import Plan

    at, step = stamped(tokens)
    place = Plan(step.shape, tokens, npes=1)
    every = set(range(256))
    down = place.ctas_of("down", place.down_tasks)
    router = place.ctas_of("router", place.router_tasks)
    shared = place.ctas_of("shared", place.shared_tasks)
    routed = {cta for cta in every if place.ug_tasks_of(cta)}
    for point in (1, 4, 5):
        assert at[point] == every, point
    for point in (22, 24, 25, 26, 23):
        assert at[point] == router, point
    for point in (21, 2, 6, 7, 8):
        assert at[point] == routed | down | shared, point
    assert at[9] == routed
    assert at[10] == at[11] == down
    for point in (16, 27, 28, 29, 30, 31):
        assert at[point] == set(), point
