"""One rank's shard of a layer's weights, bytes in the kernels' order: ``PreparedLayer``.

``prepare`` cuts the shard out of a ``LayerWeights``, shuffles it and names it as the kernels'
arguments. No kernel and no device here; ``PreparedLayer.place`` only asks a memory for
room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m3lab.layout.shuffle import mxfp8_a_tiles, pad_scale, shuffle_scale, shuffle_weight
from m3lab.model.formats import E8M0_NAN
from m3lab.model.shapes import MX_BLOCK, ONE_INDEX_HEAD, IndexHeads, RankShape
from m3lab.model.weights import EXPERT_TABLES, SHARED_TABLES, LayerWeights

if TYPE_CHECKING:
    from m3lab.layout.buffers import Allocation, Memory


@dataclass
class PreparedLayer:
    """What one rank's kernels read, named as their arguments, bytes in the kernels' order.

    ``w_qkv`` [rows, hidden] holds q, k, v, index q and index k rows of this rank (shuffled, with
    ``s_qkv`` fp32 per row); ``w_o`` [hidden, o_k] is shuffled, its row scales ``s_o`` are the
    model's. ``w13`` [entries, 2 * inter, hidden / 2], ``w2`` [entries, hidden, inter / 2] and
    their scales are shuffled per expert; ``s2`` is padded to a multiple of 8 columns. ``entries``
    is experts + 1, or experts with ``shared_fp8``, whose four MXFP8 tables are the ``shared_*``.
    ``present``: the entries that hold data.
    """

    shape: RankShape
    rank: int
    g_in: Tensor
    w_qkv: Tensor
    s_qkv: Tensor
    g_q: Tensor
    g_k: Tensor
    g_iq: Tensor
    g_ik: Tensor
    w_o: Tensor
    s_o: Tensor
    g_post: Tensor
    w_gate: Tensor
    bias: Tensor
    w13: Tensor | None = None
    s13: Tensor | None = None
    w2: Tensor | None = None
    s2: Tensor | None = None
    shared_w13: Tensor | None = None
    shared_s13: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_s2: Tensor | None = None
    present: tuple[int, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor there is, by argument name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: t for name, t in named.items() if isinstance(t, Tensor)}

    def upload(self, memory: Memory, names: Sequence[str] | None = None) -> dict[str, Allocation]:
        """Put the tensors (``names``, default all) into ``memory``: argument name -> allocation.

        Of an expert's elements only the present entries are written. With MXFP8 shared tables,
        ``sh_args`` is the device array of their four addresses.
        """
        placed: dict[str, Allocation] = {}
        for name, t in self.tensors().items():
            if names is not None and name not in names:
                continue
            if name not in ("w13", "w2"):
                placed[name] = memory.upload(name, t, rank=self.rank)
                continue
            placed[name] = memory.alloc(name, t.numel(), rank=self.rank)
            for e in self.present:
                placed[name].write(t[e], e * t[e].numel())
        if all(name in placed for name in SHARED_TABLES):
            table = torch.tensor([placed[name].addr for name in SHARED_TABLES])
            placed["sh_args"] = memory.upload("sh_args", table, rank=self.rank)
        return placed


def prepare(
    layer: LayerWeights,
    shape: RankShape,
    rank: int,
    *,
    shared_fp8: bool = False,
    heads: IndexHeads = ONE_INDEX_HEAD,
) -> PreparedLayer:
    """Rank ``rank``'s shard of ``layer`` in the kernels' byte order.

    ``shared_fp8`` moves the shared expert out of the tables into MXFP8 tables of its own;
    ``heads.count`` 4 gives the fused projection every index head's rows, not only the rank's own.
    """
    if layer.shape != shape.model:
        raise ValueError("the layer's model shape is not the rank shape's")
    if not 0 <= rank < shape.tp:
        raise ValueError(f"rank must be in 0..{shape.tp - 1}, got {rank}")
    rows = _projection_rows(shape, rank, heads)
    w_qkv = torch.cat([getattr(layer, f"w_{p}")[r] for p, r in rows.items()])
    s_qkv = torch.cat([getattr(layer, f"s_{p}")[r] for p, r in rows.items()])
    o_cols = slice(rank * shape.o_k, (rank + 1) * shape.o_k)
    same = ("g_in", "g_q", "g_k", "g_iq", "g_ik", "g_post", "w_gate", "bias", "s_o")
    return PreparedLayer(
        shape=shape,
        rank=rank,
        w_qkv=shuffle_weight(w_qkv),
        s_qkv=s_qkv,
        w_o=shuffle_weight(layer.w_o[:, o_cols]),
        **{name: getattr(layer, name) for name in same},
        **_prepare_experts(layer, shape, rank, shared_fp8),
    )


def _projection_rows(shape: RankShape, rank: int, heads: IndexHeads) -> dict[str, slice]:
    """The model's rows of each projection that the rank's fused projection takes, in its order."""
    m, dim = shape.model, shape.model.head_dim
    kv = shape.kv_range(rank)
    first_iq = 0 if heads.count > 1 else rank * m.index_heads // shape.tp
    n_iq = m.index_heads if heads.count > 1 else shape.index_heads

    def head_rows(first: int, n: int) -> slice:
        return slice(first * dim, (first + n) * dim)

    return {
        "q": head_rows(rank * shape.q_heads, shape.q_heads),
        "k": head_rows(kv.start, len(kv)),
        "v": head_rows(kv.start, len(kv)),
        "iq": head_rows(first_iq, n_iq),
        "ik": head_rows(0, 1),
    }


def _shard_expert(
    tables: Sequence[Tensor], shape: RankShape, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rank's gate and up rows and down columns of one expert's (w13, s13, w2, s2)."""
    w13, s13, w2, s2 = tables
    inter, full = shape.inter, shape.model.inter

    def cols(t: Tensor) -> Tensor:
        n = t.shape[-1] // shape.tp
        return t[:, rank * n : (rank + 1) * n]

    def rows(t: Tensor) -> Tensor:
        first = rank * inter
        return torch.cat((t[first : first + inter], t[full + first : full + first + inter]))

    return rows(w13), rows(s13), cols(w2), cols(s2)


def _prepare_experts(
    layer: LayerWeights, shape: RankShape, rank: int, shared_fp8: bool
) -> dict[str, Any]:
    """The expert tables of a rank, and the MXFP8 shared tables where asked for."""
    if layer.w13 is None:
        return {}
    m, inter, entry = shape.model, shape.inter, layer.shared_entry
    n = m.experts if shared_fp8 else m.experts + 1
    out: dict[str, Any] = {}
    tables = (
        torch.empty(n, 2 * inter, m.hidden // 2, dtype=torch.uint8),
        torch.full((n, 2 * inter, m.hidden // MX_BLOCK), E8M0_NAN, dtype=torch.uint8),
        torch.empty(n, m.hidden, inter // 2, dtype=torch.uint8),
        pad_scale(torch.full((n, m.hidden, inter // MX_BLOCK), E8M0_NAN, dtype=torch.uint8)),
    )
    present = [e for e in layer.present if e != entry]
    for e in present if shared_fp8 else [*present, entry]:
        plain = layer.shared_mxfp4() if e == entry else [layer._tensor(t)[e] for t in EXPERT_TABLES]
        w13, s13, w2, s2 = _shard_expert(plain, shape, rank)
        shuffled = (
            shuffle_weight(w13),
            shuffle_scale(s13),
            shuffle_weight(w2),
            shuffle_scale(pad_scale(s2)),
        )
        for table, part in zip(tables, shuffled, strict=True):
            table[e] = part
    out |= dict(zip(EXPERT_TABLES, tables, strict=True))
    if shared_fp8:
        w13, s13, w2, s2 = _shard_expert(layer.shared_mxfp8(), shape, rank)
        shared = (
            mxfp8_a_tiles(w13),
            shuffle_scale(s13),
            mxfp8_a_tiles(w2),
            shuffle_scale(pad_scale(s2)),
        )
        out |= dict(zip(SHARED_TABLES, shared, strict=True))
    out["present"] = tuple(present) if shared_fp8 else (*present, entry)
    return out
