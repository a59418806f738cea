"""The merge of a token's eight partitions: weights them, sums them and quantizes the row to fp8.

With several tokens one task per token merges and publishes the row. With one token every output
projection task merges for itself (``merge_token``), which saves a hand-off.
"""

import flydsl.expr as fx

from m3lab.kernels.attention.split import (
    FP8_MAX,
    HEAD_THREADS,
    LOG2E,
    group_quads,
    thread_quad,
    unless_repeated,
)
from m3lab.kernels.device import gfx950, mailbox
from m3lab.kernels.device.context import first_task, scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, select, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import add, block_max, div, largest, mod, reduce
from m3lab.kernels.marks import in_stage
from m3lab.kernels.stages import Point
from m3lab.layout.regions import N_SPLIT, WORD_BYTES

SHARES_AT = 64  # lds.red in a merge: a word a wave, then every head's shares,
PARTITIONS_AT = 1024  # then all maxima and sums, wave 0's alone


@traced
def await_partitions(ctx, token):
    """Wave 0 waits for every partition and leaves the shares of each head, the other waves at the
    barrier: 512 threads polling through the whole split load the memory system that the split
    itself reads (-0.4 us, measured upstream), and every wave of every output task would read the
    same few lines of maxima and sums. The barrier frees ``lds.red`` below the shares too."""
    if const_expr(not ctx.tuning.poll_all):
        if ctx.wave == 0:
            store_shares_to_lds(ctx, token)
    gfx950.barrier()


def store_shares_to_lds(ctx, token):
    """lds.red := at SHARES_AT each head's share of every partition, by one wave."""
    heads = ctx.shape.q_heads
    n = N_SPLIT * heads
    firsts = range(0, n, gfx950.LANES)
    requests = [
        PairRange(scratch_view(ctx, name), token * n + ctx.lane + first)
        for name in ("sp_m", "sp_l")
        for first in firsts
    ]
    for i, (word,) in enumerate(mailbox.poll(ctx.tag, requests)):
        gfx950.lds_store(
            ctx.lds.red, PARTITIONS_AT + i * gfx950.LANES + ctx.lane, gfx950.bitcast_f32(word)
        )
    head = mod(ctx.lane, heads)
    values = [
        gfx950.lds_load(ctx.lds.red, PARTITIONS_AT + i * heads + head) for i in range(2 * N_SPLIT)
    ]
    shares = shares_of(values[:N_SPLIT], values[N_SPLIT:])
    for i in range(0, N_SPLIT, 4):
        four = fx.Vector.from_elements(shares[i : i + 4], fx.Float32)
        gfx950.lds_store(ctx.lds.red, SHARES_AT + head * N_SPLIT + i, four, 4, fx.Float32)


def shares_of(maxima, sums):
    """A head's share of every partition, in fp32: sum x exp2(maximum - the largest), over their
    sum."""
    top = reduce(maxima, largest)
    weights = [s * gfx950.exp2((m - top) * LOG2E) for s, m in zip(sums, maxima, strict=True)]
    total = reduce(weights, add)
    total = select(total > 0.0, total, fx.Float32(1.0))
    inverse = 1.0 / total
    return [gfx950.div_rn(weight, total, inverse) for weight in weights]


def poll_partitions(ctx, token, kv_head):
    """Every partition's share of this thread's head under a kv head, and its four outputs."""
    shape = ctx.shape
    quad = row_quad(ctx, kv_head)
    head = div(quad, HEAD_THREADS)
    wanted = [("sp_o", shape.o_k // 2, quad * 2, 2)]
    if ctx.tuning.poll_all:
        wanted = [("sp_m", shape.q_heads, head, 1), ("sp_l", shape.q_heads, head, 1), *wanted]
    requests = []
    for name, per_part, at, pairs in wanted:
        first = token * (N_SPLIT * per_part) + at
        box = scratch_view(ctx, name)
        # a partition's offset is a constant of the load: an address each would fill registers
        requests += [
            PairRange(mailbox.further(box, i * per_part), first, pairs) for i in range(N_SPLIT)
        ]
    got = mailbox.poll(ctx.tag, requests, batch=len(requests))
    outs = [[x for word in pair for x in gfx950.bf16_floats(word)] for pair in got[-N_SPLIT:]]
    if ctx.tuning.poll_all:
        values = [gfx950.bitcast_f32(word) for (word,) in got[:-N_SPLIT]]
        return shares_of(values[:N_SPLIT], values[N_SPLIT:]), outs
    at = SHARES_AT + head * N_SPLIT
    halves = [gfx950.lds_load(ctx.lds.red, at + i, 4, fx.Float32) for i in range(0, N_SPLIT, 4)]
    return [half[i] for half in halves for i in range(4)], outs


def row_quad(ctx, kv_head):
    """This thread's run of four in the whole attention row, under a kv head."""
    return kv_head * group_quads(ctx) + thread_quad(ctx)


@in_stage("merge")
def merge_token(ctx, token):
    """A token's partitions merged and quantized -> (this thread's ``row_quad`` of every kv head as
    a word of fp8, the token's scale).

    The scale is amax / 448; an all-zero row gives zeros, not 0 * inf. ``lds.red`` must be free.
    """
    await_partitions(ctx, token)
    quads = [merge_quad(ctx, token, kv_head) for kv_head in range(ctx.shape.kv_heads)]
    amax = block_max(reduce([gfx950.absolute(dim) for quad in quads for dim in quad], largest), ctx)
    scale = amax * (1.0 / FP8_MAX)
    inverse = select(amax == 0.0, fx.Float32(0.0), gfx950.rcp(scale))
    return [gfx950.pack_fp8x4(*[dim * inverse for dim in quad]) for quad in quads], scale


def merge_quad(ctx, token, kv_head):
    """This thread's four merged dims of a kv head, rounded to bf16."""
    shares, outs = poll_partitions(ctx, token, kv_head)
    stamp(ctx, Point.PARTITIONS_IN)
    dims = [fx.Float32(0.0)] * 4
    for share, out in zip(shares, outs, strict=True):
        dims = [gfx950.fma(share, x, dim) for x, dim in zip(out, dims, strict=True)]
    return [gfx950.bf16_round(dim) for dim in dims]


@traced
def merge(ctx):
    """With several tokens, one task per token merges it; merged in the output tasks, the tokens'
    merges ran one after another in every one of them (+14 us at four tokens, measured upstream)."""
    plan = ctx.plan
    if const_expr(plan.merge_tasks > 0):
        for task in range(first_task(ctx, "merge"), plan.merge_tasks, plan.blocks):
            publish_token(ctx, fx.Int32(task))


def store_words(ctx, token, words):
    base = ctx.spec.regions["attnq"].offset
    for kv_head, word in enumerate(words):
        at = token * (ctx.shape.o_k // 4) + row_quad(ctx, kv_head)
        gfx950.store(ctx.scratch, at * WORD_BYTES, word, base=base, cache=gfx950.DEVICE)


@traced
def publish_token(ctx, token):
    """The merged row as plain words, then its scale: the scale's pair is the flag."""
    words, scale = merge_token(ctx, token)
    unless_repeated(ctx, lambda: store_words(ctx, token, words))
    gfx950.release_stores()
    gfx950.barrier()
    if ctx.tid == 0:
        mailbox.put(ctx.tag, scratch_view(ctx, "attnq_s"), token, scale)
