"""What the references read of a request's caches, and a rank's share of the plain weights.

A context is anything with a length and plain (unpaged) blocks of 128 keys; ``m3lab.model.context``
makes random ones of any length, a block at a time. Nothing here knows pages, shuffles or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from m3lab.reference.selection import SPARSE_BLOCK, context_blocks


class Context(Protocol):
    """A request's quantized keys, model wide: block b holds keys 128 b .. 128 b + 127.

    ``k``, ``v``: E4M3 bytes [128, kv heads, 128]; ``k_scale``, ``v_scale``: fp32 [128, kv heads];
    ``index_k``: E4M3 bytes [128, 128]. Keys from ``length`` on may hold anything.
    """

    @property
    def length(self) -> int: ...
    def k(self, block: int) -> Tensor: ...
    def v(self, block: int) -> Tensor: ...
    def k_scale(self, block: int) -> Tensor: ...
    def v_scale(self, block: int) -> Tensor: ...
    def index_k(self, block: int) -> Tensor: ...


def overlaid(old: Tensor, block: int, first: int, new: Tensor) -> Tensor:
    """``old`` (a block's 128 rows) with row j of ``new`` written at key ``first + j``."""
    lo, hi = block * SPARSE_BLOCK, (block + 1) * SPARSE_BLOCK
    start, stop = max(lo, first), min(hi, first + len(new))
    if start >= stop:
        return old
    out = old.clone()
    out[start - lo : stop - lo] = new[start - first : stop - first]
    return out


@dataclass
class Inserted:
    """A context whose last keys are replaced by what this step inserts, each [q_len, ...]."""

    base: Context
    new_k: Tensor
    new_k_scale: Tensor
    new_v: Tensor
    new_v_scale: Tensor
    new_index_k: Tensor
    read: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        return self.base.length

    def _block(self, name: str, block: int) -> Tensor:
        """The named block, read from the base once."""
        if (name, block) not in self.read:
            new = getattr(self, f"new_{name}")
            old = getattr(self.base, name)(block)
            self.read[name, block] = overlaid(old, block, self.length - len(new), new)
        return self.read[name, block]

    def k(self, block: int) -> Tensor:
        return self._block("k", block)

    def v(self, block: int) -> Tensor:
        return self._block("v", block)

    def k_scale(self, block: int) -> Tensor:
        return self._block("k_scale", block)

    def v_scale(self, block: int) -> Tensor:
        return self._block("v_scale", block)

    def index_k(self, block: int) -> Tensor:
        return self._block("index_k", block)


@dataclass(frozen=True)
class ZeroPage:
    """What a padding row attends to here: one key, all zero. Its outputs are nobody's."""

    kv_heads: int
    length: int = 1

    def k(self, block: int) -> Tensor:
        return torch.zeros(SPARSE_BLOCK, self.kv_heads, 128, dtype=torch.uint8)

    v = k

    def k_scale(self, block: int) -> Tensor:
        return torch.ones(SPARSE_BLOCK, self.kv_heads)

    v_scale = k_scale

    def index_k(self, block: int) -> Tensor:
        return torch.zeros(SPARSE_BLOCK, 128, dtype=torch.uint8)


@dataclass(frozen=True)
class Row:
    """One row of a step: the request it belongs to (None: padding) and the keys it sees."""

    request: int | None
    keys: int

    @property
    def position(self) -> int:
        return self.keys - 1

    @property
    def blocks(self) -> int:
        return context_blocks(self.keys)[1]


def step_rows(lengths: Sequence[int | None], q_len: int = 1) -> list[Row]:
    """The step's rows, ``q_len`` a request; ``lengths`` count the new keys, None is padding.

    Row j of a request of n keys sees n - (q_len - 1 - j) of them; a padding row sees one.
    """
    rows = []
    for i, length in enumerate(lengths):
        if length is not None and length < q_len:
            raise ValueError(
                f"a request of {q_len} new tokens must have at least that context, got {length}"
            )
        for j in range(q_len):
            rows.append(Row(None, 1) if length is None else Row(i, length - (q_len - 1 - j)))
    return rows


def gather(read: Callable[[int], Tensor], blocks: Tensor, n_ctx: int) -> Tensor:
    """The selected keys of ``read``'s blocks in selection order, cut to ``n_ctx`` rows."""
    return torch.cat([read(b) for b in blocks.tolist()])[:n_ctx]
