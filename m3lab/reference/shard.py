"""One rank's rows and columns of the plain weights, as the references read them.

Views of ``LayerWeights``, not what a kernel reads (``weights.prepare`` makes that, apart from
this): a mistake in either shows as a disagreement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3lab.model.shapes import RankShape
from m3lab.model.weights import LayerWeights

ExpertTables = tuple[Tensor, Tensor, Tensor, Tensor]  # w13, s13, w2, s2


def routed_tables(layer: LayerWeights, expert: int) -> ExpertTables:
    """The whole model's tables of one entry; an absent one's scales are NaN, and so its values."""
    w13, s13, w2, s2 = layer.w13, layer.s13, layer.w2, layer.s2
    if w13 is None or s13 is None or w2 is None or s2 is None:
        raise ValueError("the layer holds no experts, so its MLP half cannot be computed")
    return w13[expert], s13[expert], w2[expert], s2[expert]


@dataclass(frozen=True)
class RankShard:
    """The o_proj columns and expert shards of ``rank``.

    ``shared_fp8``: the shared expert is read from its MXFP8 tables, as that build of the kernel
    does; else from MXFP4.
    """

    layer: LayerWeights
    shape: RankShape
    rank: int
    shared_fp8: bool = False

    def heads(self, x: Tensor) -> Tensor:
        """This rank's query heads of ``x`` [..., heads, 128]."""
        n = self.shape.q_heads
        return x[..., self.rank * n : (self.rank + 1) * n, :]

    def w_o(self) -> Tensor:
        """E4M3 bytes [hidden, o_k]."""
        return self._columns(self.layer.w_o)

    def w13(self, expert: int) -> tuple[Tensor, Tensor]:
        """Codes and E8M0 scales of the gate rows, then the up rows: [2 * inter, hidden]."""
        codes, scales, _, _ = self._tables(expert)
        return self._gate_up_rows(codes), self._gate_up_rows(scales)

    def w2(self, expert: int) -> tuple[Tensor, Tensor]:
        """Codes and E8M0 scales of the down columns: [hidden, inter]."""
        _, _, codes, scales = self._tables(expert)
        return self._columns(codes), self._columns(scales)

    def _tables(self, expert: int) -> ExpertTables:
        if expert != self.layer.shared_entry:
            return routed_tables(self.layer, expert)
        return self.layer.shared_mxfp8() if self.shared_fp8 else self.layer.shared_mxfp4()

    def _columns(self, table: Tensor) -> Tensor:
        """The rank's share of the last dim, whatever a column holds."""
        return table.chunk(self.shape.tp, -1)[self.rank]

    def _gate_up_rows(self, table: Tensor) -> Tensor:
        gate, up = table.unflatten(0, (2, self.shape.tp, -1))[:, self.rank]
        return torch.cat([gate, up])
