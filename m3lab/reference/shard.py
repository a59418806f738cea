"""One rank's rows and columns of the plain weights, as the references read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from m3lab.reference.experts import ExpertTable
from m3lab.shapes import MX_BLOCK, RankShape


class PlainLayer(Protocol):
    """What the references read of ``m3lab.weights.LayerWeights`` (shapes and formats there)."""

    g_in: Tensor
    g_post: Tensor
    g_q: Tensor
    g_k: Tensor
    g_iq: Tensor
    g_ik: Tensor
    w_q: Tensor
    s_q: Tensor
    w_k: Tensor
    s_k: Tensor
    w_v: Tensor
    s_v: Tensor
    w_iq: Tensor
    s_iq: Tensor
    w_ik: Tensor
    s_ik: Tensor
    w_o: Tensor
    s_o: Tensor
    w_gate: Tensor
    bias: Tensor
    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor


@dataclass(frozen=True)
class RankShard:
    """The o_proj columns and expert shards of ``rank``."""

    layer: PlainLayer
    shape: RankShape
    rank: int

    def heads(self, x: Tensor) -> Tensor:
        """This rank's query heads of ``x`` [..., heads, 128]."""
        n = self.shape.q_heads
        return x[..., self.rank * n : (self.rank + 1) * n, :]

    def w_o(self) -> Tensor:
        """E4M3 bytes [hidden, o_k]."""
        n = self.shape.o_k
        return self.layer.w_o[:, self.rank * n : (self.rank + 1) * n]

    def w13(self, expert: int) -> ExpertTable:
        """The gate rows, then the up rows: [2 * inter, hidden]."""
        n = self.shape.inter

        def rows(table: Tensor) -> Tensor:
            parts = table[expert].unflatten(0, (2, -1))[:, self.rank * n : (self.rank + 1) * n]
            return parts.flatten(0, 1)

        return rows(self.layer.w13), rows(self.layer.s13)

    def w2(self, expert: int) -> ExpertTable:
        """[hidden, inter] columns: two elements a byte, one scale for 32."""
        lo, hi = self.rank * self.shape.inter, (self.rank + 1) * self.shape.inter
        codes = self.layer.w2[expert][:, lo // 2 : hi // 2]
        return codes, self.layer.s2[expert][:, lo // MX_BLOCK : hi // MX_BLOCK]
