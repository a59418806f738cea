"""Decode steps through several layers on one scratch: equal to the reference all the way."""

from functools import lru_cache

import pytest
import torch

pytest.importorskip("flydsl")

from m3lab.interpreter import Memory
from m3lab.model.shapes import CacheLayout, ModelShape, RankShape
from m3lab.step import DecodeStep
from m3lab.step.loop import DecodeLoop

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), 4)


def loop(tokens=2, **options) -> DecodeLoop:
    """Over the edges of a block (128 keys) and of scoring at all (2048 keys)."""
    defaults = {"npes": 1, "prompt": [2046, 126], "memory": Memory(poison=True)}
    return DecodeLoop(SMALL, tokens, **defaults | options).prepare()


@lru_cache
def three_layers_four_steps():
    """(loop, its runs)."""
    made = loop()
    return made, list(made.run())


def failed(runs) -> list[tuple[int, int, str]]:
    return [(r.step, r.layer, v.name) for r in runs for v in r.verdicts if not v.passed]


def test_three_layers_and_four_steps_are_the_references_all_the_way():
    _, runs = three_layers_four_steps()
    assert [(r.step, r.layer) for r in runs] == [(s, i) for s in range(4) for i in range(3)]
    assert failed(runs) == []
    errors = [v.error for r in runs for v in r.verdicts if v.name.startswith("loop_")]
    assert len(errors) == 24
    assert max(errors) < 2e-3  # nothing flips on this seed, so the chains never part


def test_the_step_counter_makes_the_tags_and_contexts_grow_by_a_key_a_step():
    made, runs = three_layers_four_steps()
    assert [r.result.step for r in runs[::3]] == [1, 2, 3, 4]
    assert made.stack[2].context == [2050, 130]
    assert [step.layer for step in made.stack] == [3, 4, 5]
    assert made.stack[0].mailboxes is made.stack[2].mailboxes


def test_layer_outputs_ping_pong_and_the_last_layers_stay_in_the_odd_buffer():
    made, runs = three_layers_four_steps()
    out = [made.stack[i]._ranks[0].arguments()["ar_out"] for i in range(3)]
    assert out[0] == out[2] != out[1]
    assert out[0] == made.buffers[0][1]["ar_out"].addr
    last = made.buffers[0][1]["ar_out"].read(torch.bfloat16, (2, 2048)).float()
    assert torch.equal(last, runs[-1].result.ranks[0]["ar_out"])


def test_the_caches_hold_every_layers_own_keys_in_place():
    made, _ = three_layers_four_steps()
    for step in made.stack:
        for request, block in ((0, 15), (0, 16), (1, 0), (1, 1)):
            ctx = step.inputs.contexts[request]
            n = min(128, ctx.length - 128 * block)
            cached = step._ranks[0].caches.read_block(step.block_ids[request, block])
            assert torch.equal(cached.k[:n, 0], ctx.k(block)[:n, 0])
            assert torch.equal(cached.v[:n, 0], ctx.v(block)[:n, 0])
            assert torch.equal(cached.k_scale[:n, 0], ctx.k_scale(block)[:n, 0])


def test_an_old_key_that_is_lost_between_steps_is_noticed_in_its_layer():
    made = loop(1, layers=2, steps=2, prompt=40)
    runs = made.run()
    first = [next(runs), next(runs)]
    assert failed(first) == []
    step = made.stack[1]
    ctx = step.inputs.contexts[0]
    flipped = ctx.v(0)[3:4, :1] ^ 0x80
    scales = (ctx.k_scale(0)[3:4, :1], ctx.v_scale(0)[3:4, :1])
    step._ranks[0].caches.write_kv(
        step.block_ids[0, 0], ctx.k(0)[3:4, :1], flipped, *scales, first=3
    )
    found = failed(runs)
    assert {(s, i) for s, i, _ in found} == {(1, 1)}
    assert "sp_o" in {name for _, _, name in found}


def test_keys_may_only_grow_and_only_within_the_room():
    made = loop(1, layers=1, steps=1, prompt=40)
    step = made.stack[0]
    for length in (39, 42):
        step_of = DecodeStep(SMALL, 1, npes=1, context=length)
        with pytest.raises(ValueError, match=rf"request 0 must have 40\.\.41 keys, got {length}"):
            step.advance(step_of.random_inputs())


@pytest.mark.parametrize("options", [{"layers": 0}, {"steps": 0}])
def test_a_loop_of_nothing_is_refused(options):
    with pytest.raises(ValueError, match="layers and steps must be at least 1"):
        loop(**options)


@pytest.mark.slow
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(16, True)])
def test_four_ranks_are_the_references_all_the_way(q_len, layout):
    prompt = [2046, 126, 300, 4000][: 4 // q_len]
    made = loop(4, npes=4, q_len=q_len, layout=layout, prompt=prompt)
    for run in made.run(seed=q_len, cta_groups=3):
        assert failed([run]) == []


@pytest.mark.slow
def test_three_layers_at_full_shape():
    """Of one rank: four ranks' tables of three layers outgrow the arena of a 24 GB machine."""
    with DecodeLoop(tokens=2, npes=1, prompt=[2046, 127], steps=2).prepare() as made:
        for run in made.run():
            assert failed([run]) == []
