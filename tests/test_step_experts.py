"""The whole layer on the interpreter against both references: router, experts, both all-reduces.

Every launch runs with every check on and unwritten memory poisoned; expert tables hold data for a
pool of experts only. A small hidden size keeps the fast tests fast: the stages only count their
tasks by it. The slow tests are MiniMax-M3's own shapes.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from kernel_steps import failures, with_residual

pytest.importorskip("flydsl")

from m3lab.interpreter import Memory
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.model.weights import random_layer
from m3lab.step import DecodeStep, StepResult
from m3lab.verify.verdicts import unequal_bits

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), 4)
TWO = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), 2)
EIGHT = RankShape(ModelShape(hidden=2048, inter=1024, shared_inter=1024), 8)
CONTEXTS = (2049, 100, 1, 2048, 8192, 65536)
POOL = (0, 1, 2, 3, 40, 77, 126, 127)


def whole(
    tokens, change=None, weights=None, shape=SMALL, **options
) -> tuple[DecodeStep, StepResult]:
    """(step, its launch) of the whole layer; ``change(inputs)`` -> the inputs to use."""
    options = {"npes": 1, "until": None, "experts": POOL, "memory": Memory(poison=True)} | options
    step = DecodeStep(shape, tokens, **options)
    inputs = step.random_inputs()
    step.prepare(change(inputs) if change else inputs, weights)
    return step, step.run()


@lru_cache
def four_rows():
    """Solo, four requests."""
    return whole(4, context=list(CONTEXTS[:4]))


def assert_same_rows(a: StepResult, b: StepResult, rows: int, but=()):
    """Every published value of the first ``rows`` rows has the same bits in both launches."""
    for x, y in zip(a.ranks, b.ranks, strict=True):
        for name in x.tensors():
            if name not in but:
                assert unequal_bits(x.rows(name, rows), y.rows(name, rows)) == 0, name


# --- against the references ---


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_every_intermediate_is_the_references_at_every_token_count(tokens):
    step, result = whole(tokens, context=list(CONTEXTS[:tokens]))
    assert failures(step, result) == []


def test_four_rows_of_one_to_2049_keys_are_the_references():
    step, result = four_rows()
    assert failures(step, result) == []
    assert result.ranks[0].missing == []


def test_four_ranks_agree_with_the_reference_and_with_each_other():
    step, result = whole(2, context=[2049, 300], npes=4)
    assert failures(step, result) == []


def test_eight_ranks_of_eight_heads_agree_with_the_reference():
    step, result = whole(2, context=[2049, 300], npes=8, shape=EIGHT)
    assert failures(step, result) == []


def test_a_rank_of_two_kv_heads_selects_for_each_and_agrees_with_the_reference():
    step, result = whole(2, context=[2049, 4000], shape=TWO)
    assert failures(step, result) == []
    first, second = (step.selections[0][2 + head].blocks.tolist() for head in (0, 1))
    assert first != second


def test_a_draft_of_two_rows_a_request_is_the_references():
    step, result = whole(4, q_len=2, context=[2050, 129], seed=4)
    assert failures(step, result) == []


def test_the_kernel_cut_after_the_router_publishes_what_the_whole_one_does():
    _, cut = whole(2, context=[2049, 100], until="router")
    _, full = whole(2, context=[2049, 100])
    for name, tensor in cut.ranks[0].tensors().items():
        assert unequal_bits(tensor, full.ranks[0][name]) == 0, name


# --- rows on their own ---


@pytest.mark.parametrize("value", [float("nan"), 3.0e38])
def test_a_live_rows_bits_do_not_depend_on_what_a_padding_row_holds(value):
    rows = {"context": [2049, 100, 700], "pad_rows": 1}
    _, finite = whole(4, **rows)
    _, wild = whole(4, change=with_residual(value), **rows)
    assert_same_rows(finite, wild, 3)
    assert not finite.ranks[0]["ar_out"][3].isnan().any()


def test_a_rows_bits_do_not_depend_on_the_other_rows_contexts_and_values():
    _, first = four_rows()

    def others(inputs):
        h_in, q = inputs.h_in.clone(), inputs.q.clone()
        h_in[1:], q[1:] = h_in[1:].flip(-1), -q[1:]
        return replace(inputs, h_in=h_in, q=q)

    _, second = whole(4, change=others, context=[2049, 3000, 800, 5])
    # page ids are the block table's, which the other requests share
    assert_same_rows(first, second, 1, but=("table",))
    assert unequal_bits(first.ranks[0]["ar_out"][1:], second.ranks[0]["ar_out"][1:]) > 1000


# --- experts nobody chose ---


def test_experts_outside_the_routed_set_are_never_read():
    step, first = four_rows()
    routed = sorted(set(first.ranks[0]["experts"][:, :4].flatten().tolist()))
    assert len(routed) < len(POOL)
    only = replace(random_layer(SMALL.model, 0, experts=routed), bias=step.weights.bias)
    _, second = whole(4, weights=only, context=list(CONTEXTS[:4]))
    assert_same_rows(first, second, 4)


def test_tokens_are_routed_by_their_own_scores_to_several_experts():
    _, result = four_rows()
    picks = result.ranks[0]["experts"][:, :4]
    assert len({tuple(sorted(row)) for row in picks.tolist()}) > 1
    assert set(picks.flatten().tolist()) <= set(POOL)


def test_equal_scores_go_to_the_lower_experts():
    """Gate rows of zeros: every sigmoid is one half, so the bias decides, and equal biases tie."""
    model = SMALL.model
    layer = random_layer(model, 0, experts=POOL)
    bias = torch.full((128,), -4.0)
    bias[list(POOL)] = 0.25
    tied = replace(layer, w_gate=torch.zeros_like(layer.w_gate), bias=bias)
    step, result = whole(2, weights=tied, context=100)
    assert failures(step, result) == []
    assert result.ranks[0]["experts"].tolist() == [[0, 1, 2, 3, 128]] * 2
    assert torch.equal(result.ranks[0]["weights"], torch.tensor([[0.5, 0.5, 0.5, 0.5, 1.0]] * 2))


# --- full shapes ---


def context_sets(tokens: int) -> list[list[int]]:
    """Every context of CONTEXTS in some row, ``tokens`` a step."""
    steps = -(-len(CONTEXTS) // tokens)
    return [
        [CONTEXTS[(s * tokens + k) % len(CONTEXTS)] for k in range(tokens)] for s in range(steps)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("solo", [True, False])
@pytest.mark.parametrize(
    ("tokens", "contexts"), [(n, contexts) for n in (1, 2, 3, 4) for contexts in context_sets(n)]
)
def test_full_shapes_at_every_context(tp, solo, tokens, contexts):
    step = DecodeStep(
        RankShape(tp=tp), tokens, context=contexts, npes=1 if solo else tp, until=None
    )
    with step.prepare():
        result = step.run()
        assert failures(step, result) == []
