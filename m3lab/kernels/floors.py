"""Byte floors: the least bytes a stage must move on one rank, whatever the kernel does.

A floor counts each needed byte once per step: weights, selected keys, tables, mailbox payloads with
their tags. A kernel moves more: several CTAs read one table, polls read again. No times here.
"""

from __future__ import annotations

from dataclasses import dataclass

from m3lab.layout.regions import N_SPLIT, PAIR_BYTES, SCORE_COPIES, SPARSE_TABLE_WORDS
from m3lab.model.shapes import MX_BLOCK, CacheLayout, RankShape


@dataclass(frozen=True)
class Floor:
    """Bytes of one stage: from memory (weights, cache, inputs), and between CTAs and ranks."""

    stage: str
    weights: int
    cache: int
    inputs: int
    mailbox: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.inputs + self.mailbox


@dataclass(frozen=True)
class StepBytes:
    """What the floors of a step depend on.

    ``seq_lens``: keys that each row sees. ``npes``: ranks that reduce together. ``distinct``:
    different routed experts that the rows choose together.
    """

    shape: RankShape
    seq_lens: tuple[int, ...]
    npes: int
    layout: CacheLayout
    distinct: int

    @property
    def tokens(self) -> int:
        return len(self.seq_lens)


def selected_keys(shape: RankShape, context: int) -> int:
    """Keys a row attends to: its whole context up to 16 blocks, else 15 blocks and the tail's."""
    m = shape.model
    block = m.sparse_block
    blocks = -(-max(context, 1) // block)
    if blocks <= m.topk_blocks:
        return max(context, 1)
    return (m.topk_blocks - 1) * block + context - (blocks - 1) * block


def expert_bytes(shape: RankShape) -> int:
    """One expert's MXFP4 weights and scales on a rank (7,520,256 at tp 4)."""
    return _matrix_bytes(3 * shape.inter * shape.hidden)


def _matrix_bytes(elements: int) -> int:
    return elements // 2 + elements // MX_BLOCK


def select(step: StepBytes) -> Floor:
    """Scores of contexts with more blocks than are kept, table entries, lengths; the pages out."""
    m = step.shape.model
    blocks = [-(-max(n, 1) // m.sparse_block) for n in step.seq_lens]
    scored = sum(b for b in blocks if b > m.topk_blocks)
    table = sum(min(b, m.topk_blocks) for b in blocks) * 4
    written = step.tokens * SPARSE_TABLE_WORDS * 4
    return Floor("select", 0, 0, scored * 4 + table + 4 * step.tokens, written)


def split(step: StepBytes) -> Floor:
    """Selected keys and values with their scales, the query; partial outputs, maxima, sums out."""
    shape, m = step.shape, step.shape.model
    keys = sum(selected_keys(shape, n) for n in step.seq_lens) * shape.kv_heads
    scales = 8 if step.layout.static_scale else keys * 2 * 4
    q = step.tokens * shape.q_heads * m.head_dim * 2
    return Floor("split", 0, keys * 2 * m.head_dim + scales, q, _partitions(step))


def _partitions(step: StepBytes) -> int:
    """Every partition of every row: outputs as bf16 pairs, one maximum and one sum a head."""
    words = step.shape.q_heads * (step.shape.model.head_dim // 2 + 2)
    return step.tokens * N_SPLIT * words * PAIR_BYTES


def merge(step: StepBytes) -> Floor:
    """Partitions in; with several tokens the fp8 row and its scale out (one token: kept in LDS)."""
    written = step.tokens * (step.shape.o_k + PAIR_BYTES) if step.tokens > 1 else 0
    return Floor("merge", 0, 0, 0, _partitions(step) + written)


def o_proj(step: StepBytes) -> Floor:
    """Weights; partial rows to and from every rank, their sum out; with several tokens h_in in and
    h_mid out."""
    shape, tokens = step.shape, step.tokens
    weights = shape.hidden * shape.o_k + shape.hidden * 4
    rows = shape.hidden // 2 * PAIR_BYTES * tokens  # a row of bf16 pairs with their tags
    residual = 2 * tokens * shape.hidden * 2 if tokens > 1 else 0
    return Floor("o_proj", weights, 0, residual, step.npes * rows * 2 + rows)


def router(step: StepBytes) -> Floor:
    """``a`` and h_in in; the MXFP8 row and every copy of the scores out, h_mid at one token."""
    m, tokens = step.shape.model, step.tokens
    weights = m.experts * m.hidden * 2 + m.experts * 4 + m.hidden * 2
    row = tokens * m.hidden * 2
    h_mid = row if tokens == 1 else 0
    pairs = m.hidden // 2 + _routed_pairs(step.shape) + (SCORE_COPIES - 1) * 2 * m.experts
    return Floor("router", weights, 0, row + h_mid, tokens * pairs * PAIR_BYTES)


def _routed_pairs(shape: RankShape) -> int:
    """Pairs of one token that an expert's CTA needs: the MXFP8 row, one copy of the scores."""
    m = shape.model
    return m.hidden // 4 + m.hidden // MX_BLOCK + 2 * m.experts


def routing(step: StepBytes) -> Floor:
    """The MXFP8 rows and one copy of the scores in, the record of the choice out."""
    slots = step.shape.model.top_k + 1
    pairs = _routed_pairs(step.shape) + 2 * slots
    return Floor("routing", 0, 0, 0, step.tokens * pairs * PAIR_BYTES)


def up_gate(step: StepBytes) -> Floor:
    """Gate and up weights of every chosen expert; the intermediates out, two to a pair."""
    weights = (step.distinct + 1) * _matrix_bytes(2 * step.shape.inter * step.shape.hidden)
    return Floor("up_gate", weights, 0, 0, _intermediates(step))


def _intermediates(step: StepBytes) -> int:
    slots = step.shape.model.top_k + 1
    return step.tokens * slots * (step.shape.inter // 2) * PAIR_BYTES


def down(step: StepBytes) -> Floor:
    """Down weights of every chosen expert, the intermediates in, ar_out; partial rows to and from
    every rank (a single rank exchanges none)."""
    shape, tokens = step.shape, step.tokens
    weights = (step.distinct + 1) * _matrix_bytes(shape.inter * shape.hidden)
    # a row is half as many pairs as elements, once out and once in
    rows = step.npes * shape.hidden * PAIR_BYTES * tokens if step.npes > 1 else 0
    return Floor("down", weights, 0, tokens * shape.hidden * 2, _intermediates(step) + rows)
