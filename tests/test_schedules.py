"""The same bits under every schedule: random turns of CTA groups, late ranks, late stages.

Lockstep hides what a GPU may show; here the four ranks' CTAs are cut into groups that take turns at
barriers and polls in a random order, with every check on and unwritten memory poisoned.
"""

import pytest

pytest.importorskip("flydsl")

from m3lab.interpreter import Memory
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.step import DecodeStep, StepResult
from m3lab.verify.verdicts import unequal_bits

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), tp=4)
STAGES = ("select", "split", "merge", "o_proj", "router", "routing", "up_gate", "down")


def assert_same(a: StepResult, b: StepResult) -> None:
    """Every published intermediate of every rank has the same bits."""
    for x, y in zip(a.ranks, b.ranks, strict=True):
        assert not x.missing
        assert not y.missing
        for name in x.tensors():
            assert unequal_bits(x[name], y[name]) == 0, name


@pytest.fixture(scope="module")
def small():
    memory = Memory(poison=True)
    step = DecodeStep(SMALL, 2, context=[2049, 100], until=None, memory=memory).prepare()
    return step, step.run()


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_change_no_bit(small, seed):
    step, expected = small
    result = step.run(seed=seed, cta_groups=1 + seed % 4)
    assert_same(result, expected)
    assert seed % 4 == 0 or result.report.routines > 4


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_held_back_changes_no_bit(small, rank):
    step, expected = small
    assert_same(step.run(seed=rank, delay={rank: 40}), expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_held_back_in_a_stage_changes_no_bit(small, stage):
    step, expected = small
    assert_same(step.run(seed=1, delay={(2, stage): 40, stage: 3}), expected)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_twenty_schedules_and_each_rank_late_at_full_shape(tokens):
    step = DecodeStep(tokens=tokens, context=2049, until=None).prepare()
    expected = step.run()
    for seed in range(20):
        assert_same(step.run(seed=seed, cta_groups=1 + seed % 4), expected)
    for rank in range(4):
        for stage in STAGES:
            assert_same(step.run(seed=rank, delay={(rank, stage): 40}), expected)
