"""Sparse attention over the selected blocks, in eight partitions a token.

A split task is one token's partition of 256 selected keys, 32 a wave; it publishes outputs, maxima
and sums per head, which ``merge`` combines. The blocks are chosen by ``select``.

Both matrix products keep the head in the result's column, so a lane owns one head: the scores'
rows are keys, the output's rows are dims. A wave's keys are dealt to the score tiles so that lane
16 g + r gets the eight consecutive keys 8 g .. + 8 of head r, which is the layout that the second
product wants its probabilities in: they never leave the lane.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.attention.select import request_candidate, row_of, select_blocks
from m3lab.kernels.device import gfx950, mailbox, mfma
from m3lab.kernels.device.context import first_task, scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, select, traced
from m3lab.kernels.device.wave import add, butterfly, div, largest, mod, reduce
from m3lab.kernels.plan import THREADS, TILE_ROWS, WAVES
from m3lab.kernels.stages import Point
from m3lab.layout.regions import N_SPLIT, WORD_BYTES
from m3lab.model.shapes import PAGE_TOKENS

FP8_MAX = 448.0
NEG = -3.4e38  # a masked key's score
LOG2E = 1.4426950408889634
DIM_GROUP = 16  # dims that lie together in a K page
KEY_TILES = 2  # score tiles of a wave: 16 keys each
TILE_DIM_BYTES = 16 * PAGE_TOKENS  # 16 dims of a V page
GROUPS = (16, 32)  # butterfly over the four lane groups of a matrix operand
HEAD_THREADS = 32  # threads of a head where each has four dims: four bytes, four floats


@traced
def split(ctx):
    """Every (token, kv head, partition) of the step, the partition counting fastest."""
    plan = ctx.plan
    for task in range(first_task(ctx, "split"), plan.split_tasks, plan.blocks):
        split_task(ctx, fx.Int32(task))


def split_task(ctx, task):
    unit, partition = div(task, N_SPLIT), mod(task, N_SPLIT)
    # the query is on its way, and then in LDS, before the selection's own waits and barriers
    query = request_query(ctx, unit)
    row = row_of(ctx, unit)
    candidate = request_candidate(ctx, row)
    quantize_query(ctx, query)
    n_ctx = select_blocks(ctx, row, partition, candidate)
    stamp(ctx, Point.BLOCKS_SELECTED)
    tiles = load_tiles(ctx, unit)
    stamp(ctx, Point.LOADS_ISSUED)
    first_key = partition * ctx.plan.partition_keys + ctx.wave * (KEY_TILES * PAGE_TOKENS)
    lane_keys = n_ctx - (first_key + 8 * ctx.group)  # this lane's valid keys, <= 0 or >= 8 too
    scores = score_keys(ctx, tiles, lane_keys)
    share_maxima(ctx, tiles, scores, lane_keys)
    gfx950.barrier()
    stamp(ctx, Point.SCORED)
    head_max, v_max = read_maxima(ctx)
    weights = weigh_keys(ctx, tiles, scores, head_max, v_max, lane_keys)
    multiply_values(ctx, tiles, weights, lane_keys)
    gfx950.barrier()
    stamp(ctx, Point.VALUES_SUMMED)
    publish(ctx, unit, partition, head_max, v_max)
    gfx950.barrier()


@dataclass(frozen=True)
class Tiles:
    """A wave's 32 keys as this lane loads them.

    ``keys[tile][half]``: four words, 16 dims of key 8 (row / 4) + 4 tile + row % 4;
    ``values[d]``: two words, keys 8 g .. + 8 of dim 16 d + row; ``k_scales`` and ``v_scales``: the
    fp32 scales of keys 8 g .. + 8 (static: one value for all).
    """

    keys: list[list[Any]]
    values: list[Any]
    k_scales: list[Any]
    v_scales: list[Any]


def load_tiles(ctx, unit):
    """Request this wave's two pages of K, of V and their scales.

    A block's pages are consecutive, so the wave's page sits in the buffer's 64-bit base and a
    lane's offset is the same for every wave, whatever the cache's size. Pages past the context
    are real ones whose bytes are masked later.
    """
    shape, args = ctx.shape, ctx.args
    pages = ctx.plan.pages_per_block
    first = ctx.wave * KEY_TILES
    block_page = gfx950.uniform(gfx950.lds_load(ctx.lds.blocks, div(first, pages)))
    page = gfx950.i64(block_page + mod(first, pages))
    head_bytes = shape.model.head_dim * PAGE_TOKENS
    page_bytes = shape.kv_heads * head_bytes
    at = page * page_bytes + head_offset(ctx, unit, head_bytes)
    k_page, v_page = gfx950.buffer(args.k_cache + at), gfx950.buffer(args.v_cache + at)

    row, group = ctx.row, ctx.group
    group_bytes = PAGE_TOKENS * DIM_GROUP
    token = 8 * mod(div(row, 4), 2) + mod(row, 4)
    k_at = div(row, 8) * page_bytes + group * group_bytes + token * DIM_GROUP
    v_at = div(group, 2) * page_bytes + row * PAGE_TOKENS + mod(group, 2) * 8
    halves = [half * 4 * group_bytes for half in range(shape.model.head_dim // 64)]
    keys = [
        [gfx950.load(k_page, k_at + tile * 4 * DIM_GROUP + half, 4) for half in halves]
        for tile in range(KEY_TILES)
    ]
    values = [
        gfx950.load(v_page, v_at + d * TILE_DIM_BYTES, 2) for d in range(shape.model.head_dim // 16)
    ]
    scales = [load_scales(ctx, unit, address, page) for address in (args.k_scale, args.v_scale)]
    return Tiles(keys, values, *scales)


def head_offset(ctx, unit, size):
    """``size`` times the kv head of a row, as Int64."""
    return gfx950.i64(mod(unit, ctx.shape.kv_heads) * size)


def load_scales(ctx, unit, address, page):
    """The scales of this lane's eight keys."""
    if ctx.spec.cache.static_scale:
        scale = gfx950.bitcast_f32(gfx950.load(gfx950.buffer(address), 0))
        return [scale] * 8
    head_bytes = PAGE_TOKENS * WORD_BYTES
    page_bytes = ctx.shape.kv_heads * head_bytes
    scales = gfx950.buffer(address + page * page_bytes + head_offset(ctx, unit, head_bytes))
    at = div(ctx.group, 2) * page_bytes + mod(ctx.group, 2) * (8 * WORD_BYTES)
    words = [gfx950.load(scales, at + 16 * i, 4) for i in range(2)]
    return [gfx950.bitcast_f32(half[i]) for half in words for i in range(4)]


def query_unit(head, unit):
    """LDS word of a head's ``unit``-th 16 dims: rotated so that the 16 heads of an operand do not
    meet in one bank."""
    return head * HEAD_THREADS + (unit ^ mod(div(head, 2), 8)) * 4


def group_quads(ctx):
    """Runs of four elements in the attention row of the query heads that share a kv head."""
    return ctx.shape.heads_per_kv * ctx.shape.model.head_dim // 4


def thread_quad(ctx):
    """This thread's run of four; a rank with fewer heads than a matrix operand has rows repeats
    them over the threads, so that every row is finite."""
    n = group_quads(ctx)
    return mod(ctx.tid, n) if n < THREADS else ctx.tid


@traced
def unless_repeated(ctx, put):
    """Call ``put`` on the threads whose ``thread_quad`` is not a repeated one."""
    n = group_quads(ctx)
    if const_expr(n < THREADS):
        if ctx.tid < n:
            put()
    else:
        put()


def request_query(ctx, unit):
    """Four bf16 of the row's query heads, [head][dim] over the threads."""
    at = (unit * group_quads(ctx) + thread_quad(ctx)) * 8
    return gfx950.load(gfx950.buffer(ctx.args.q), at, 2)


def quantize_query(ctx, query):
    """lds.q8 := the token's query heads as fp8, by conversion with no scale."""
    head, word = div(ctx.tid, HEAD_THREADS), mod(ctx.tid, HEAD_THREADS)
    dims = [x for i in range(2) for x in gfx950.bf16_floats(query[i])]
    gfx950.lds_store(
        ctx.lds.q8, query_unit(head, div(word, 4)) + mod(word, 4), gfx950.pack_fp8x4(*dims)
    )


def score_keys(ctx, tiles, lane_keys):
    """Scaled scores of this lane's eight keys with its head ``row``; NEG where masked."""
    halves = range(ctx.shape.model.head_dim // 64)
    query = [
        gfx950.lds_load(ctx.lds.q8, query_unit(ctx.row, 4 * half + ctx.group), 4) for half in halves
    ]
    scores = []
    for tile in range(KEY_TILES):
        acc = mfma.zero_tile()
        for half in halves:
            k_parts = mfma.fp8_operands(tiles.keys[tile][half])
            q_parts = mfma.fp8_operands(query[half])
            for k_part, q_part in zip(k_parts, q_parts, strict=True):
                acc = gfx950.mfma_fp8(k_part, q_part, acc)
        scores += [acc[e] for e in range(4)]
    scaled = [
        (ctx.spec.sm_scale * scale) * score
        for scale, score in zip(tiles.k_scales, scores, strict=True)
    ]
    return [select(lane_keys > i, s, fx.Float32(NEG)) for i, s in enumerate(scaled)]


def valid_scales(tiles, lane_keys):
    return [select(lane_keys > i, s, fx.Float32(0.0)) for i, s in enumerate(tiles.v_scales)]


def heads_at(ctx, what, head):
    """LDS word of a head's eight wave values: ``what`` 0 maxima, 1 sums."""
    return (what * TILE_ROWS + head) * WAVES


@traced
def share_maxima(ctx, tiles, scores, lane_keys):
    """lds.heads := this wave's maximum score per head and its largest valid V scale."""
    head_max = butterfly(reduce(scores, largest), GROUPS, largest)
    v_max = butterfly(reduce(valid_scales(tiles, lane_keys), largest), GROUPS, largest)
    if ctx.group == 0:
        gfx950.lds_store(ctx.lds.heads, heads_at(ctx, 0, ctx.row) + ctx.wave, head_max)
    if ctx.lane == 0:
        gfx950.lds_store(ctx.lds.heads, heads_at(ctx, 2, 0) + ctx.wave, v_max)


def wave_values(ctx, at):
    """The eight waves' values from LDS word ``at``."""
    halves = [gfx950.lds_load(ctx.lds.heads, at + i, 4, fx.Float32) for i in range(0, WAVES, 4)]
    return [half[i] for half in halves for i in range(4)]


def read_maxima(ctx):
    """The partition's maximum for this lane's head, and its largest valid V scale."""
    v_max = reduce(wave_values(ctx, heads_at(ctx, 2, 0)), largest)
    return reduce(wave_values(ctx, heads_at(ctx, 0, ctx.row)), largest), v_max


@traced
def weigh_keys(ctx, tiles, scores, head_max, v_max, lane_keys):
    """The probabilities as fp8, V's scales folded in -> the Int64 operand of keys 8 g .. + 8; their
    unscaled sum per wave and head to lds.heads."""
    to_fp8 = FP8_MAX * gfx950.rcp(v_max + 1e-8)
    p = [gfx950.exp2((score - head_max) * LOG2E) for score in scores]
    scaled = [(s * to_fp8) * x for s, x in zip(valid_scales(tiles, lane_keys), p, strict=True)]
    total = butterfly(reduce(p, add), GROUPS)
    if ctx.group == 0:
        gfx950.lds_store(ctx.lds.heads, heads_at(ctx, 1, ctx.row) + ctx.wave, total)
    stamp(ctx, Point.WEIGHED)
    words = [gfx950.pack_fp8x4(*scaled[4 * i : 4 * i + 4]) for i in range(2)]
    return fx.Vector.from_elements(words, fx.Int32).bitcast(fx.Int64)[0]


def partial_at(ctx, wave, head, unit):
    """LDS word of a wave's partial output, ``unit`` counting four dims of ``head``: rotated so
    that neither the heads of a store nor the dims of a load meet in one bank."""
    head_dim = ctx.shape.model.head_dim
    return (wave * TILE_ROWS + head) * head_dim + (unit ^ head) * 4


def multiply_values(ctx, tiles, weights, lane_keys):
    """lds.partials := this wave's weighted sum of V, [head][dim].

    A masked key's weight is 0, but 0 times a NaN byte is NaN: its V bytes become 0 too.
    """
    some = (fx.Int64(1) << (fx.Int64(lane_keys) * 8)) - fx.Int64(1)
    mask = select(lane_keys <= 0, fx.Int64(0), some)
    mask = select(lane_keys >= 8, fx.Int64(-1), mask)
    for d, words in enumerate(tiles.values):
        value = words.bitcast(fx.Int64)[0] & mask
        out = gfx950.mfma_fp8(value, weights, mfma.zero_tile())
        at = partial_at(ctx, ctx.wave, ctx.row, 4 * d + ctx.group)
        gfx950.lds_store(ctx.lds.partials, at, out, 4, fx.Float32)


@traced
def publish(ctx, unit, partition, head_max, v_max):
    """The waves' partials summed, over the sum of weights, to sp_o; maxima and sums to sp_m, sp_l.

    A partition with no valid key publishes m = NEG, l = 256, o = 0 and weighs nothing.
    """
    shape = ctx.shape
    head, quad = div(ctx.tid, HEAD_THREADS), mod(ctx.tid, HEAD_THREADS)
    weight_sum = reduce(wave_values(ctx, heads_at(ctx, 1, head)), add)
    inverse = 1.0 / select(weight_sum > 0.0, weight_sum, fx.Float32(1.0))
    parts = [
        gfx950.lds_load(ctx.lds.partials, partial_at(ctx, w, head, quad), 4, fx.Float32)
        for w in range(WAVES)
    ]
    scale = v_max * (1.0 / FP8_MAX)
    out = [(scale * reduce([part[i] for part in parts], add)) * inverse for i in range(4)]
    token, kv_head = div(unit, shape.kv_heads), mod(unit, shape.kv_heads)
    part = token * N_SPLIT + partition
    first_head = part * shape.q_heads + kv_head * shape.heads_per_kv
    at = first_head * shape.model.head_dim + ctx.tid * 4
    unless_repeated(ctx, lambda: mailbox.put_bf(ctx.tag, scratch_view(ctx, "sp_o"), at, out))
    if ctx.tid < shape.heads_per_kv:  # wave 0's lane of head tid: its own maximum is the head's
        total = reduce(wave_values(ctx, heads_at(ctx, 1, ctx.tid)), add)
        head_at = first_head + ctx.tid
        mailbox.put(ctx.tag, scratch_view(ctx, "sp_m"), head_at, head_max)
        mailbox.put(ctx.tag, scratch_view(ctx, "sp_l"), head_at, total)
