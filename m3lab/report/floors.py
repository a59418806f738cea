"""Byte floors: the least bytes a stage must move, whatever the kernel does. No times here.

A floor counts each needed byte of memory once per rank and step: weights, selected keys, tables,
mailbox payloads with their tags. A kernel moves more: several CTAs read the same table, a poll is
read again. The ratio of moved to floor is what a report shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from m3lab.layout.regions import N_SPLIT, PAIR_BYTES, SCORE_COPIES, SPARSE_TABLE_WORDS
from m3lab.model.shapes import MX_BLOCK, CacheLayout, RankShape

ATTENTION_STAGES = ("select", "split", "merge", "output")
STAGES = (*ATTENTION_STAGES, "router", "experts")
HBM_PEAK = 8.0e12  # bytes/s, MI355X data sheet
HBM_SEEN = 7.2e12  # bytes/s measured upstream on the part, not here


@dataclass(frozen=True)
class Floor:
    """Bytes of one stage of one rank's step: from memory, and to or from other CTAs and ranks."""

    stage: str
    weights: int
    cache: int
    inputs: int
    mailbox: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.inputs + self.mailbox


def selected_keys(shape: RankShape, context: int) -> int:
    """Keys a row attends to: its whole context up to 16 blocks, else 15 blocks and the tail's."""
    m = shape.model
    block = m.sparse_block
    blocks = -(-max(context, 1) // block)
    if blocks <= m.topk_blocks:
        return max(context, 1)
    return (m.topk_blocks - 1) * block + context - (blocks - 1) * block


def step_floors(
    shape: RankShape,
    seq_lens: list[int],
    npes: int,
    layout: CacheLayout | None = None,
    distinct_experts: int | None = None,
) -> dict[str, Floor]:
    """Floors by stage of one rank's step with rows that see ``seq_lens`` keys.

    ``distinct_experts``: routed experts the step's rows choose together; None leaves the router
    and the experts out (the attention half).
    """
    layout = layout or CacheLayout()
    floors = [
        _select(shape, seq_lens),
        _split(shape, seq_lens, layout),
        _merge(shape, len(seq_lens)),
        _output(shape, len(seq_lens), npes),
    ]
    if distinct_experts is not None:
        floors += [
            _router(shape, len(seq_lens)),
            _experts(shape, len(seq_lens), npes, distinct_experts),
        ]
    return {floor.stage: floor for floor in floors}


def _select(shape: RankShape, seq_lens: list[int]) -> Floor:
    m = shape.model
    blocks = [-(-max(n, 1) // m.sparse_block) for n in seq_lens]
    scored = sum(b for b in blocks if b > m.topk_blocks)
    table = sum(min(b, m.topk_blocks) for b in blocks) * 4
    written = len(seq_lens) * SPARSE_TABLE_WORDS * 4
    return Floor("select", 0, 0, scored * 4 + table + 4 * len(seq_lens), written)


def _split(shape: RankShape, seq_lens: list[int], layout: CacheLayout) -> Floor:
    m = shape.model
    keys = sum(selected_keys(shape, n) for n in seq_lens) * shape.kv_heads
    scales = 8 if layout.static_scale else keys * 2 * 4
    q = len(seq_lens) * shape.q_heads * m.head_dim * 2
    words = shape.q_heads * (m.head_dim // 2 + 2)  # outputs as bf16 pairs, one max, one sum
    partials = len(seq_lens) * N_SPLIT * words * PAIR_BYTES
    return Floor("split", 0, keys * 2 * m.head_dim + scales, q, partials)


def _merge(shape: RankShape, tokens: int) -> Floor:
    """Partitions in; with several tokens the fp8 row and its scale out (one token: kept in LDS)."""
    words = shape.q_heads * (shape.model.head_dim // 2 + 2)
    read = tokens * N_SPLIT * words * PAIR_BYTES
    written = tokens * (shape.o_k + PAIR_BYTES) if tokens > 1 else 0
    return Floor("merge", 0, 0, 0, read + written)


def _output(shape: RankShape, tokens: int, npes: int) -> Floor:
    m = shape.model
    weights = m.hidden * shape.o_k + m.hidden * 4
    rows = m.hidden // 2 * PAIR_BYTES * tokens  # a row of bf16 pairs with their tags
    residual = 2 * tokens * m.hidden * 2 if tokens > 1 else 0  # h_in read, h_mid written
    return Floor("output", weights, 0, residual, npes * rows * 2 + rows)


def _router(shape: RankShape, tokens: int) -> Floor:
    """``a`` and h_in in; the MXFP8 row and every copy of the scores out, h_mid at one token."""
    m = shape.model
    weights = m.experts * m.hidden * 2 + m.experts * 4 + m.hidden * 2
    row = tokens * m.hidden * 2
    h_mid = row if tokens == 1 else 0
    pairs = m.hidden // 2 + _routed_pairs(shape) + (SCORE_COPIES - 1) * 2 * m.experts
    return Floor("router", weights, 0, row + h_mid, tokens * pairs * PAIR_BYTES)


def _routed_pairs(shape: RankShape) -> int:
    """Pairs of one token that an expert's CTA needs: the MXFP8 row, one copy of the scores."""
    m = shape.model
    return m.hidden // 4 + m.hidden // MX_BLOCK + 2 * m.experts


def expert_bytes(shape: RankShape) -> int:
    """One expert's MXFP4 weights and scales on a rank (7,520,256 at tp 4)."""
    elements = 3 * shape.inter * shape.hidden
    return elements // 2 + elements // MX_BLOCK


def _experts(shape: RankShape, tokens: int, npes: int, distinct: int) -> Floor:
    """The routed row in; intermediates out and in, the routing record out; partial rows to and
    from every rank (a rank alone exchanges none); ar_out."""
    slots = shape.model.top_k + 1
    pairs = (
        _routed_pairs(shape) + slots * shape.inter + 2 * slots
    )  # two intermediates to a pair, out and in
    pairs += npes * shape.hidden if npes > 1 else 0  # a row is half as many pairs, out and in
    weights = (distinct + 1) * expert_bytes(shape)
    return Floor("experts", weights, 0, tokens * shape.hidden * 2, tokens * pairs * PAIR_BYTES)
