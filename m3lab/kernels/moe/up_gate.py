"""Stage 5, first half, narrow form: up / gate products, SwiGLU-OAI, the activated intermediate.

A routed task is 16 mid rows of one token's slot; a shared task is 8 mid rows of the shared expert
for every token, its gate and up rows sharing one matrix tile. The eight waves of a CTA split k. A
task is requested some time before it is computed; when, is ``experts``' matter.
"""

import math

import flydsl.expr as fx

from m3lab.kernels.device import gfx950, mailbox, mfma, mx
from m3lab.kernels.device.context import first_task, scratch_view, stamp
from m3lab.kernels.device.gfx950 import select, traced
from m3lab.kernels.device.wave import butterfly, div, mod, xor_lane
from m3lab.kernels.marks import in_stage
from m3lab.kernels.moe.routing import routed_expert, scales_at
from m3lab.kernels.plan import SH_ROWS, THREADS, TILE_ROWS, UG_ROWS, WAVES
from m3lab.kernels.stages import Point

LOG2E = math.log2(math.e)
TILE_WORDS = gfx950.LANES * 4  # of a wave's partial tile in LDS
PARTIALS = THREADS * 4  # words of all waves' partial tiles
SHARES = {8: (8, 16, 32), 16: (16, 32), 32: (32,)}  # values a wave sums -> lane offsets of shares

# ---------------------------------------------------------------------- tables


def expert_matrix(ctx, name, expert):
    """Table ``name`` ("13" or "2") of one expert, a uniform index or a number."""
    shape = ctx.shape
    rows, k = (2 * shape.inter, shape.hidden) if name == "13" else (shape.hidden, shape.inter)
    weights, scales = getattr(ctx.args, f"w{name}"), getattr(ctx.args, f"s{name}")
    index = gfx950.i64(expert)
    return mx.Matrix(
        weights + index * (rows * k // 2), scales + index * (rows * mx.scale_cols(k)), k
    )


def shared_matrix(ctx, name):
    """The shared expert's table: the last of the expert tables, or MXFP8 tables of its own."""
    if not ctx.spec.shared_fp8:
        return expert_matrix(ctx, name, ctx.shape.model.experts)
    first = {"13": 0, "2": 2}[name]
    at = [ctx.args.sh_args + 8 * (first + i) for i in range(2)]
    weights, scales = [gfx950.load_constant(address, fx.Int64) for address in at]
    k = ctx.shape.hidden if name == "13" else ctx.shape.inter
    return mx.Matrix(weights, scales, k, fp8=True)


# ---------------------------------------------------------------------- products


def first_chunk(ctx):
    """This wave's eighth of k."""
    return ctx.wave * ctx.plan.ug_chunks


def load_scales(ctx, token):
    """A wave's scales of a token's row: read ahead of the products, each would wait for its own
    (3.5 us over the floor at four tokens, measured upstream)."""
    return mx.load_scales(ctx, scales_at(ctx, token), ctx.wave, ctx.plan.ug_chunks)


def load_chunk(ctx, token, i):
    at = token * ctx.plan.xn8_row + (first_chunk(ctx) + i) * mx.CHUNK_WORDS
    return mx.load_row_operand(ctx, at)


def store_partials_to_lds(ctx, at, acc):
    """This wave's tile to the partials that start at LDS word ``at``."""
    gfx950.lds_store(ctx.lds.tiles, at + ctx.tid * 4, acc, 4, fx.Float32)


def sum_partials(ctx, tiles, at, values, row, column):
    """The waves' sum of (row, column) of the tiles at word ``at`` of an LDS array.

    ``values`` (8, 16, 32) are summed by a wave: the lanes that hold the same one share the waves
    between them and meet in a butterfly.
    """
    waves = WAVES * values // gfx950.LANES
    share = div(ctx.lane, values)
    tile = at + share * (waves * TILE_WORDS)
    word = tile + (TILE_ROWS * div(row, 4) + column) * 4 + mod(row, 4)
    total = gfx950.lds_load(tiles, word)
    for w in range(1, waves):
        total = total + gfx950.lds_load(tiles, word + w * TILE_WORDS)
    return butterfly(total, SHARES[values])


def swiglu(ctx, gate, up):
    """min(g, limit) * sigmoid(alpha min(g, limit)) * (clamp(u, +-limit) + 1)."""
    limit, alpha = ctx.spec.swiglu_limit, ctx.shape.model.swiglu_alpha
    g = fx.min(gate, fx.Float32(limit))
    sigmoid = gfx950.rcp(1.0 + gfx950.exp2(g * (-alpha * LOG2E)))
    return (g * sigmoid) * (mx.clamp(up, limit) + 1.0)


@traced
def put_intermediates(ctx, lanes, token, slot, row, value):
    """Mid rows of a token's slot, one a lane of the first ``lanes``, as bf16: two to a pair, since
    every down task of the rank reads them all."""
    shape = ctx.shape
    at = (token * (shape.model.top_k + 1) + slot) * shape.inter + row
    both = [value, xor_lane(value, 1)]
    if (ctx.lane < lanes) & (mod(ctx.lane, 2) == 0):
        mailbox.put_bf(ctx.tag, scratch_view(ctx, "mid"), at, both)


# ---------------------------------------------------------------------- routed tasks


class RoutedTask:
    """The CTA's ``i``-th routed task: token, slot, row group, and whether it exists (past the last
    one its place is that of a real task); ``everywhere``: on every CTA."""

    def __init__(self, ctx, i):
        plan = ctx.plan
        per_token, share = plan.ug_tasks_per_token, plan.ug_ctas_per_token
        self.everywhere = all(plan.ug_tasks_of(cta) > i for cta in range(plan.blocks))
        if share is None:
            task = first_task(ctx, "up_gate") + i * plan.blocks
            self.exists = task < per_token * plan.tokens
            task = fx.min(task, per_token * plan.tokens - 1)
            self.token = div(task, per_token) if plan.tokens > 1 else fx.Int32(0)
            task = task - self.token * per_token
        else:
            task = mod(ctx.bid, share) + i * share
            self.exists = task < per_token
            self.token = div(ctx.bid, share)
            task = fx.min(task, per_token - 1)
        self.slot = div(task, plan.ug_per_slot)
        self.group = task - self.slot * plan.ug_per_slot


@in_stage("up_gate")
def request_routed(ctx, task):
    """(gate tiles, up tiles) of this wave's k for a routed task; one that does not exist reads
    nothing."""
    plan = ctx.plan
    table = expert_matrix(ctx, "13", routed_expert(ctx, task.token, task.slot))
    where = (task.group, first_chunk(ctx), plan.ug_chunks, mx.Lane(ctx.lane))
    present = None if task.everywhere else task.exists
    gate = mx.request_tiles(table, *where, present=present)
    return gate, mx.request_tiles(table, *where, skip=plan.ug_per_slot, present=present)


@in_stage("up_gate")
def compute_routed(ctx, task, tiles, half):
    """``half`` (0, 1): which partials to use; tasks take turns, so that one barrier a task is
    enough: wave 0 may still read the other half."""
    at = half * (2 * PARTIALS)
    gate, up = mfma.zero_tile(), mfma.zero_tile()
    gfx950.sched_barrier()
    scales = load_scales(ctx, task.token)
    for i in range(ctx.plan.ug_chunks):
        row = load_chunk(ctx, task.token, i)
        gate = mx.multiply(tiles[0], i, row, scales[i], gate)
        up = mx.multiply(tiles[1], i, row, scales[i], up)
    stamp(ctx, Point.ROUTED_MULTIPLIED)
    store_partials_to_lds(ctx, at, gate)
    store_partials_to_lds(ctx, at + PARTIALS, up)
    gfx950.barrier()
    publish_routed(ctx, task, at)


@traced
def publish_routed(ctx, task, at):
    """Every column of a routed tile is the token's: a lane reads the one that no other lane's bank
    is in."""
    if ctx.wave == 0:
        row = mod(ctx.lane, UG_ROWS)
        column = 4 * div(ctx.lane, UG_ROWS) + div(row, 4)
        gate = sum_partials(ctx, ctx.lds.tiles, at, UG_ROWS, row, column)
        up = sum_partials(ctx, ctx.lds.tiles, at + PARTIALS, UG_ROWS, row, column)
        value = swiglu(ctx, gate, up)
        row = task.group * UG_ROWS + row
        put_intermediates(ctx, UG_ROWS, task.token, task.slot, row, value)


# ---------------------------------------------------------------------- shared tasks


@in_stage("up_gate")
def request_shared(ctx, task, present=None):
    """Tiles of this wave's k for the shared expert's mid rows 8 task .. + 8: gate rows on a tile's
    first eight rows, up rows on the others. ``present``: see ``mx.request_tiles``."""
    plan = ctx.plan
    per_tile = TILE_ROWS // SH_ROWS
    row = mod(task, per_tile) * SH_ROWS + mod(ctx.row, SH_ROWS)
    lane = mx.Lane(
        slot=ctx.group * TILE_ROWS + row,
        groups=select(ctx.row < SH_ROWS, fx.Int32(0), fx.Int32(plan.ug_per_slot)),
    )
    where = (div(task, per_tile), first_chunk(ctx), plan.ug_chunks, lane)
    return mx.request_tiles(shared_matrix(ctx, "13"), *where, present=present)


@in_stage("up_gate")
def compute_shared(ctx, task, tiles):
    """A column is a token, the last one repeated past it. Its partials are in lds.red, which the
    caller keeps until a barrier later."""
    token = fx.min(ctx.row, ctx.spec.tokens - 1)
    acc = mfma.zero_tile()
    scales = load_scales(ctx, token)
    for i in range(ctx.plan.ug_chunks):
        acc = mx.multiply(tiles, i, load_chunk(ctx, token, i), scales[i], acc)
    gfx950.lds_store(ctx.lds.red, ctx.tid * 4, acc, 4, fx.Float32)
    gfx950.barrier()
    publish_shared(ctx, task)


@traced
def publish_shared(ctx, task):
    if ctx.wave == 0:
        tokens = ctx.spec.tokens
        values = SH_ROWS * {1: 1, 2: 2}.get(tokens, 4)
        row = mod(ctx.lane, SH_ROWS)
        token = mod(div(ctx.lane, SH_ROWS), values // SH_ROWS)
        gate = sum_partials(ctx, ctx.lds.red, 0, values, row, token)
        up = sum_partials(ctx, ctx.lds.red, 0, values, row + SH_ROWS, token)
        value = swiglu(ctx, gate, up)
        slot = ctx.shape.model.top_k
        put_intermediates(ctx, SH_ROWS * tokens, token, slot, task * SH_ROWS + row, value)
