"""Stage 0: which 16 sparse blocks of its context a token attends to.

The blocks' index scores are in scratch; here they are ranked by (score, block id), the pinned
blocks always in, the tail block listed last. Every split CTA of a token selects for itself and
keeps the two blocks of its own partition. A context of up to 16 blocks keeps them all and is never
scored. A context of up to ``Tuning.rank_up_to`` blocks is ranked by counting, whose work grows with
the square of the blocks; longer ones are ``select_long``'s.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.context import stamp
from m3lab.kernels.device.gfx950 import range_constexpr, select, traced
from m3lab.kernels.device.wave import butterfly, div, mod
from m3lab.kernels.marks import in_stage
from m3lab.kernels.plan import THREADS
from m3lab.kernels.stages import Point
from m3lab.layout.regions import N_SPLIT, PAIR_BYTES, SPARSE_TABLE_WORDS, WORD_BYTES

BLOCKS_WORDS = 4  # of lds.blocks: two first pages, the sparse context length, a spare
CONTEXT_WORD = 2
RANK_SPLIT = 8  # threads that share a block's rank count
RANK_LANES: tuple[int, ...] = (4, 2, 1)
RANK_WIDTH = 4  # keys that a thread reads at once
INIT_SCORE = 1e30  # a pinned first block
LOCAL_SCORE = 1e29  # a pinned last block
LEAST = -(2**31)
MAGNITUDE = 0x7FFFFFFF
INF_BITS = 0x7F800000


def index_key(ctx, block, word, n_blk):
    """Sort key of ``block``'s raw score word: a signed int ordered like the float, -0 equal to 0,
    NaN below -inf; a pinned block's score is not read."""
    score = gfx950.bitcast_f32(word)
    if ctx.spec.init_blocks:
        score = select(block < ctx.spec.init_blocks, fx.Float32(INIT_SCORE), score)
    score = select(block >= n_blk - ctx.spec.local_blocks, fx.Float32(LOCAL_SCORE), score)
    bits = gfx950.bitcast_i32(score)
    bits = select(bits == fx.Int32(LEAST), fx.Int32(0), bits)
    key = select(bits < 0, bits ^ fx.Int32(MAGNITUDE), bits)
    nan = (bits & fx.Int32(MAGNITUDE)) > fx.Int32(INF_BITS)
    return select(nan, fx.Int32(LEAST), key)


def count_beaten(keys, first, width, own, own_key, n_blk):
    """How many of the ``width`` blocks from ``first`` on beat block ``own``."""
    got = gfx950.lds_load(keys, first, width)
    count = fx.Int32(0)
    for i, other_key in enumerate([got] if width == 1 else [got[i] for i in range(width)]):
        other = first + i
        beats = (other_key > own_key) | ((other_key == own_key) & (other > own))
        count = count + select(beats & (other < n_blk), fx.Int32(1), fx.Int32(0))
    return count


@traced
def count_ranks(ctx, n_blk):
    """lds.ranks[b] := the blocks that beat block b, for every b < n_blk.

    RANK_SPLIT threads share a block, one lane walking 61 keys took 1.9 us (measured upstream), and
    each compares RANK_WIDTH keys a round, which one LDS read brings.
    """
    keys, ranks = ctx.lds.keys, ctx.lds.ranks
    split, lanes, width = RANK_SPLIT, RANK_LANES, RANK_WIDTH
    if ctx.tuning.serial_rank:
        split, lanes = 1, ()
        width = 2  # what the compiler makes of one a round: its loop reads 64 bits
    part = mod(ctx.tid, split)
    for first in range(0, n_blk, THREADS // split):
        block = fx.Int32(first) + div(ctx.tid, split)
        own = fx.min(block, n_blk - 1)
        own_key = gfx950.lds_load(keys, own)
        count = fx.Int32(0)
        for start in range(0, n_blk, split * width):
            # below THREADS: every key is written
            count = count + count_beaten(keys, start + part * width, width, own, own_key, n_blk)
        count = butterfly(count, lanes)
        if (part == 0) & (block < n_blk):
            gfx950.lds_store(ranks, block, count)


@dataclass(frozen=True)
class Row:
    """A token's context for one kv head, whose index head scores it: the keys that the token sees,
    at least one, and their sparse blocks; uniform. ``unit`` counts (token, kv head)."""

    token: Any
    unit: Any
    seq_len: Any
    n_blk: Any


@in_stage("select")
def row_of(ctx, unit):
    """A graph's padding rows carry length 0 and block 0: as one key of page 0 they stay finite."""
    size = ctx.shape.model.sparse_block
    token = div(unit, ctx.shape.kv_heads)
    seq_len = fx.max(gfx950.load_constant(ctx.args.seq_lens + gfx950.i64(token) * WORD_BYTES), 1)
    return Row(token, unit, seq_len, div(seq_len + (size - 1), size))


def row_base(ctx, name, unit):
    """Byte offset of a row's part of a scratch region."""
    region = ctx.spec.regions[name]
    return region.offset + unit * (region.token_bytes // ctx.shape.kv_heads)


@dataclass(frozen=True)
class Candidate:
    """Block tid of a token's context as thread tid loads it: the raw score word, the block id."""

    score: Any
    block_id: Any


@in_stage("select")
def request_candidate(ctx, row):
    """Request this thread's block of a row.

    K1 or a scorer wrote the scores before this launch, so a plain load reads them. A pinned
    block's slot holds no score and is not used; nor is one past the context.
    """
    base = row_base(ctx, "iscore", row.unit)
    table = gfx950.buffer(ctx.args.block_table)
    entry = row.token * ctx.args.bt_width + fx.min(ctx.tid, row.n_blk - 1)
    return Candidate(
        score=gfx950.load(ctx.scratch, ctx.tid * PAIR_BYTES, base=base),
        block_id=gfx950.load(table, entry * WORD_BYTES),
    )


def rank_blocks(ctx, candidate, n_blk):
    """Thread b keys block b; -> (its rank, the tail block's rank), valid for b < n_blk."""
    scored = (n_blk > ctx.shape.model.topk_blocks) & (ctx.tid < n_blk)
    by_score = index_key(ctx, ctx.tid, candidate.score, n_blk)
    gfx950.lds_store(ctx.lds.keys, ctx.tid, select(scored, by_score, fx.Int32(0) - ctx.tid))
    stamp(ctx, Point.KEYS_MADE)
    gfx950.barrier()
    stamp(ctx, Point.KEYS_SHARED)
    count_ranks(ctx, n_blk)
    gfx950.barrier()
    rank = gfx950.lds_load(ctx.lds.ranks, fx.min(ctx.tid, n_blk - 1))
    tail_rank = gfx950.uniform(gfx950.lds_load(ctx.lds.ranks, n_blk - 1))
    stamp(ctx, Point.RANKED)
    return rank, tail_rank


def context_and_slot(ctx, rank, is_tail, tail_rank, row):
    """(sparse context length, slot of this thread's block): the full blocks by rank, the tail block
    (the one that holds the row's own token) last. ``tail_rank`` is at least the number of slots
    where the tail is not in."""
    model = ctx.shape.model
    size = model.sparse_block
    n_sel = fx.min(row.n_blk, model.topk_blocks)
    tail_in = tail_rank < n_sel
    n_full = n_sel - select(tail_in, fx.Int32(1), fx.Int32(0))
    # ranks are a strict order: a block behind the tail moves up by the tail's place
    full_slot = rank - select(tail_rank < rank, fx.Int32(1), fx.Int32(0))
    with_tail = n_full * size + row.seq_len - (row.n_blk - 1) * size
    n_ctx = select(tail_in, with_tail, fx.min(n_sel * size, row.seq_len))
    return n_ctx, select(is_tail, n_full, full_slot)


def pages_from(first, n):
    return fx.Vector.from_elements([first + i for i in range(n)], fx.Int32)


@traced
def write_table(ctx, unit, is_in, slot, first_page, n_ctx):
    """The row's sparse page table: the pages of every slot, then the sparse context length."""
    base = row_base(ctx, "sparse_table", unit)
    pages = ctx.plan.pages_per_block
    if is_in:
        for j in range_constexpr(0, pages, 4):
            at = (slot * pages + j) * WORD_BYTES
            gfx950.store(ctx.scratch, at, pages_from(first_page + j, 4), base=base)
    if ctx.tid == 0:
        gfx950.store(ctx.scratch, (SPARSE_TABLE_WORDS - 2) * WORD_BYTES, n_ctx, base=base)


@traced
def store_pages_to_lds(ctx, partition, is_in, slot, first_page):
    """lds.blocks[0..1] := the first page ids of selection slots 2 p and 2 p + 1."""
    per_part = ctx.shape.model.topk_blocks // N_SPLIT
    if is_in & (div(slot, per_part) == partition):
        gfx950.lds_store(ctx.lds.blocks, mod(slot, per_part), first_page)


@in_stage("select")
@traced
def select_blocks(ctx, row, partition, candidate):
    """lds.blocks[0..1] := the first page ids of the token's selection slots 2p, 2p + 1 (page 0
    where the selection is shorter); -> its sparse context length, uniform. Partition 0's CTA also
    writes the token's sparse table. What the CTA stored to LDS before is there for every wave.

    For a long context ``select_long`` has left all that: a one-block stand-in is ranked and placed
    nowhere.
    """
    short = row.n_blk <= ctx.tuning.rank_up_to
    n_blk = select(short, row.n_blk, fx.Int32(1))
    if (ctx.tid < BLOCKS_WORDS) & short:
        gfx950.lds_store(ctx.lds.blocks, ctx.tid, fx.Int32(0))
    rank, tail_rank = rank_blocks(ctx, candidate, n_blk)
    topk = ctx.shape.model.topk_blocks
    is_in = (ctx.tid < n_blk) & (rank < topk) & short
    is_tail = ctx.tid == n_blk - 1
    n_ctx, slot = context_and_slot(
        ctx, rank, is_tail, tail_rank, Row(row.token, row.unit, row.seq_len, n_blk)
    )
    first_page = candidate.block_id * ctx.spec.cache.page_stride
    store_pages_to_lds(ctx, partition, is_in, slot, first_page)
    if (partition == 0) & short:
        write_table(ctx, row.unit, is_in, slot, first_page, n_ctx)
    gfx950.barrier()
    return gfx950.uniform(select(short, n_ctx, gfx950.lds_load(ctx.lds.blocks, CONTEXT_WORD)))
