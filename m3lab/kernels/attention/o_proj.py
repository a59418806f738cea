"""Stage 3: the output projection of the merged attention, all-reduced over the ranks.

A task is 32 hidden rows of every token: fp8 weights by fp8 attention on the scaled MFMA, four waves
a row group with k split between them, bf16 partials to the peers, their sum in rank order to the
``a`` mailbox and, for 2..11 tokens, h_mid. The normalization and the router are the next stage's.
"""

import flydsl.expr as fx

from m3lab.kernels.attention.merge import merge_token, row_quad
from m3lab.kernels.device import allreduce, gfx950, mailbox, mfma
from m3lab.kernels.device.context import first_task, scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, range_constexpr, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import div, mod, pick
from m3lab.kernels.plan import O_ROWS, THREADS, TILE_ROWS, WAVES
from m3lab.kernels.stages import Point
from m3lab.layout.regions import WORD_BYTES

TILE_BYTES = 512  # 16 rows x 32 bytes of a shuffled table
CHUNK_K = 64  # k of one chunk: two tiles, 16 bytes a lane
WAVES_PER_GROUP = WAVES * TILE_ROWS // O_ROWS
PAIRS = O_ROWS // 2  # row pairs of a task: a thread finishes one of a token


@traced
def project(ctx):
    """Every task of 32 hidden rows; then the stage's stamp is the caller's."""
    plan = ctx.plan
    for task in range(first_task(ctx, "o_proj"), plan.o_tasks, plan.blocks):
        project_task(ctx, fx.Int32(task))


def project_task(ctx, task):
    weights = load_weights(ctx, task)
    # what the end of the task needs, requested before the wait too
    row_scales = load_row_scales(ctx, task)
    residual = load_residual(ctx, task)
    peers = request_peers(ctx, task)
    x_scale = input_rows(ctx)
    gfx950.barrier()
    multiply(ctx, weights)
    gfx950.barrier()
    finish_rows(ctx, task, row_scales, x_scale, residual, peers)
    gfx950.barrier()


def chunks_per_wave(ctx):
    return ctx.shape.o_k // CHUNK_K // WAVES_PER_GROUP


def load_weights(ctx, task):
    """This wave's chunks of its row group, 16 bytes a lane each."""
    table = gfx950.buffer(ctx.args.w_o)
    group = task * (O_ROWS // TILE_ROWS) + div(ctx.wave, WAVES_PER_GROUP)
    n = chunks_per_wave(ctx)
    first = (group * (ctx.shape.o_k // CHUNK_K) + mod(ctx.wave, WAVES_PER_GROUP) * n) * 2
    return [gfx950.load(table, (first + 2 * i) * TILE_BYTES + ctx.lane * 16, 4) for i in range(n)]


def row_pair(ctx, task):
    """(token, first hidden row) that this thread finishes, for tid < PAIRS * tokens."""
    return div(ctx.tid, PAIRS), task * O_ROWS + mod(ctx.tid, PAIRS) * 2


def load_row_scales(ctx, task):
    row = row_pair(ctx, task)[1]
    words = gfx950.load(gfx950.buffer(ctx.args.s_o), row * WORD_BYTES, 2)
    return [gfx950.bitcast_f32(words[i]) for i in range(2)]


def finishes_h_mid(ctx):
    """Whether this stage writes h_mid: with one token, or through owner ranks, the router does."""
    return ctx.spec.tokens > 1 and not ctx.plan.two_shot


def load_residual(ctx, task):
    """The bf16 pair of the residual at this thread's rows, None where h_mid is not ours."""
    if not finishes_h_mid(ctx):
        return None
    token, row = row_pair(ctx, task)
    token = fx.min(token, ctx.spec.tokens - 1)  # the other threads load a row and drop it
    return gfx950.load(gfx950.buffer(ctx.args.h_in), (token * ctx.shape.hidden + row) * 2)


def input_rows(ctx):
    """lds.pool := every token's fp8 attention row; -> the scale of the token that this thread
    finishes (of the last one past them)."""
    tokens = ctx.spec.tokens
    token = fx.min(div(ctx.tid, PAIRS), tokens - 1)
    if ctx.plan.merge_tasks == 0:
        return pick([merge_row(ctx, t) for t in range(tokens)], token)
    await_scales(ctx)
    gfx950.barrier()
    stamp(ctx, Point.PARTITIONS_IN)
    gfx950.acquire()
    fetch_rows(ctx)
    return gfx950.lds_load(ctx.lds.heads, token, 1, fx.Float32)


@traced
def await_scales(ctx):
    """Wave 0 waits for every token's scale, which is its row's flag, and leaves them in lds.heads;
    the other waves wait at the barrier. All of them spinning were 1,536 waves on one line."""
    if ctx.wave == 0:
        token = fx.min(ctx.lane, ctx.spec.tokens - 1)
        ((scale,),) = mailbox.poll(ctx.tag, [PairRange(scratch_view(ctx, "attnq_s"), token)])
        if ctx.lane < ctx.spec.tokens:
            gfx950.lds_store(ctx.lds.heads, ctx.lane, gfx950.bitcast_f32(scale))


def merge_row(ctx, token):
    """A token's row, merged here -> its scale."""
    words, scale = merge_token(ctx, token)
    for kv_head, word in enumerate(words):
        at = token * ctx.plan.o_row + row_quad(ctx, kv_head)
        gfx950.lds_store(ctx.lds.pool, at, word)
    return scale


@traced
def fetch_rows(ctx):
    """The merge tasks' plain words, 16 bytes a load, all requested before the first is stored."""
    plan, shape = ctx.plan, ctx.shape
    base = ctx.spec.regions["attnq"].offset
    row_words = shape.o_k // 4
    vectors = ctx.spec.tokens * row_words // 4
    for first in range_constexpr(0, vectors, THREADS):
        at = (first + ctx.tid) * 4
        if first + ctx.tid < vectors:
            words = gfx950.load(ctx.scratch, at * WORD_BYTES, 4, base=base, cache=gfx950.DEVICE)
            token, word = div(at, row_words), mod(at, row_words)
            gfx950.lds_store(ctx.lds.pool, token * plan.o_row + word, words, 4)


def multiply(ctx, weights):
    """lds.red := each wave's tile of partial sums, rows by tokens.

    B column r is token r, the last one repeated past it, so the weight stream is the same for any
    number of tokens. Two chunks fill one 16x16x128 MFMA: a lane's k are 16 g .. + 16 of each.
    """
    token = fx.min(ctx.row, ctx.spec.tokens - 1)
    n = chunks_per_wave(ctx)
    row = token * ctx.plan.o_row + mod(ctx.wave, WAVES_PER_GROUP) * (n * 16)
    acc = mfma.zero_tile()
    for i in range(0, n, 2):
        halves = [
            gfx950.lds_load(ctx.lds.pool, row + (i + h) * 16 + ctx.group * 4, 4) for h in range(2)
        ]
        a = mfma.join(weights[i], weights[i + 1])
        acc = mfma.mfma_f8f8_unit(a, mfma.join(*halves), acc)
    gfx950.lds_store(ctx.lds.red, ctx.tid * 4, acc, 4, fx.Float32)


def sum_tiles(ctx, token, pair):
    """The four waves' sums of rows 2 pair and 2 pair + 1 of a task for ``token``."""
    wave = div(pair, TILE_ROWS // 2) * WAVES_PER_GROUP
    row = 2 * mod(pair, TILE_ROWS // 2)
    at = (wave * gfx950.LANES + TILE_ROWS * div(row, 4) + token) * 4 + mod(row, 4)
    low, high = fx.Float32(0.0), fx.Float32(0.0)
    for w in range(WAVES_PER_GROUP):
        part = gfx950.lds_load(ctx.lds.red, at + w * gfx950.LANES * 4, 2, fx.Float32)
        low, high = low + part[0], high + part[1]
    return low, high


def owner_of(ctx, task):
    """The rank that sums a task's rows in the owner form."""
    return mod(task, ctx.spec.npes)


def request_peers(ctx, task):
    """The inboxes that this task pushes to: every rank's, after the owner's in the owner form."""
    peers = allreduce.request_peers(ctx)
    if ctx.plan.two_shot:
        return [allreduce.request_peer(ctx, owner_of(ctx, task)), *peers]
    return peers


@traced
def finish_rows(ctx, task, row_scales, x_scale, residual, peers):
    """A thread's row pair of one token: bf16 partials to the peers, their sum to ``a``."""
    if ctx.tid < PAIRS * ctx.spec.tokens:
        token, row = row_pair(ctx, task)
        sums = sum_tiles(ctx, token, mod(ctx.tid, PAIRS))
        partial = [(s * x_scale) * w for s, w in zip(sums, row_scales, strict=True)]
        if const_expr(ctx.plan.two_shot):
            reduce_at_owner(ctx, task, token, row, partial, peers)
        else:
            reduce_here(ctx, token, row, partial, residual, peers)


def reduce_here(ctx, token, row, partial, residual, peers):
    """One hop: to every peer, and every rank sums. A router then reads one device-scope row, not
    all peers' system-scope ones."""
    for address in peers:
        allreduce.push(ctx, allreduce.inbox_at(address), "attn", token, row, partial)
    sums = allreduce.rank_sum(ctx, "attn", token, row)
    at = token * ctx.shape.hidden + row
    # the rank sum alone: the router adds the residual in fp32, so the norm reads
    # bf16(sum) plus the unrounded residual
    mailbox.put_bf(ctx.tag, scratch_view(ctx, "a"), at, sums)
    if residual is not None:
        pairs = zip(sums, gfx950.bf16_floats(residual), strict=True)
        word = gfx950.pack_bf16x2(*[gfx950.bf16_round(s) + r for s, r in pairs])
        gfx950.store(gfx950.buffer(ctx.args.h_mid), at * 2, word)


@traced
def reduce_at_owner(ctx, task, token, row, partial, peers):
    """Two hops: to the row group's owner, which sums and gathers to every rank's ``a_ag``."""
    owner, *everyone = peers
    allreduce.push(ctx, allreduce.inbox_at(owner), "attn", token, row, partial)
    if owner_of(ctx, task) == ctx.args.rank:
        sums = allreduce.rank_sum(ctx, "attn", token, row)
        inboxes = [allreduce.inbox_at(address) for address in everyone]
        allreduce.gather(ctx, inboxes, "a_ag", token, row, sums)
