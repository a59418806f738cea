"""The chained kernel reference: against the exact one, and across ranks, rows and padding."""

from __future__ import annotations

import pytest
import torch

from m3lab.model.context import random_context
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.model.weights import LayerWeights, random_layer
from m3lab.reference import exact
from m3lab.reference import kernel as ref
from m3lab.reference.compare import rel_l2

MODEL = ModelShape(hidden=2048, q_heads=16, inter=1024, shared_inter=1024)
ALARM = 1.2e-1  # model.md: kernel vs exact


@pytest.fixture(scope="module")
def layer() -> LayerWeights:
    return random_layer(MODEL, seed=11, experts="all")


def inputs(tokens: int, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, tokens, MODEL.hidden, generator=gen).bfloat16())


def exact_of(layer, step: ref.LayerStep, ar, res, contexts, q_len=1, static=None):
    """The exact layer with the kernel reference's own picks, so that only formats differ."""
    return exact.layer_step(
        layer,
        MODEL,
        ar,
        res,
        [None if c is None else exact.Dequantized(c, static) for c in contexts],
        q_len,
        blocks=[[s.blocks for s in row] for row in step.attention.selections],
        experts=step.mlp.route.experts[:, :-1],
    )


@pytest.mark.parametrize(
    ("lengths", "q_len"),
    [((1,), 1), ((16 * 128,), 1), ((17 * 128 + 1, 700), 2), ((3000, 2049, 128, 5), 4)],
)
def test_the_number_formats_move_the_result_by_less_than_the_alarm(
    layer, lengths, q_len, record_property
):
    contexts = [random_context(MODEL, n, request=i) for i, n in enumerate(lengths)]
    ar, res = inputs(len(lengths) * q_len)
    step = ref.layer_step(layer, RankShape(MODEL, 4), ar, res, contexts, q_len)
    want = exact_of(layer, step, ar, res, contexts, q_len)
    errors = {
        "q": rel_l2(step.pre.q, want.heads.q),
        "a": rel_l2(step.attention.a, want.attention.a),
        "h_mid": rel_l2(step.attention.h_mid, want.attention.h_mid),
        "xn": rel_l2(step.mlp.xn, want.mlp.xn),
        "out": rel_l2(step.mlp.out, want.mlp.out),
    }
    for name, error in errors.items():
        record_property(name, f"{error:.2e}")
    assert max(errors.values()) < ALARM
    assert errors["out"] > 1e-3  # the formats do round


def test_a_static_scale_cache_stays_below_the_alarm(layer):
    context = random_context(MODEL, 2500, static=True)
    static = (context.k_scale_static, context.v_scale_static)
    ar, res = inputs(1)
    step = ref.layer_step(layer, RankShape(MODEL, 4), ar, res, [context], static=static)
    want = exact_of(layer, step, ar, res, [context], static=static)
    assert rel_l2(step.attention.a, want.attention.a) < ALARM
    assert rel_l2(step.mlp.out, want.mlp.out) < ALARM


def test_every_width_gives_the_same_layer(layer):
    contexts = [random_context(MODEL, 2300), random_context(MODEL, 90, request=1)]
    ar, res = inputs(2)
    steps = {w: ref.layer_step(layer, RankShape(MODEL, w), ar, res, contexts) for w in (1, 2, 4, 8)}
    for w, step in steps.items():
        assert len(step.attention.partials) == len(step.mlp.partials) == w
        for one, four in zip(step.attention.selections, steps[4].attention.selections, strict=True):
            for a, b in zip(one, four, strict=True):
                assert torch.equal(a.blocks, b.blocks)
        # fp8 scales are a rank's own, so widths differ by roundings, not by content
        assert rel_l2(step.attention.a, steps[4].attention.a) < 5e-2
        assert rel_l2(step.attention.h_mid, steps[4].attention.h_mid) < 5e-3


def test_each_rank_attends_with_its_own_kv_head(layer):
    context = random_context(MODEL, 300)
    ar, res = inputs(1)
    shape = RankShape(MODEL, 8)  # two ranks share a kv head
    step = ref.layer_step(layer, shape, ar, res, [context])
    q, rows = step.pre.q, ref.step_rows([300])
    cached = ref.insert(step.pre, [context], 1)
    for rank in range(8):
        kv = rank // 2
        part = ref.split(
            q[0, 2 * rank : 2 * rank + 2],
            torch.cat([cached[0].k(b) for b in range(3)])[:300, kv],
            torch.cat([cached[0].k_scale(b) for b in range(3)])[:300, kv],
            torch.cat([cached[0].v(b) for b in range(3)])[:300, kv],
            torch.cat([cached[0].v_scale(b) for b in range(3)])[:300, kv],
            rows[0].keys,
            MODEL.sm_scale,
        )
        got = step.attention.split[rank][0]
        assert all(torch.equal(a, b) for a, b in zip(got, part, strict=True))


def test_a_solo_rank_reduces_its_own_partial_alone(layer):
    context = random_context(MODEL, 300)
    ar, res = inputs(2)
    shape = RankShape(MODEL, 4)
    contexts = [context, None]
    whole = ref.layer_step(layer, shape, ar, res, contexts)
    solo = ref.layer_step(layer, shape, ar, res, contexts, ranks=[2])
    assert torch.equal(solo.attention.a, whole.attention.partials[2])
    assert torch.equal(solo.attention.attnq[0], whole.attention.attnq[2])
    assert torch.equal(solo.mlp.out, solo.mlp.partials[0])


def test_a_padding_row_full_of_nan_leaves_the_other_rows_bits_alone(layer):
    shape = RankShape(MODEL, 4)
    contexts = [random_context(MODEL, 2500), None, random_context(MODEL, 130, request=1)]
    ar, res = inputs(6)
    clean = ref.layer_step(layer, shape, ar, res, contexts, 2)
    ar[2:4] = res[2:4] = torch.nan
    dirty = ref.layer_step(layer, shape, ar, res, contexts, 2)
    live = [0, 1, 4, 5]
    assert dirty.mlp.out[2:4].isnan().all()
    for name in ("a", "h_mid"):
        a, b = getattr(clean.attention, name), getattr(dirty.attention, name)
        assert torch.equal(a[live], b[live])
    assert torch.equal(clean.mlp.route.experts[live], dirty.mlp.route.experts[live])
    assert torch.equal(clean.mlp.out[live], dirty.mlp.out[live])
    assert clean.mlp.out[live].isfinite().all()


def test_a_row_of_a_verify_sees_what_a_lone_token_would(layer):
    """Row 0 of two at 2177 keys is the one token at 2176: the second row's key is not its."""
    shape = RankShape(MODEL, 4)
    ar, res = inputs(2)
    both = ref.layer_step(layer, shape, ar, res, [random_context(MODEL, 2177)], 2)
    first = ref.layer_step(layer, shape, ar[:1], res[:1], [random_context(MODEL, 2176)])
    lone, of_two = first.attention.selections[0], both.attention.selections[0]
    assert [s.n_ctx for s in lone] == [s.n_ctx for s in of_two] == [16 * 128] * 4
    assert [s.n_ctx for s in both.attention.selections[1]] == [15 * 128 + 1] * 4
    assert all(torch.equal(a.blocks, b.blocks) for a, b in zip(lone, of_two, strict=True))
    assert rel_l2(both.attention.a[:1], first.attention.a) < 1e-3
    # and the second attends to the first's key: change the first row, and it moves
    ar[0] = -ar[0]
    moved = ref.layer_step(layer, shape, ar, res, [random_context(MODEL, 2177)], 2)
    assert not torch.equal(moved.attention.a[1], both.attention.a[1])


def test_new_keys_replace_the_contexts_last_ones(layer):
    context = random_context(MODEL, 130)
    ar, res = inputs(3)
    step = ref.layer_step(layer, RankShape(MODEL, 4), ar, res, [context], 3)
    cached = ref.insert(step.pre, [context], 3)[0]
    assert torch.equal(cached.k(0)[:127], context.k(0)[:127])  # keys 127, 128, 129 are new
    assert torch.equal(cached.k(0)[127], step.pre.k.bytes[0])
    assert torch.equal(cached.v(1)[:2], step.pre.v.bytes[1:])
    assert torch.equal(cached.v_scale(1)[:2], step.pre.v.scale[1:])
    assert torch.equal(cached.index_k(1)[:2], step.pre.ik[1:])
    assert torch.equal(cached.k(1)[2:], context.k(1)[2:])


def test_the_mxfp8_shared_expert_of_a_layer_stored_as_mxfp4_is_the_same_expert(layer):
    shape, (a, h) = RankShape(MODEL, 4), inputs(2)
    table = ref.mlp_half(layer, shape, a.float(), h.float(), [1])
    own = ref.mlp_half(layer, shape, a.float(), h.float(), [1], shared_fp8=True)
    assert rel_l2(own.out, table.out) < 1e-6


def test_scores_are_only_made_past_16_blocks(layer):
    contexts = [random_context(MODEL, 2048), random_context(MODEL, 2049, request=1), None]
    ar, res = inputs(3)
    scores = ref.layer_step(layer, RankShape(MODEL, 4), ar, res, contexts).scores
    assert [None if s is None else tuple(s.shape) for s in scores] == [None, (4, 17), None]


def test_a_step_of_too_few_rows_is_refused(layer):
    ar, res = inputs(1)
    with pytest.raises(ValueError, match="2 requests of 1 tokens are 2 rows, got 1"):
        ref.layer_step(layer, RankShape(MODEL, 4), ar, res, [None, None])


def test_a_context_shorter_than_the_new_tokens_is_refused():
    with pytest.raises(ValueError, match="4 new tokens must have at least that context, got 3"):
        ref.step_rows([3], 4)


def test_an_attention_only_layer_has_no_mlp_half():
    bare = random_layer(MODEL, experts=None)
    a, h = inputs(1)
    with pytest.raises(ValueError, match="holds no experts"):
        ref.mlp_half(bare, RankShape(MODEL, 4), a.float(), h.float())
