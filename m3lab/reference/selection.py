"""Block selection: from the indexer's scores to the pages a row attends to.

Every outcome here is an integer and is reproduced exactly (``k4.md``, Selection). Nothing here
scores a block; that is ``pre_attn.block_scores``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SPARSE_BLOCK = 128
PAGES_PER_BLOCK = 8
TOPK_BLOCKS = 16
INIT_SCORE = 1e30
LOCAL_SCORE = 1e29
NAN_KEY = -(2**31)


class Selection(NamedTuple):
    """A row's blocks in slot order (the tail block last) and the keys they hold for the row."""

    blocks: Tensor  # int64 [n], n <= topk
    n_ctx: int


def context_blocks(seq_len: int) -> tuple[int, int]:
    """(context, blocks) of a row; a padding row (seq_len 0) counts as one key."""
    context = max(seq_len, 1)
    return context, -(-context // SPARSE_BLOCK)


def index_key(scores: Tensor, init_blocks: int = 0, local_blocks: int = 1) -> Tensor:
    """int32 sort keys of a row's block scores (fp32 [n_blk], block b at b).

    Init blocks are pinned to 1e30, then local ones to 1e29 (a block that is both is local). The key
    orders like the float, with -0 equal to 0 and every NaN below -inf.
    """
    n_blk = scores.shape[0]
    block = torch.arange(n_blk)
    pinned = scores.float().clone()
    pinned[block < init_blocks] = INIT_SCORE
    pinned[block >= n_blk - local_blocks] = LOCAL_SCORE
    bits = pinned.view(torch.int32)
    bits = torch.where(bits == NAN_KEY, 0, bits)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(torch.isnan(pinned), NAN_KEY, key)


def select(
    scores: Tensor | None,
    n_blk: int,
    seq_len: int,
    init_blocks: int = 0,
    local_blocks: int = 1,
    topk: int = TOPK_BLOCKS,
) -> Selection:
    """The row's ``topk`` best blocks of its ``n_blk`` by (key, block id), both descending.

    ``scores``: fp32 [>= n_blk]; may be None up to ``topk`` blocks, where all are kept in id order.
    ``seq_len``: keys the row sees, at least 1 (see ``context_blocks``). Full blocks come in rank
    order; the tail block, which holds the row's own token, is last.
    """
    tail = n_blk - 1
    if n_blk <= topk:
        return Selection(torch.arange(n_blk), seq_len)
    if scores is None or scores.shape[0] < n_blk:
        given = "none" if scores is None else str(scores.shape[0])
        raise ValueError(f"a context of {n_blk} blocks needs a score for each, got {given}")
    key = index_key(scores[:n_blk], init_blocks, local_blocks).long()
    best = torch.argsort((key << 32) | torch.arange(n_blk), descending=True)[:topk]
    full = best[best != tail]
    if len(full) == len(best):  # a score above the pins' can push the tail block out
        return Selection(best, min(topk * SPARSE_BLOCK, seq_len))
    n_ctx = len(full) * SPARSE_BLOCK + seq_len - tail * SPARSE_BLOCK
    return Selection(torch.cat([full, torch.tensor([tail])]), n_ctx)


def sparse_table(blocks: Tensor, block_table_row: Tensor, page_stride: int) -> Tensor:
    """int32 [128] page ids: selection slot s at 8 s .. 8 s + 7.

    The kernel publishes only the first ``8 * len(blocks)``; the rest are 0 here (page 0 is always
    there to be read and masked).
    """
    pages = block_table_row.long()[blocks.long()] * page_stride
    pages = pages[:, None] + torch.arange(PAGES_PER_BLOCK)
    table = torch.zeros(TOPK_BLOCKS * PAGES_PER_BLOCK, dtype=torch.int32)
    table[: pages.numel()] = pages.flatten().int()
    return table
