"""Stage 0 for long contexts (more blocks than ``Tuning.rank_up_to``), up to the longest context.

The eight split CTAs of a token each take an eighth of its blocks, send their share's 16 best to a
mailbox, and each ranks the 8 x 16 candidates that come in: the context's 16 best are among them.
Runs before the split stage and leaves this CTA's two pages and the context length in LDS, where
``select`` would; inlined in the split, this code slowed it for every context (64k keys: +1 us,
measured upstream). One index head.

A (key, block) pair orders by key, then by the higher block id; a wave sorts them in 16-lane groups
with compare-exchange networks, descending.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.attention.select import (
    CONTEXT_WORD,
    LEAST,
    context_and_slot,
    index_key,
    row_base,
    row_of,
    store_pages_to_lds,
    write_table,
)
from m3lab.kernels.device import gfx950, mailbox
from m3lab.kernels.device.context import first_task, scratch_view, stamp
from m3lab.kernels.device.gfx950 import select, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import div, mod, xor_lane
from m3lab.kernels.plan import THREADS, WAVES
from m3lab.kernels.stages import Point
from m3lab.layout.regions import N_SPLIT, PAIR_BYTES, WORD_BYTES

BLOCKS_PER_THREAD = 2  # of a share: an eighth of 8192 blocks over 512 threads
GROUP = 16  # lanes of a sorted list: the blocks that are kept
NO_BLOCK = -1
REVERSED_ROW = 15  # lane xor within 16 lanes that reverses them
OTHER_ROW = 16 ^ REVERSED_ROW  # the neighbouring 16 lanes, reversed
OTHER_HALF = 32 ^ REVERSED_ROW  # the same rows of the other 32 lanes, reversed


@dataclass(frozen=True)
class Pair:
    """A candidate of this lane."""

    key: Any
    block: Any


def beats(a, b):
    """Whether pair ``a`` goes before ``b``."""
    return (a.key > b.key) | ((a.key == b.key) & (a.block > b.block))


def either(cond, yes, no):
    return Pair(select(cond, yes.key, no.key), select(cond, yes.block, no.block))


def lane_pair(pair, offset):
    """The pair of lane ^ offset."""
    return Pair(xor_lane(pair.key, offset), xor_lane(pair.block, offset))


def exchange(pair, offset, take_low):
    """One compare-exchange: the lower of the two lanes' pairs where ``take_low``."""
    other = lane_pair(pair, offset)
    return either(beats(other, pair) ^ take_low, other, pair)


def sort_lists(ctx, pair):
    """Every 16 lanes' pairs in descending order."""
    for size in (2, 4, 8, 16):
        stride = size // 2
        while stride:
            upper = (ctx.row & stride) != 0
            if size < GROUP:
                upper = upper ^ ((ctx.row & size) != 0)  # runs alternate in direction
            pair = exchange(pair, stride, upper)
            stride //= 2
    return pair


def merge_lists(ctx, pair, reverse):
    """The 16 best of a descending list and of another one, given in ascending order; descending.

    The lanewise maximum holds them as a bitonic sequence.
    """
    pair = either(beats(reverse, pair), reverse, pair)
    for stride in (8, 4, 2, 1):
        pair = exchange(pair, stride, (ctx.row & stride) != 0)
    return pair


def merge_rows(ctx, pair):
    """The 16 best of a wave's four lists, in every 16 lanes."""
    for offset in (OTHER_ROW, OTHER_HALF):
        pair = merge_lists(ctx, pair, lane_pair(pair, offset))
    return pair


def wave_best(ctx, first, second):
    """The 16 best of a wave's 128 pairs."""
    one, two = (merge_rows(ctx, sort_lists(ctx, pair)) for pair in (first, second))
    return merge_lists(ctx, one, lane_pair(two, REVERSED_ROW))


def store_list_to_lds(ctx, entry, pair):
    gfx950.lds_store(
        ctx.lds.keys, 2 * entry, fx.Vector.from_elements([pair.key, pair.block], fx.Int32), 2
    )


def kept_pair(ctx, entry):
    words = gfx950.lds_load(ctx.lds.keys, 2 * entry, 2)
    return Pair(words[0], words[1])


def best_of_lists(ctx):
    """For wave 0: the 16 best of the eight descending lists in lds.keys, in every 16 lanes."""
    low = 2 * ctx.group * GROUP + ctx.row
    high = (2 * ctx.group + 1) * GROUP + (GROUP - 1 - ctx.row)
    return merge_rows(ctx, merge_lists(ctx, kept_pair(ctx, low), kept_pair(ctx, high)))


@traced
def select_long(ctx):
    """The split tasks of a long context select; a CTA has at most one split task.

    Decided row by row: a row that is just not long, of a request whose last row is, gets the same
    blocks either way.
    """
    task = first_task(ctx, "split")
    rows = ctx.spec.tokens * ctx.shape.kv_heads
    row = row_of(ctx, fx.min(div(task, N_SPLIT), rows - 1))
    is_long = row.n_blk > ctx.tuning.rank_up_to
    if gfx950.unlikely((task < ctx.plan.split_tasks) & (is_long)):
        select_share(ctx, row, mod(task, N_SPLIT))


def select_share(ctx, row, share):
    first, second = request_share(ctx, row, share)
    stamp(ctx, Point.KEYS_MADE)
    store_wave_list_to_lds(ctx, wave_best(ctx, first, second))
    gfx950.barrier()
    send_candidates(ctx, row.unit, share)
    gfx950.barrier()
    stamp(ctx, Point.KEYS_SHARED)
    receive_candidates(ctx, row.unit)
    gfx950.barrier()
    place_candidates(ctx, row, share)
    gfx950.barrier()


def request_share(ctx, row, share):
    """This thread's pairs of the share: the least key and no block past its end."""
    base = row_base(ctx, "iscore", row.unit)
    span = div(row.n_blk + (N_SPLIT - 1), N_SPLIT)
    end = fx.min((share + 1) * span, row.n_blk)
    blocks = [share * span + ctx.tid + THREADS * i for i in range(BLOCKS_PER_THREAD)]
    words = [
        gfx950.load(ctx.scratch, fx.min(block, row.n_blk - 1) * PAIR_BYTES, base=base)
        for block in blocks
    ]
    none = Pair(fx.Int32(LEAST), fx.Int32(NO_BLOCK))
    return [
        either(block < end, Pair(index_key(ctx, block, word, row.n_blk), block), none)
        for block, word in zip(blocks, words, strict=True)
    ]


@traced
def store_wave_list_to_lds(ctx, pair):
    if ctx.lane < GROUP:
        store_list_to_lds(ctx, ctx.wave * GROUP + ctx.lane, pair)


def candidate_at(ctx, unit, entry):
    """First pair of the two that hold candidate ``entry`` of a row."""
    per_row = ctx.spec.regions["sel_long"].per_token // ctx.shape.kv_heads
    return unit * per_row + 2 * entry


@traced
def send_candidates(ctx, unit, share):
    """Wave 0: the share's 16 best to every split CTA of the row. A share has more than 16 blocks,
    so all 16 are there."""
    if ctx.wave == 0:
        best = best_of_lists(ctx)
        if ctx.lane < GROUP:
            at = candidate_at(ctx, unit, share * GROUP + ctx.lane)
            box = scratch_view(ctx, "sel_long")
            mailbox.put_words(ctx.tag, box, at, [best.key, best.block])


@traced
def receive_candidates(ctx, unit):
    """lds.keys := every share's candidates, a list a share."""
    if ctx.tid < WAVES * GROUP:
        request = PairRange(scratch_view(ctx, "sel_long"), candidate_at(ctx, unit, ctx.tid), 2)
        ((key, block),) = mailbox.poll(ctx.tag, [request])
        store_list_to_lds(ctx, ctx.tid, Pair(key, block))


@traced
def place_candidates(ctx, row, share):
    """Wave 0: the 16 best blocks' slots -> lds.blocks, and (share 0) the sparse table."""
    if ctx.wave == 0:
        best = best_of_lists(ctx)
        held = ctx.lane < GROUP
        stamp(ctx, Point.RANKED)
        # a corrupt id never becomes an address
        block = fx.min(fx.max(best.block, 0), row.n_blk - 1)
        entry = row.token * ctx.args.bt_width + block
        block_id = gfx950.load(gfx950.buffer(ctx.args.block_table), entry * WORD_BYTES)
        is_tail = held & (best.block == row.n_blk - 1)
        tail_rank = gfx950.first_lane(is_tail)
        n_ctx, slot = context_and_slot(ctx, ctx.lane, is_tail, tail_rank, row)
        first_page = block_id * ctx.spec.cache.page_stride
        store_pages_to_lds(ctx, share, held, slot, first_page)
        if share == 0:
            write_table(ctx, row.unit, held, slot, first_page, n_ctx)
        if ctx.lane == 0:
            gfx950.lds_store(ctx.lds.blocks, CONTEXT_WORD, n_ctx)
