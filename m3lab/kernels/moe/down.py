"""Stage 5, second half, narrow form: the down products of every token, all-reduced over the ranks.

A task is 32 hidden rows of every token: four waves a row group, each with one of the four routed
slots of every token and its share of the shared expert. Partials are weighted by the route in
fp32, summed over the waves and pushed as bf16; the sum over the ranks is the layer's output.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.attention.o_proj import PAIRS, WAVES_PER_GROUP, row_pair, sum_tiles
from m3lab.kernels.device import allreduce, gfx950, mailbox, mfma, mx
from m3lab.kernels.device.context import scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, range_constexpr, select, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import div, mod
from m3lab.kernels.marks import in_stage
from m3lab.kernels.moe.routing import route_weight, routed_expert
from m3lab.kernels.moe.up_gate import expert_matrix, shared_matrix
from m3lab.kernels.plan import DN_ROWS, MX_BLOCKS_PER_CHUNK, THREADS, TILE_ROWS
from m3lab.kernels.stages import Point
from m3lab.model.shapes import MX_BLOCK

LANE_ELEMENTS = 8  # of a mid row that a lane quantizes

# ---------------------------------------------------------------------- weights


@dataclass(frozen=True)
class DownTask:
    """The CTA's down task, and whether it has one (its place is that of a real one else)."""

    task: Any
    exists: Any


@in_stage("down")
def down_task(ctx):
    plan = ctx.plan
    task = ctx.bid - plan.bases["down"]
    exists = (task >= 0) & (task < plan.down_tasks)
    return DownTask(fx.min(fx.max(task, 0), plan.down_tasks - 1), exists)


def row_group(ctx, down):
    return down.task * (DN_ROWS // TILE_ROWS) + div(ctx.wave, WAVES_PER_GROUP)


def wave_slot(ctx):
    """The routed slot of this wave; as many slots as waves of a row group. One expert a wave is one
    descriptor, one weight and one accumulator, where dealing single chunks needs them per chunk."""
    return mod(ctx.wave, WAVES_PER_GROUP)


@in_stage("down")
def request_routed(ctx, token, down):
    """This wave's slot of ``token``; a CTA without a down task reads nothing."""
    table = expert_matrix(ctx, "2", routed_expert(ctx, token, wave_slot(ctx)))
    chunks = ctx.plan.down_chunks
    where = (row_group(ctx, down), fx.Int32(0), chunks, mx.Lane(ctx.lane))
    return mx.request_tiles(table, *where, present=down.exists)


def shared_chunks(ctx):
    """Chunks of the shared expert that a wave takes: an even number, for the scale dwords."""
    per_wave = -(-ctx.plan.down_chunks // WAVES_PER_GROUP)
    return per_wave + per_wave % 2


def shared_first(ctx):
    return wave_slot(ctx) * shared_chunks(ctx)


@in_stage("down")
def request_shared(ctx, down):
    """This wave's chunks of the shared expert, for every token; a wave past the row's end, or a CTA
    without a down task, reads nothing."""
    first, chunks = shared_first(ctx), ctx.plan.down_chunks
    lane, present = mx.Lane(ctx.lane), down.exists & (first < chunks)
    where = (row_group(ctx, down), first, min(shared_chunks(ctx), chunks), lane)
    left = chunks - first if ends_in_a_wave(ctx) else None
    return mx.request_tiles(shared_matrix(ctx, "2"), *where, present=present, left=left)


def ends_in_a_wave(ctx):
    """Whether the row ends within a wave's chunks of the shared expert (three chunks, at W=8)."""
    chunks = ctx.plan.down_chunks
    return chunks % min(shared_chunks(ctx), chunks) != 0


# ---------------------------------------------------------------------- activated rows


def mid_elements(ctx):
    """Mid elements of a token, every slot."""
    return (ctx.shape.model.top_k + 1) * ctx.shape.inter


def row8_at(ctx, token):
    """LDS word of a token's MXFP8 intermediates, behind every token's bf16 ones."""
    n = mid_elements(ctx)
    return ctx.spec.tokens * (n // 2) + token * (n // 4)


def scales_at(ctx, token):
    """LDS word of a token's scale row, ``mx.scale_word`` within it."""
    row = ctx.plan.mid_scale_row
    return ctx.spec.tokens * (mid_elements(ctx) * 3 // 4) + token * row


def fetch_intermediates(ctx):
    """lds.pool := every token's intermediates as bf16 pairs, polled in one go: they land
    together (four tokens: -1.1 us, measured upstream)."""
    n = mid_elements(ctx) // 2
    places = [(k, i) for k in range(ctx.spec.tokens) for i in range(0, n, 2 * THREADS)]
    box = scratch_view(ctx, "mid")
    requests = [PairRange(box, k * n + fx.min(ctx.tid * 2 + i, n - 2), 2) for k, i in places]
    for (token, first), words in zip(places, mailbox.poll(ctx.tag, requests), strict=True):
        store_words_to_lds(ctx, token * n, ctx.tid * 2 + first, words)


@traced
def store_words_to_lds(ctx, row, word, words):
    if word < mid_elements(ctx) // 2:
        pair = fx.Vector.from_elements(words, fx.Int32)
        gfx950.lds_store(ctx.lds.pool, row + word, pair, 2)


def quantize_intermediates(ctx):
    """The bf16 intermediates as MXFP8, in one pass: quantizing after each poll cost 1.75 us at one
    token and 6 us at four (measured upstream)."""
    for token in range(ctx.spec.tokens):
        for first in range(0, mid_elements(ctx) // LANE_ELEMENTS, THREADS):
            quantize_unit(ctx, token, first + ctx.tid)


@traced
def quantize_unit(ctx, token, unit):
    """Eight elements a lane, four lanes a block."""
    n, block_lanes = mid_elements(ctx), MX_BLOCK // LANE_ELEMENTS
    if unit < n // LANE_ELEMENTS:
        words = gfx950.lds_load(ctx.lds.pool, token * (n // 2) + unit * 4, 4)
        values = [x for i in range(4) for x in gfx950.bf16_floats(words[i])]
        scale, inverse = mx.block_scale(values, (1, 2))
        both = [mx.fp8_elements(values[i : i + 4], inverse) for i in (0, 4)]
        at = row8_at(ctx, token) + unit * 2
        gfx950.lds_store(ctx.lds.pool, at, fx.Vector.from_elements(both, fx.Int32), 2)
        if mod(unit, block_lanes) == 0:
            word = mx.scale_word(div(unit, block_lanes), ctx.plan.down_chunks)
            gfx950.lds_store(ctx.lds.pool, scales_at(ctx, token) + word, scale)


# ---------------------------------------------------------------------- products


def load_chunk(ctx, token, slot, chunk):
    words = ctx.shape.inter // 4
    at = row8_at(ctx, token) + slot * words + chunk * mx.CHUNK_WORDS
    return mx.load_row_operand(ctx, at)


def multiply_shared(ctx, tiles):
    """The wave's part of the shared expert's rows, weighted; column r is token r's."""
    chunks, first = ctx.plan.down_chunks, shared_first(ctx)
    slot = ctx.shape.model.top_k
    token = fx.min(ctx.row, ctx.spec.tokens - 1)
    pitch = mx.scale_pitch(chunks)
    scales = scales_at(ctx, token) + (slot * MX_BLOCKS_PER_CHUNK + ctx.group) * pitch
    if ends_in_a_wave(ctx):
        tiles = mx.drop_scales_past(tiles, chunks - first)
    acc = mfma.zero_tile()
    for i in range(len(tiles.words)):
        chunk = fx.min(first + i, chunks - 1)  # past the end: real values, times zeros
        row = load_chunk(ctx, token, slot, chunk)
        scale = gfx950.lds_load(ctx.lds.pool, scales + chunk)
        acc = mx.multiply(tiles, i, row, scale, acc)
    return [acc[e] * ctx.spec.shared_weight for e in range(4)]


def multiply_routed(ctx, token, tiles):
    """The wave's slot of ``token``, unweighted; every column is the same."""
    slot, chunks = wave_slot(ctx), ctx.plan.down_chunks
    scales = mx.load_scales(ctx, scales_at(ctx, token), slot, chunks)
    acc = mfma.zero_tile()
    for i in range(chunks):
        acc = mx.multiply(tiles, i, load_chunk(ctx, token, slot, i), scales[i], acc)
    return acc


def add_token(ctx, token, total, tile):
    """``total`` plus ``token``'s weighted tile, in its own column alone: what another row holds,
    NaN included, stays out of it."""
    weight = route_weight(ctx, token, wave_slot(ctx))
    added = [gfx950.fma(tile[e], weight, total[e]) for e in range(4)]
    if ctx.spec.tokens == 1:
        return added
    own = ctx.row == token
    return [select(own, a, t) for a, t in zip(added, total, strict=True)]


# ---------------------------------------------------------------------- the stage


@in_stage("down")
def run(ctx, down, routed, shared):
    """``routed``: tokens' requested tiles, by token; the others' are requested as many ahead."""
    tokens = ctx.spec.tokens
    peers = allreduce.request_peers(ctx) if ctx.spec.npes > 1 else []
    fetch_intermediates(ctx)
    stamp(ctx, Point.INTERMEDIATES_IN)
    gfx950.barrier()
    quantize_intermediates(ctx)
    gfx950.barrier()
    total = multiply_shared(ctx, shared)
    ahead = ctx.plan.down_in_flight
    for token in range(tokens):
        if token + ahead < tokens:
            routed[token + ahead] = request_routed(ctx, token + ahead, down)
            gfx950.sched_barrier()
        total = add_token(ctx, token, total, multiply_routed(ctx, token, routed.pop(token)))
    tile = fx.Vector.from_elements(total, fx.Float32)
    gfx950.lds_store(ctx.lds.red, ctx.tid * 4, tile, 4, fx.Float32)
    gfx950.barrier()
    finish_rows(ctx, down, peers)


@traced
def finish_rows(ctx, down, peers):
    """A thread's row pair of one token: bf16 partials to the peers, their sum to ar_out."""
    if ctx.tid < PAIRS * ctx.spec.tokens:
        token, row = row_pair(ctx, down.task)
        sums = sum_tiles(ctx, token, mod(ctx.tid, PAIRS))
        if const_expr(ctx.spec.npes > 1):
            for i in range_constexpr(ctx.spec.npes):
                allreduce.push(ctx, allreduce.inbox_at(peers[i]), "ffn", token, row, sums)
            sums = allreduce.rank_sum(ctx, "ffn", token, row)
        at = (token * ctx.shape.hidden + row) * 2
        gfx950.store(gfx950.buffer(ctx.args.ar_out), at, gfx950.pack_bf16x2(*sums))
