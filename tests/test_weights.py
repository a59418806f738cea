"""A rank's prepared bytes are the model's weights, cut and reordered and nothing else."""

from dataclasses import replace

import pytest
import torch

from m3lab.interpreter.memory import BASE, Memory
from m3lab.layout import shard
from m3lab.layout import shuffle as sh
from m3lab.model import weights as w
from m3lab.model.formats import dequantize_mxfp8, e4m3_decode
from m3lab.model.shapes import TP_WIDTHS, IndexHeads, ModelShape, RankShape

SMALL = ModelShape(hidden=2048, q_heads=16, inter=1024, shared_inter=1024)
EXPERTS = (3, 127)


@pytest.fixture(scope="module")
def layer() -> w.LayerWeights:
    return w.random_layer(SMALL, seed=5, experts=EXPERTS)


# ------------------------------------------------------------------------------- random layers


def test_a_layer_is_a_function_of_its_seed(layer):
    again = w.random_layer(SMALL, seed=5, experts=EXPERTS)
    other = w.random_layer(SMALL, seed=6, experts=None)
    for name in ("g_in", "w_q", "s_o", "w_gate", "bias"):
        assert torch.equal(getattr(layer, name), getattr(again, name))
        assert not torch.equal(getattr(layer, name), getattr(other, name))


def test_an_experts_content_does_not_depend_on_the_others(layer):
    alone = w.random_layer(SMALL, seed=5, experts=[127])
    assert alone.present == (127, 128)
    assert torch.equal(alone.dequant("w13", 127), layer.dequant("w13", 127))
    assert torch.equal(alone.dequant("w2", 128), layer.dequant("w2", 128))
    assert not torch.equal(layer.dequant("w2", 127), layer.dequant("w2", 128))


@pytest.mark.parametrize("name", ["w_q", "w_k", "w_v", "w_iq", "w_ik", "w_o", "w13", "w2"])
def test_weights_keep_a_rows_variance_near_one(layer, name):
    values = layer.dequant(name, 3 if name in ("w13", "w2") else None)
    assert bool(values.isfinite().all())
    assert 0.6 < values.std() * values.shape[1] ** 0.5 < 1.5
    assert abs(values.mean()) * values.shape[1] ** 0.5 < 0.02


def test_an_absent_expert_reads_as_nan(layer):
    assert bool((layer.s13[5] == 0xFF).all())
    assert bool((layer.s2[5] == 0xFF).all())
    with pytest.raises(ValueError, match="w13 holds no data for expert 5"):
        layer.dequant("w13", 5)


def test_an_attention_layer_has_no_experts():
    layer = w.random_layer(SMALL, experts=None)
    assert layer.w13 is None
    assert layer.present == ()
    with pytest.raises(ValueError, match="holds no data"):
        layer.dequant("w13", 0)
    assert shard.prepare(layer, RankShape(SMALL), 0).w13 is None


@pytest.mark.parametrize(
    ("experts", "message"), [([129], r"0\.\.128, got 129"), ("some", "got 'some'")]
)
def test_experts_that_are_not_there_are_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        w.random_layer(SMALL, experts=experts)


def test_a_misshapen_weight_is_refused_by_name(layer):
    with pytest.raises(ValueError, match=r"w_k must be torch\.uint8 \(512, 2048\), got .*\(1, 2\)"):
        replace(layer, w_k=torch.zeros(1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"bias must be torch\.float32"):
        replace(layer, bias=layer.bias.bfloat16())


def test_only_quantized_weights_dequantize(layer):
    with pytest.raises(ValueError, match="w_gate is not a quantized weight"):
        layer.dequant("w_gate")
    with pytest.raises(ValueError, match="holds no shared_w13"):
        layer.dequant("shared_w13")


# ------------------------------------------------------------------------------------- prepare


def prepared(layer: w.LayerWeights, tp: int, **options) -> list[shard.PreparedLayer]:
    return [shard.prepare(layer, RankShape(SMALL, tp), rank, **options) for rank in range(tp)]


@pytest.mark.parametrize("tp", TP_WIDTHS)
def test_the_ranks_columns_of_o_proj_make_the_models(layer, tp):
    ranks = prepared(layer, tp)
    assert torch.equal(torch.cat([sh.unshuffle_weight(p.w_o) for p in ranks], 1), layer.w_o)
    assert all(torch.equal(p.s_o, layer.s_o) for p in ranks)


@pytest.mark.parametrize("tp", TP_WIDTHS)
def test_the_fused_projection_holds_a_ranks_heads_in_order(layer, tp):
    for p in prepared(layer, tp):
        plain, shape, rank = sh.unshuffle_weight(p.w_qkv), p.shape, p.rank
        heads = torch.cat(
            [
                torch.arange(shape.q_heads) + rank * shape.q_heads,
                *(torch.tensor(shape.kv_range(rank)) + first for first in (100, 200)),
                torch.tensor(shape.kv_range(rank)) + 300,  # an index head per kv head
                torch.tensor([400]),
            ]
        ).tolist()
        assert p.w_qkv.shape == (shape.qkv_rows, SMALL.hidden)
        assert len(heads) * 128 == shape.qkv_rows
        source = {0: "q", 1: "k", 2: "v", 3: "iq", 4: "ik"}
        for i, head in enumerate(heads):
            name, model_head = source[head // 100], head % 100
            ours, theirs = (
                slice(128 * i, 128 * i + 128),
                slice(128 * model_head, 128 * model_head + 128),
            )
            assert torch.equal(plain[ours], getattr(layer, f"w_{name}")[theirs])
            assert torch.equal(p.s_qkv[ours], getattr(layer, f"s_{name}")[theirs])


def test_with_four_index_heads_every_rank_projects_all(layer):
    heads = IndexHeads(4, 2)
    p = shard.prepare(layer, RankShape(SMALL, 4), 2, heads=heads)
    plain = sh.unshuffle_weight(p.w_qkv)
    n = (p.shape.q_heads + 2) * 128
    assert torch.equal(plain[n : n + 512], layer.w_iq)
    assert torch.equal(plain[n + 512 :], layer.w_ik)


@pytest.mark.parametrize("tp", TP_WIDTHS)
@pytest.mark.parametrize("expert", [3, 128])
def test_the_ranks_shards_of_an_expert_make_the_expert(layer, tp, expert):
    ranks = prepared(layer, tp)
    cols = SMALL.inter // tp // 32
    w13 = [sh.unshuffle_weight(p.w13[expert]) for p in ranks]
    s13 = [sh.unshuffle_scale(p.s13[expert]) for p in ranks]
    for got, want in ((w13, layer.w13[expert]), (s13, layer.s13[expert])):
        gate, up = zip(*(t.chunk(2) for t in got), strict=True)
        assert torch.equal(torch.cat([*gate, *up]), want)
    w2 = torch.cat([sh.unshuffle_weight(p.w2[expert]) for p in ranks], 1)
    s2 = torch.cat([sh.unshuffle_scale(p.s2[expert])[:, :cols] for p in ranks], 1)
    assert torch.equal(w2, layer.w2[expert])
    assert torch.equal(s2, layer.s2[expert])
    assert all(p.present == (3, 127, 128) for p in ranks)


def test_tp_8_pads_the_down_scales_to_16_columns_of_nan():
    shape = RankShape(replace(SMALL, inter=3072, shared_inter=3072), 8)
    layer = w.random_layer(shape.model, experts=[0])
    p = shard.prepare(layer, shape, 1)
    assert p.s2.shape == (129, 2048, 16)
    plain = sh.unshuffle_scale(p.s2[0])
    assert torch.equal(plain[:, :12], layer.s2[0][:, 12:24])
    assert bool((plain[:, 12:] == 0xFF).all())


def test_absent_experts_scales_stay_nan_on_a_rank(layer):
    p = shard.prepare(layer, RankShape(SMALL, 4), 0)
    assert bool((p.s13[4] == 0xFF).all())
    assert bool((p.s2[4] == 0xFF).all())


def test_an_mxfp4_shared_expert_becomes_mxfp8_exactly(layer):
    w13, s13, w2, s2 = layer.shared_mxfp8()
    assert torch.equal(dequantize_mxfp8(w13, s13), layer.dequant("w13", 128))
    assert torch.equal(dequantize_mxfp8(w2, s2), layer.dequant("w2", 128))


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_mxfp8_shared_tables_leave_the_expert_tables(tp):
    layer = w.random_layer(SMALL, seed=5, experts=EXPERTS, shared_fp8=True)
    assert layer.present == EXPERTS
    ranks = prepared(layer, tp, shared_fp8=True)
    assert all(p.w13.shape[0] == p.s2.shape[0] == 128 for p in ranks)
    cols = SMALL.inter // tp // 32
    w13 = [sh.mxfp8_a_untiles(p.shared_w13) for p in ranks]
    s13 = [sh.unshuffle_scale(p.shared_s13) for p in ranks]
    for got, want in ((w13, layer.shared_w13), (s13, layer.shared_s13)):
        gate, up = zip(*(t.chunk(2) for t in got), strict=True)
        assert torch.equal(torch.cat([*gate, *up]), want)
    w2 = torch.cat([sh.mxfp8_a_untiles(p.shared_w2) for p in ranks], 1)
    s2 = torch.cat([sh.unshuffle_scale(p.shared_s2)[:, :cols] for p in ranks], 1)
    assert torch.equal(w2, layer.shared_w2)
    assert torch.equal(s2, layer.shared_s2)
    values = layer.dequant("shared_w2")
    assert 0.6 < values.std() * values.shape[1] ** 0.5 < 1.5


def test_an_mxfp8_shared_expert_is_rounded_into_the_mxfp4_tables():
    layer = w.random_layer(SMALL, experts=[0], shared_fp8=True)
    p = shard.prepare(layer, RankShape(SMALL, 1), 0)
    assert p.present == (0, 128)
    exact = layer.dequant("shared_w2")
    entry = (sh.unshuffle_weight(p.w2[128]), sh.unshuffle_scale(p.s2[128]))
    rounded = w.dequantize_mxfp4(*entry)
    assert (rounded - exact).norm() / exact.norm() < 0.2


def test_tp_4_tables_have_the_published_sizes():
    shape = RankShape()
    layer = w.random_layer(shape.model, experts=[0])
    p = shard.prepare(layer, shape, 3, shared_fp8=True)
    assert p.w13[0].numel() == 4_718_592
    assert p.w2[0].numel() == 2_359_296
    sizes = [getattr(p, name).numel() for name in w.SHARED_TABLES]
    assert sizes == [9_437_184, 294_912, 4_718_592, 147_456]


def test_a_rank_or_a_shape_that_is_not_the_layers_is_refused(layer):
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3, got 4"):
        shard.prepare(layer, RankShape(SMALL, 4), 4)
    with pytest.raises(ValueError, match="not the rank shape's"):
        shard.prepare(layer, RankShape(tp=4), 0)


# --------------------------------------------------------------------------------------- place


def test_placing_writes_only_the_experts_there_are(layer):
    memory = Memory(capacity=1 << 24)
    p = shard.prepare(layer, RankShape(SMALL, 4), 2)
    placed = p.upload(memory)
    a, size = placed["w13"], p.w13[0].numel()
    assert a.rank == 2
    assert a.nbytes == 129 * size
    assert torch.equal(a.read(torch.uint8, (size,), 127 * size), p.w13[127].flatten())
    defined = memory.defined[a.offset : a.offset + a.nbytes].view(129, size)
    live = defined.bool().all(1).nonzero().flatten().tolist()
    assert live == [3, 127, 128]
    assert not bool(defined[4].any())
    assert torch.equal(placed["bias"].read(torch.float32, (128,)), layer.bias)
    assert "sh_args" not in placed


def test_placing_mxfp8_tables_makes_their_pointer_array(layer):
    memory = Memory(capacity=1 << 24)
    p = shard.prepare(layer, RankShape(SMALL, 4), 0, shared_fp8=True)
    placed = p.upload(memory, names=w.SHARED_TABLES)
    addresses = placed["sh_args"].read(torch.int64, (4,)).tolist()
    assert addresses == [placed[name].addr for name in w.SHARED_TABLES]
    assert set(placed) == {*w.SHARED_TABLES, "sh_args"}
    first = memory.data[addresses[0] - BASE]
    assert e4m3_decode(first[None]) == e4m3_decode(p.shared_w13.flatten()[:1])
