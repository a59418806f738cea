"""The kernel reference, stage by stage, against plain scalar arithmetic on small inputs."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from m3lab.model.formats import (
    dequantize_mxfp4,
    dequantize_mxfp8,
    e4m3_decode,
    e4m3_encode,
    quantize_mxfp4,
    quantize_mxfp8,
)
from m3lab.reference import kernel as ref
from m3lab.reference.numerics import butterfly_sum, fma, sum_of_squares
from m3lab.reference.pre_attn import NORM_CHAIN, WARP_OFFSETS

F = np.float32
SM_SCALE = 128**-0.5


def e4m3_table():
    """Every finite E4M3 value by its byte, from the format's definition."""
    table = {}
    for byte in range(256):
        sign, exp, man = byte >> 7, (byte >> 3) & 15, byte & 7
        if (exp, man) == (15, 7):
            continue
        mag = (man / 8 * 2.0**-6) if exp == 0 else (1 + man / 8) * 2.0 ** (exp - 7)
        table[byte] = -mag if sign else mag
    return table


E4M3 = e4m3_table()
E4M3_POSITIVE = sorted((v, b) for b, v in E4M3.items() if b < 128)


def nearest_e4m3(x):
    """The E4M3 value nearest to ``x``, ties to the even byte; NaN past 464."""
    if not abs(x) <= 464:
        return math.nan
    best = min(E4M3_POSITIVE, key=lambda vb: (abs(vb[0] - abs(x)), vb[1] & 1))
    return math.copysign(best[0], x)


def bf16(x):
    return float(torch.tensor(float(x)).bfloat16())


def rand_bytes(gen, *shape):
    """Finite E4M3 bytes of modest size."""
    return e4m3_encode(torch.randn(*shape, generator=gen) * 2)


@pytest.fixture
def gen():
    return torch.Generator().manual_seed(7)


# ------------------------------------------------------------------------------------- numerics
def test_every_e4m3_value_decodes_as_the_format_defines_and_encodes_back():
    finite = torch.tensor(sorted(E4M3), dtype=torch.uint8)
    assert e4m3_decode(finite).tolist() == [E4M3[b] for b in finite.tolist()]
    assert torch.equal(e4m3_encode(e4m3_decode(finite)), finite)
    assert e4m3_decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_encoding_past_the_last_finite_value_gives_nan_and_the_midpoint_does_not(sign):
    x = torch.tensor([448.0, 464.0, 464.00003, 500.0, math.inf, math.nan]) * sign
    got = e4m3_decode(e4m3_encode(x))
    assert got[:2].tolist() == [448.0 * sign, 448.0 * sign]
    assert got[2:].isnan().all()


def test_encoding_rounds_to_nearest_even(gen):
    x = torch.cat([torch.randn(400, generator=gen) * 10 ** torch.linspace(-3, 2, 400)])
    halves = torch.tensor([(a[0] + b[0]) / 2 for a, b in itertools.pairwise(E4M3_POSITIVE)])
    x = torch.cat([x, halves, -halves])
    want = [nearest_e4m3(v) for v in x.tolist()]
    got = e4m3_decode(e4m3_encode(x)).tolist()
    assert all(g == w or (math.isnan(g) and math.isnan(w)) for g, w in zip(got, want, strict=True))


def test_fma_rounds_the_exact_value_once(gen):
    a, b = torch.randn(2, 500, generator=gen)
    c = -(a * b) + torch.randn(500, generator=gen) * 1e-9  # heavy cancellation
    c[250:] = torch.randn(250, generator=gen) * 2.0 ** torch.randint(-40, 40, (250,), generator=gen)
    # products halfway between two fp32 values, tipped by an addend far below fp64's last bit
    a[:2], b[:2] = 1 + 2.0**-12, 1 + 2.0**-12
    c[0], c[1] = 2.0**-80, -(2.0**-80)
    got = fma(a, b, c)
    for i in range(500):
        exact = Fraction(a[i].item()) * Fraction(b[i].item()) + Fraction(c[i].item())
        near = F(float(exact))
        around = [np.nextafter(near, F(-np.inf)), near, np.nextafter(near, F(np.inf))]
        best = min(abs(Fraction(float(v)) - exact) for v in around)
        assert abs(Fraction(got[i].item()) - exact) == best


def test_butterfly_sum_adds_in_the_order_of_its_offsets():
    x = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert butterfly_sum(x, (2, 1)) == (F(1e8) + F(-1e8)) + (F(1) + F(1))
    assert butterfly_sum(x, (1, 2)) == (F(1e8) + F(1)) + (F(-1e8) + F(1))


# ------------------------------------------------------------------------------------ selection
def brute_select(scores, n_blk, seq_len, init, local, topk=16):
    """The selection as a sort of (pinned score, block id), written out."""

    def rank(b):
        s = float(scores[b])
        if b >= n_blk - local:
            s = 1e29
        elif b < init:
            s = 1e30
        return (0, 0.0, b) if math.isnan(s) else (1, s + 0.0, b)  # -0.0 + 0.0 is 0.0

    best = sorted(range(n_blk), key=rank, reverse=True)[:topk]
    full = [b for b in best if b != n_blk - 1]
    return [*full, n_blk - 1], len(full) * 128 + seq_len - (n_blk - 1) * 128


@pytest.mark.parametrize(("init", "local"), [(0, 1), (2, 1), (0, 3), (3, 4)])
@pytest.mark.parametrize("n_blk", [17, 40, 700])
def test_selection_is_the_sorted_top_16_with_the_tail_last(gen, n_blk, init, local):
    scores = torch.randn(n_blk, generator=gen).mul(4).round() / 4  # many ties
    seq_len = (n_blk - 1) * 128 + 37
    got = ref.select(scores, n_blk, seq_len, init, local)
    assert (got.blocks.tolist(), got.n_ctx) == brute_select(scores, n_blk, seq_len, init, local)


def test_a_tie_goes_to_the_higher_block():
    scores = torch.zeros(20)
    assert ref.select(scores, 20, 20 * 128).blocks.tolist() == [*range(18, 3, -1), 19]


def test_minus_zero_equals_zero_and_nan_loses_to_minus_infinity():
    scores = torch.full((18,), 1.0)
    scores[3], scores[9] = -0.0, 0.0  # a tie: 9 stays ahead of 3
    scores[5], scores[6] = math.nan, -math.inf
    key = ref.index_key(scores)
    assert key[3] == key[9]
    assert key[5] < key[6] < key[3]
    # 18 blocks: two drop out, and they are the NaN and the -inf; the zeros close the full blocks
    blocks = ref.select(scores, 18, 18 * 128).blocks.tolist()
    assert blocks[-3:] == [9, 3, 17]
    assert 5 not in blocks
    assert 6 not in blocks


def test_negative_scores_order_like_floats():
    scores = torch.tensor([-1.0, -2.0, -1e-30, 1e-30, -math.inf, 5.0, 0.0])
    order = torch.argsort(ref.index_key(scores), descending=True).tolist()
    assert order == [6, 5, 3, 2, 0, 1, 4]  # 6 is the tail: pinned


def test_up_to_16_blocks_are_kept_in_id_order_without_scores():
    for n_blk, seq_len in ((1, 1), (16, 16 * 128), (16, 15 * 128 + 1)):
        got = ref.select(None, n_blk, seq_len)
        assert got.blocks.tolist() == list(range(n_blk))
        assert got.n_ctx == seq_len


def test_seventeen_blocks_need_scores():
    with pytest.raises(ValueError, match="17 blocks needs a score for each, got none"):
        ref.select(None, 17, 17 * 128)


def test_a_context_one_past_a_block_has_a_tail_of_one_key():
    context, n_blk = ref.context_blocks(16 * 128 + 1)
    assert (context, n_blk) == (2049, 17)
    got = ref.select(torch.arange(17.0), n_blk, context)
    assert got.blocks.tolist() == [*range(15, 0, -1), 16]
    assert got.n_ctx == 15 * 128 + 1


def test_a_padding_row_is_one_key_of_block_0():
    context, n_blk = ref.context_blocks(0)
    got = ref.select(None, n_blk, context)
    assert got.blocks.tolist() == [0]
    assert got.n_ctx == 1


@pytest.mark.parametrize("stride", [8, 16])
def test_the_sparse_table_lists_eight_pages_a_slot(stride):
    row = torch.tensor([11, 7, 3, 5], dtype=torch.int32)
    table = ref.sparse_table(torch.tensor([2, 0, 3]), row, stride).tolist()
    assert table[:24] == [p * stride + j for p in (3, 11, 5) for j in range(8)]
    assert table[24:] == [0] * 104


# ---------------------------------------------------------------------------------------- split
def scalar_split(q, k, ks, v, vs, n_ctx, partition, n_split):
    """Split attention of one head with Python floats, rounding where the kernel rounds."""
    q8 = [nearest_e4m3(x) for x in q.tolist()]
    out = []
    for t in range(n_split):
        lo = t * partition
        keys = [i for i in range(lo, lo + partition) if i < n_ctx]
        score = {
            i: F(F(SM_SCALE) * F(ks[i]))
            * F(sum(a * E4M3[b] for a, b in zip(q8, k[i].tolist(), strict=True)))
            for i in keys
        }
        m = max([*score.values(), *([F(-3.4e38)] if len(keys) < partition else [])])
        p = {i: F(2.0 ** float(F(F(score[i] - m) * F(math.log2(math.e))))) for i in keys}
        l_sum = sum(map(float, p.values())) or float(partition)
        vmax = max((F(vs[i]) for i in keys), default=F(0))
        to_fp8 = F(448) * F(1 / float(F(vmax + F(1e-8))))
        acc = [0.0] * 128
        for i in keys:
            p8 = nearest_e4m3(float(F(F(F(vs[i]) * to_fp8) * p[i])))
            for d, b in enumerate(v[i].tolist()):
                acc[d] += p8 * E4M3[b]
        o = [bf16(F(F(vmax * F(1 / 448)) * F(a)) * F(1 / l_sum)) for a in acc]
        out.append((o, float(m), l_sum))
    return out


@pytest.mark.parametrize("n_ctx", [1, 7, 8, 9, 20])
def test_split_matches_scalar_arithmetic(gen, n_ctx):
    q = torch.randn(2, 128, generator=gen).bfloat16().float()
    k, v = rand_bytes(gen, 24, 128), rand_bytes(gen, 24, 128)
    ks, vs = torch.rand(2, 24, generator=gen) + 0.2
    got = ref.split(q, k, ks, v, vs, n_ctx, SM_SCALE, partition=8, n_split=3)
    for head in range(2):
        want = scalar_split(q[head], k, ks.tolist(), v, vs.tolist(), n_ctx, 8, 3)
        for t, (o, m, l_sum) in enumerate(want):
            assert got.sp_m[t, head].item() == pytest.approx(m, rel=1e-6)
            assert got.sp_l[t, head].item() == pytest.approx(l_sum, rel=1e-6)
            # a bf16 rounding, or one fp8 probability, may fall the other way
            error = torch.linalg.norm(got.sp_o[t, head] - torch.tensor(o))
            assert error <= 2e-3 * max(1e-30, torch.linalg.norm(torch.tensor(o)))


def test_a_partition_without_keys_publishes_neg_256_and_zeros_and_weighs_nothing(gen):
    q = torch.randn(4, 128, generator=gen)
    k, v = rand_bytes(gen, 300, 128), rand_bytes(gen, 300, 128)
    ones = torch.ones(300)
    got = ref.split(q, k, ones, v, ones, 300, SM_SCALE)
    assert got.sp_m[2:].eq(torch.tensor(ref.NEG)).all()
    assert got.sp_l[2:].eq(256).all()
    assert got.sp_o[2:].eq(0).all()
    assert torch.equal(ref.merged(*got), ref.merged(got.sp_o[:2], got.sp_m[:2], got.sp_l[:2]))


def test_what_lies_past_the_context_never_matters(gen):
    q = torch.randn(4, 128, generator=gen)
    k, v = rand_bytes(gen, 300, 128), rand_bytes(gen, 300, 128)
    ks, vs = torch.rand(2, 300, generator=gen)
    clean = ref.split(q, k, ks, v, vs, 270, SM_SCALE)
    k[270:], v[270:], ks[270:], vs[270:] = 0x7F, 0xFF, math.nan, math.inf
    dirty = ref.split(q, k, ks, v, vs, 270, SM_SCALE)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


def test_one_key_attends_to_its_value_alone(gen):
    q = torch.randn(4, 128, generator=gen)
    k, v = rand_bytes(gen, 1, 128), rand_bytes(gen, 1, 128)
    got = ref.split(q, k, torch.ones(1), v, torch.full((1,), 0.5), 1, SM_SCALE)
    assert got.sp_l[0].eq(1).all()
    assert torch.allclose(got.sp_o[0], (e4m3_decode(v[0]) * 0.5).expand(4, 128), rtol=4e-3)


def test_a_static_scale_equals_the_same_scale_on_every_key(gen):
    q = torch.randn(4, 128, generator=gen)
    k, v = rand_bytes(gen, 300, 128), rand_bytes(gen, 300, 128)
    each = ref.split(q, k, torch.full((300,), 0.3), v, torch.full((300,), 0.7), 300, SM_SCALE)
    static = ref.split(q, k, 0.3, v, 0.7, 300, SM_SCALE)
    assert all(torch.equal(a, b) for a, b in zip(each, static, strict=True))


def test_a_nan_score_reaches_the_partition_max(gen):
    q = torch.randn(1, 128, generator=gen)
    k, v = rand_bytes(gen, 300, 128), rand_bytes(gen, 300, 128)
    k[3] = 0x7F
    got = ref.split(q, k, 1.0, v, 1.0, 300, SM_SCALE)
    assert got.sp_m[0].isnan().all()
    assert got.sp_m[1].isfinite().all()


@pytest.mark.parametrize("n_ctx", [0, 301])
def test_a_selection_context_outside_the_keys_is_refused(gen, n_ctx):
    k = rand_bytes(gen, 300, 128)
    with pytest.raises(ValueError, match=f"must be 1..300 keys, got {n_ctx}"):
        ref.split(torch.zeros(1, 128), k, 1.0, k, 1.0, n_ctx, SM_SCALE)


# --------------------------------------------------------------------- merge, o_proj, all-reduce
def test_merge_matches_scalar_arithmetic(gen):
    sp_o = torch.randn(8, 2, 128, generator=gen).bfloat16().float()
    sp_m, sp_l = torch.randn(8, 2, generator=gen) * 3, torch.rand(8, 2, generator=gen) * 50 + 1
    sp_m[6:], sp_l[6:], sp_o[6:] = ref.NEG, 256.0, 0.0
    got = ref.merge(sp_o, sp_m, sp_l)
    rows = []
    for h in range(2):
        top = max(sp_m[:, h].tolist())
        w = [
            li * math.exp(mi - top)
            for mi, li in zip(sp_m[:, h].tolist(), sp_l[:, h].tolist(), strict=True)
        ]
        rows += [
            bf16(sum(wi * oi for wi, oi in zip(w, sp_o[:, h, d].tolist(), strict=True)) / sum(w))
            for d in range(128)
        ]
    amax = max(map(abs, rows))
    assert got.scale.item() == F(F(amax) * F(1 / 448))
    want = torch.tensor([nearest_e4m3(r * 448 / amax) for r in rows])
    assert (e4m3_decode(got.bytes) != want).sum() <= 2  # an fp8 rounding may fall the other way
    assert e4m3_decode(got.bytes).abs().max() == 448


def test_a_zero_row_merges_to_zeros_not_nan():
    got = ref.merge(torch.zeros(8, 2, 128), torch.zeros(8, 2), torch.ones(8, 2))
    assert got.bytes.eq(0).all()
    assert got.scale == 0


def test_output_partial_matches_scalar_arithmetic(gen):
    x, w = rand_bytes(gen, 2, 64), rand_bytes(gen, 5, 64)
    scale, s_o = torch.rand(2, generator=gen), torch.rand(5, generator=gen)
    got = ref.output_partial(x, scale, w, s_o)
    for t in range(2):
        for n in range(5):
            dot = sum(E4M3[a] * E4M3[b] for a, b in zip(x[t].tolist(), w[n].tolist(), strict=True))
            want = F(F(dot) * F(scale[t].item())) * F(s_o[n].item())
            assert got[t, n].item() == pytest.approx(bf16(want), rel=2**-7)
    assert torch.equal(got, ref.output_partial(x, scale, e4m3_decode(w), s_o))


def test_all_reduce_adds_in_rank_order_and_rounds_once():
    big, one = 2.0**24, 1.0
    assert ref.all_reduce(torch.tensor([[big], [one], [-big]])).item() == 0.0  # lost in fp32
    assert ref.all_reduce(torch.tensor([[big], [-big], [one]])).item() == 1.0
    # bf16 after every addition would lose each of these
    rows = torch.tensor([[256.0], [0.75], [0.75], [0.75]])
    assert ref.all_reduce(rows).item() == bf16(258.25)


def test_h_mid_rounds_the_sum_with_the_residual():
    a, h = torch.tensor([1.0, 3.0]), torch.tensor([2.0**-8, 2.0**-7])
    assert ref.h_mid(a, h).tolist() == [bf16(1 + 2**-8), bf16(3 + 2**-7)]


# --------------------------------------------------------------------------------------- router
def test_post_norm_reads_the_unrounded_sum(gen):
    a = torch.randn(2, 2048, generator=gen).bfloat16()
    h = (torch.randn(2, 2048, generator=gen) * 100).bfloat16()
    g = (torch.randn(2048, generator=gen) * 0.1).bfloat16()
    v = a.double() + h.double()
    want = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + g.double())
    got = ref.post_norm(a, h, g, 1e-6)
    assert torch.equal(got, got.bfloat16().float())
    assert (got - want).abs().div(want.abs()).max() <= 2**-8
    rounded = ref.post_norm(torch.zeros_like(a), (a.float() + h.float()).bfloat16(), g, 1e-6)
    assert not torch.equal(got, rounded)


def exact_fma_f32(a, b, c):
    return F(float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))))


def test_the_input_norm_sums_squares_in_the_order_of_k1(gen):
    """256 logical threads of 8 elements, warps of 32 by xor 16 .. 1, then the warps' sums."""
    x = torch.randn(2048, generator=gen) * 10 ** torch.linspace(-2, 2, 2048)
    lanes = []
    for t in range(256):
        acc = F(0)
        for v in x[8 * t : 8 * t + 8].tolist():
            acc = exact_fma_f32(v, v, acc)
        lanes.append(acc)

    def warp(values):
        values = [*values, *[F(0)] * (32 - len(values))]
        for offset in (16, 8, 4, 2, 1):
            values = [values[i] + values[i ^ offset] for i in range(32)]
        return values[0]

    want = warp([warp(lanes[w : w + 32]) for w in range(0, 256, 32)])
    assert sum_of_squares(x, NORM_CHAIN, WARP_OFFSETS).item() == want


def test_router_scores_match_scalar_arithmetic(gen):
    xn = torch.randn(2, 64, generator=gen).bfloat16().float()
    w = torch.randn(128, 64, generator=gen).bfloat16()
    bias = torch.randn(128, generator=gen) * 0.1
    got = ref.router_scores(xn, w, bias)
    for t in range(2):
        for e in range(128):
            logit = bf16(sum(a * b for a, b in zip(xn[t].tolist(), w[e].tolist(), strict=True)))
            sigmoid = 1 / (1 + math.exp(-logit))
            assert got.sigmoid[t, e].item() == pytest.approx(sigmoid, rel=1e-6)
            key = got.key[t, e].item()
            assert 127 - (key & 127) == e
            # a positive score's key is its own bits, the low seven dropped
            score = got.sigmoid[t, e] + bias[e]
            if score >= 0:
                assert key >> 7 == score.view(torch.int32).item() >> 7


def test_equal_scores_route_to_the_lower_experts():
    sigmoid = torch.full((1, 128), 0.5)
    key = ref.routing_key(sigmoid, torch.arange(128))
    got = ref.route(key, sigmoid, 2.0, 1.0)
    assert got.experts.tolist() == [[0, 1, 2, 3, 128]]
    assert got.weights.tolist() == [[0.5, 0.5, 0.5, 0.5, 1.0]]


def test_routing_is_by_biased_score_and_weighs_by_the_plain_one():
    sigmoid = torch.linspace(0.1, 0.6, 128)[None]
    biased = sigmoid.clone()
    biased[0, 7] = 2.0
    biased[0, 8] = -3.0  # a negative score orders below every positive one
    got = ref.route(ref.routing_key(biased, torch.arange(128)), sigmoid, 2.0, 1.0)
    assert got.experts[0].tolist() == [7, 127, 126, 125, 128]
    chosen = sigmoid[0, [7, 127, 126, 125]]
    assert torch.allclose(got.weights[0, :4], chosen / chosen.sum() * 2.0, rtol=1e-6)


def test_negative_scores_route_in_the_order_of_floats():
    scores = -torch.linspace(1.0, 2.0, 128)[None]
    got = ref.route(ref.routing_key(scores, torch.arange(128)), scores.abs(), 2.0, 1.0)
    assert got.experts[0].tolist() == [0, 1, 2, 3, 128]


# -------------------------------------------------------------------------------------- experts
@pytest.mark.parametrize(
    ("gate", "up"), [(0.0, 0.0), (1.5, -0.3), (9.0, 2.0), (-4.0, 9.0), (3.0, -9.0)]
)
def test_swiglu_clamps_the_gate_above_and_the_up_value_both_ways(gate, up):
    g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
    want = (u + 1) * g / (1 + math.exp(-1.702 * g))
    assert ref.swiglu(torch.tensor(gate), torch.tensor(up)).item() == pytest.approx(want, rel=2e-6)


def test_one_expert_matches_scalar_arithmetic(gen):
    hidden, inter = 64, 32
    x8, xsc = quantize_mxfp8(torch.randn(1, hidden, generator=gen))
    w13 = quantize_mxfp4(torch.randn(2 * inter, hidden, generator=gen) / 8)
    w2 = quantize_mxfp4(torch.randn(hidden, inter, generator=gen) / 6)
    x, w13f, w2f = dequantize_mxfp8(x8, xsc)[0], dequantize_mxfp4(*w13), dequantize_mxfp4(*w2)
    mid = []
    for n in range(inter):
        g = sum(a * b for a, b in zip(x.tolist(), w13f[n].tolist(), strict=True))
        u = sum(a * b for a, b in zip(x.tolist(), w13f[inter + n].tolist(), strict=True))
        mid.append(bf16((min(max(u, -7), 7) + 1) * min(g, 7) / (1 + math.exp(-1.702 * min(g, 7)))))
    got = ref.expert_mid(dequantize_mxfp8(x8, xsc), w13)
    assert torch.allclose(got[0], torch.tensor(mid), rtol=2**-7)
    assert torch.equal(got, got.bfloat16().float())
    amax = max(map(abs, got[0].tolist()))
    scale = 2.0 ** math.ceil(math.log2(amax / 448))
    mid8 = [nearest_e4m3(m / scale) * scale for m in got[0].tolist()]
    down = [sum(a * b for a, b in zip(mid8, w2f[n].tolist(), strict=True)) for n in range(hidden)]
    assert torch.allclose(ref.expert_down(got, w2)[0], torch.tensor(down), rtol=1e-4, atol=1e-5)


def test_the_partial_row_weighs_every_slot_and_rounds_once(gen):
    tables = {e: (torch.randn(8, 32, generator=gen), None) for e in (3, 5, 9, 128)}
    route = ref.Route(torch.tensor([[3, 5, 128], [9, 3, 128]]), torch.rand(2, 3, generator=gen))
    intermediates = torch.randn(2, 3, 32, generator=gen).bfloat16().float()
    got = ref.expert_partial(intermediates, route, lambda e: tables[e])
    for t in range(2):
        want = torch.zeros(8)
        for s, e in enumerate(route.experts[t].tolist()):
            want += route.weights[t, s] * ref.expert_down(intermediates[t, s], tables[e])
        assert torch.allclose(got[t], want.bfloat16().float(), rtol=2**-7)


def test_a_token_takes_its_own_experts_intermediates(gen):
    x8, xsc = quantize_mxfp8(torch.randn(2, 64, generator=gen))
    tables = {e: (torch.randn(64, 64, generator=gen), None) for e in (1, 2, 4)}
    experts = torch.tensor([[1, 4], [2, 1]])
    got = ref.expert_intermediates(x8, xsc, experts, lambda e: tables[e])
    x = dequantize_mxfp8(x8, xsc)
    for t in range(2):
        for s in range(2):
            want = ref.expert_mid(x[t : t + 1], tables[experts[t, s].item()])[0]
            assert torch.allclose(got[t, s], want, rtol=2**-7)


# ------------------------------------------------------------------------------------------- K1
def test_the_input_norm_quantizes_a_token_by_its_largest_value(gen):
    ar, res = torch.randn(2, 3, 2048, generator=gen).bfloat16()
    ar[2], res[2] = 0, 0
    g = (torch.randn(2048, generator=gen) * 0.1).bfloat16()
    got = ref.input_norm(ar, res, g, 1e-6)
    acc = ar.float() + res.float()
    assert torch.equal(got.h, acc.bfloat16().float())
    x = acc.double() / (acc.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = x * (1 + g.double())
    assert torch.allclose(got.scale[:2].double(), x[:2].abs().amax(-1) / 448, rtol=1e-6)
    assert got.scale[2] == 1.0
    assert got.x8[2].eq(0).all()
    error = (e4m3_decode(got.x8) * got.scale[:, None] - x).abs()
    assert (error <= x.abs() * 2**-4 + got.scale[:, None] * 2**-10 * 1.001).all()


def test_rope_turns_the_first_64_dims_by_position_and_passes_the_rest(gen):
    x = torch.randn(2, 3, 128, generator=gen).bfloat16().float()
    g = (torch.randn(128, generator=gen) * 0.1).bfloat16()
    table = ref.rope_table(torch.tensor([5, 1000]), 5e6, 64)
    got = ref.norm_rope(x, g, table, 1e-6)
    for t, position in enumerate((5, 1000)):
        y = x[t].double() / (x[t].double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        y = y * (1 + g.double())
        for d in range(32):
            angle = position * 5e6 ** (-d / 32)
            turned = complex(math.cos(angle), math.sin(angle))
            for head in range(3):
                want = complex(y[head, d], y[head, d + 32]) * turned
                assert abs(complex(got[t, head, d], got[t, head, d + 32]) - want) <= 0.006 * abs(
                    want
                )
        assert torch.allclose(got[t, :, 64:].double(), y[:, 64:], rtol=1e-5)


def test_the_rope_table_is_32_cosines_then_32_sines_in_bf16():
    table = ref.rope_table(torch.tensor([0, 3]), 5e6, 64)
    assert table.dtype == torch.bfloat16
    assert table[0].tolist() == [1.0] * 32 + [0.0] * 32
    assert table[1, 0] == bf16(math.cos(3.0))
    assert table[1, 32] == bf16(math.sin(3.0))


def test_a_cache_entry_has_its_heads_own_scale_or_the_caches(gen):
    x = torch.randn(2, 4, 128, generator=gen).bfloat16().float()
    x[1, 3] = 0
    own = ref.cache_entry(x, None)
    assert torch.equal(own.scale[0], x[0].abs().amax(-1) / 448)
    assert own.scale[1, 3] == 1.0
    assert e4m3_decode(own.bytes[0]).abs().amax(-1).eq(448).all()
    static = ref.cache_entry(x, 0.001)  # most values pass 448 scales: clamped, never NaN
    assert e4m3_decode(static.bytes).abs().max() == 448
    assert static.scale.eq(torch.tensor(0.001)).all()


def test_index_keys_are_rounded_to_bf16_first_and_clamped():
    # 17 * (1 + 2^-9) rounds to bf16 17 and then ties to 16; unrounded it would go to 18
    entry = ref.index_key_entry(torch.tensor([17 * (1 + 2**-9), 600.0, -600.0]))
    assert e4m3_decode(entry).tolist() == [16.0, 448.0, -448.0]


def test_a_projection_scales_by_token_then_by_row(gen):
    x, w = rand_bytes(gen, 2, 64), rand_bytes(gen, 5, 64)
    x_scale, s_w = torch.rand(2, generator=gen), torch.rand(5, generator=gen)
    assert torch.equal(
        ref.project(x, x_scale, w, s_w), ref.output_partial(x, x_scale, w, s_w)
    )  # one contract, two callers


def test_block_scores_are_the_best_causal_key_and_minus_infinity_without_one(gen):
    iq = torch.randn(128, generator=gen).bfloat16().float()
    keys = rand_bytes(gen, 300, 128, 128)  # past one decoding chunk
    n_keys = 298 * 128 + 3
    keys[298, 3:], keys[299] = 0x7F, 0x7F
    got = ref.block_scores(iq, keys, n_keys, SM_SCALE)
    scale = F(F(SM_SCALE) * F(math.log2(math.e)))
    assert ref.score_scale(SM_SCALE) == scale
    dots = torch.einsum("bkd,d->bk", e4m3_decode(keys).double(), iq.double())
    want = dots.amax(-1)
    want[298] = dots[298, :3].max()
    assert torch.allclose(got[:299].double(), want[:299] * float(scale), rtol=1e-5)
    assert got[299] == -math.inf


def test_a_merge_on_the_edge_of_a_step_may_fall_to_either_side():
    gen = torch.Generator().manual_seed(5)
    sp_o = torch.randn(8, 8, 128, generator=gen).bfloat16().float()
    sp_m, sp_l = torch.randn(8, 8, generator=gen), torch.rand(8, 8, generator=gen) + 0.5
    one = ref.merge(sp_o, sp_m, sp_l)
    row = e4m3_decode(one.bytes) * one.scale
    assert torch.equal(ref.merge_nearest(sp_o, sp_m, sp_l, row), row)
    other = ref.merge_nearest(sp_o, sp_m, sp_l, row * 2)  # any wish is not granted
    assert float((other - row).norm() / row.norm()) < 2e-2
    broken = row.clone()
    broken[37] *= 1.5
    near = ref.merge_nearest(sp_o, sp_m, sp_l, broken)
    assert near[37] != broken[37]
