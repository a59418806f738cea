"""One layer's weights: ``LayerWeights`` as stored, ``PreparedLayer`` as one rank's kernels read it.

``LayerWeights`` is the whole model's layer, row-major and quantized: what a checkpoint loads into,
what the references read. ``prepare`` cuts a rank's shard and puts its bytes in the kernels' order.
No kernel and no device here; ``PreparedLayer.place`` only asks a memory for room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from m3lab import draws
from m3lab.formats import (
    E8M0_NAN,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_ptpc,
    quantize_mxfp4,
    quantize_mxfp8,
)
from m3lab.shapes import MX_BLOCK, ONE_INDEX_HEAD, IndexHeads, ModelShape, RankShape
from m3lab.shuffle import mxfp8_a_tiles, pad_scale, shuffle_scale, shuffle_weight

if TYPE_CHECKING:
    from m3lab.memory import Allocation, Memory

PROJECTIONS = ("q", "k", "v", "iq", "ik", "o")
SHARED_TABLES = ("shared_w13", "shared_s13", "shared_w2", "shared_s2")  # the SH_ARGS order
EXPERT_TABLES = ("w13", "s13", "w2", "s2")
Experts = Sequence[int] | Literal["all"] | None


def weight_specs(shape: ModelShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of every tensor of ``LayerWeights``, by field name."""
    m, u8 = shape, torch.uint8
    rows = {
        "q": m.q_heads * m.head_dim,
        "k": m.kv_heads * m.head_dim,
        "v": m.kv_heads * m.head_dim,
        "iq": m.index_heads * m.index_dim,
        "ik": m.index_dim,
        "o": m.hidden,
    }
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "g_in": ((m.hidden,), torch.bfloat16),
        "g_post": ((m.hidden,), torch.bfloat16),
        "w_gate": ((m.experts, m.hidden), torch.bfloat16),
        "bias": ((m.experts,), torch.float32),
    }
    for name in ("g_q", "g_k", "g_iq", "g_ik"):
        specs[name] = ((m.head_dim,), torch.bfloat16)
    for name, n in rows.items():
        k = m.q_heads * m.head_dim if name == "o" else m.hidden
        specs[f"w_{name}"] = ((n, k), u8)
        specs[f"s_{name}"] = ((n,), torch.float32)
    e, up = m.experts + 1, 2 * m.inter
    specs["w13"] = ((e, up, m.hidden // 2), u8)
    specs["s13"] = ((e, up, m.hidden // MX_BLOCK), u8)
    specs["w2"] = ((e, m.hidden, m.inter // 2), u8)
    specs["s2"] = ((e, m.hidden, m.inter // MX_BLOCK), u8)
    specs["shared_w13"] = ((up, m.hidden), u8)
    specs["shared_s13"] = ((up, m.hidden // MX_BLOCK), u8)
    specs["shared_w2"] = ((m.hidden, m.inter), u8)
    specs["shared_s2"] = ((m.hidden, m.inter // MX_BLOCK), u8)
    return specs


@dataclass
class LayerWeights:
    """The whole model's layer, row-major and unsharded, quantized bytes with their scales.

    ``g_*``: norm weights w, used as 1 + w. ``w_q`` .. ``w_o``: PTPC FP8 with fp32 row scales
    ``s_q`` .. ``s_o``. ``w13`` (gate rows, then up rows), ``w2``: MXFP4 of every expert, entry
    ``shape.experts`` being the shared one; ``present`` lists the entries that hold data. An absent
    entry's scale bytes are NaN and its elements unwritten, so that a stray read shows; None where
    the layer has no experts at all. ``shared_*``: the shared expert as MXFP8, None where it is
    stored as MXFP4. Shapes and dtypes: ``weight_specs``; a mismatch raises ValueError naming it.
    """

    shape: ModelShape
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
    w13: Tensor | None = None
    s13: Tensor | None = None
    w2: Tensor | None = None
    s2: Tensor | None = None
    shared_w13: Tensor | None = None
    shared_s13: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_s2: Tensor | None = None
    present: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, (size, dtype) in weight_specs(self.shape).items():
            t = getattr(self, name)
            if t is None and name in (*EXPERT_TABLES, *SHARED_TABLES):
                continue
            if not isinstance(t, Tensor):
                raise ValueError(f"{name} must be {dtype} {size}, got {type(t).__name__}")
            if tuple(t.shape) != size or t.dtype != dtype:
                raise ValueError(f"{name} must be {dtype} {size}, got {t.dtype} {tuple(t.shape)}")

    @property
    def shared_entry(self) -> int:
        """The shared expert's entry of the expert tables."""
        return self.shape.experts

    def dequant(self, name: str, expert: int | None = None) -> Tensor:
        """fp32 values of a quantized weight.

        ``name``: ``w_q`` .. ``w_o`` -> [N, K]; ``w13`` or ``w2`` with ``expert`` (an entry that is
        present) -> that expert's matrix; ``shared_w13``, ``shared_w2`` -> the MXFP8 shared
        expert's. Raises ValueError for a weight that the layer does not hold.
        """
        if name in ("w13", "w2"):
            if expert not in self.present or expert is None:
                raise ValueError(f"{name} holds no data for expert {expert}")
            return dequantize_mxfp4(self._tensor(name)[expert], self._scale(name)[expert])
        if name in ("shared_w13", "shared_w2"):
            return dequantize_mxfp8(self._tensor(name), self._scale(name))
        if name.startswith("w_") and name[2:] in PROJECTIONS:
            return dequantize_ptpc(self._tensor(name), self._scale(name))
        raise ValueError(f"{name} is not a quantized weight of a layer")

    def shared_mxfp8(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The shared expert's MXFP8 tables (w13, s13, w2, s2), row-major.

        A shared expert stored as MXFP4 converts exactly: every E2M1 value is an E4M3 value.
        """
        if self.shared_w13 is not None:
            return tuple(self._tensor(n) for n in SHARED_TABLES)  # type: ignore[return-value]
        w13, s13 = quantize_mxfp8(self.dequant("w13", self.shared_entry))
        w2, s2 = quantize_mxfp8(self.dequant("w2", self.shared_entry))
        return w13, s13, w2, s2

    def shared_mxfp4(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The shared expert's MXFP4 tables (w13, s13, w2, s2); rounds one stored as MXFP8."""
        entry = self.shared_entry
        if entry in self.present:
            return tuple(self._tensor(n)[entry] for n in EXPERT_TABLES)  # type: ignore[return-value]
        w13, s13 = quantize_mxfp4(self.dequant("shared_w13"))
        w2, s2 = quantize_mxfp4(self.dequant("shared_w2"))
        return w13, s13, w2, s2

    def _tensor(self, name: str) -> Tensor:
        t = getattr(self, name)
        if t is None:
            raise ValueError(f"the layer holds no {name}")
        return t

    def _scale(self, name: str) -> Tensor:
        """The scale tensor of a weight: the same name with s for w."""
        head, _, tail = name.rpartition("w")
        return self._tensor(f"{head}s{tail}")


# ----------------------------------------------------------------------------------- random layer


def expert_entries(shape: ModelShape, experts: Experts) -> tuple[int, ...]:
    """The table entries that ``experts`` asks for, the shared expert's always among them."""
    if experts is None:
        return ()
    routed = range(shape.experts) if isinstance(experts, str) else experts
    if isinstance(experts, str) and experts != "all":
        raise ValueError(f"experts must be 'all', a list of ids or None, got {experts!r}")
    for e in routed:
        if not 0 <= e <= shape.experts:
            raise ValueError(f"an expert id must be in 0..{shape.experts}, got {e}")
    return tuple(sorted({*routed, shape.experts}))


def empty_experts(shape: ModelShape) -> dict[str, Tensor]:
    """Expert tables with nothing in them: elements unwritten, every scale NaN."""
    specs = weight_specs(shape)
    tables = {name: torch.empty(specs[name][0], dtype=torch.uint8) for name in EXPERT_TABLES}
    for name in ("s13", "s2"):
        tables[name].fill_(E8M0_NAN)
    return tables


def random_layer(
    shape: ModelShape, seed: int = 0, *, experts: Experts = "all", shared_fp8: bool = False
) -> LayerWeights:
    """A layer of random weights with a trained model's magnitudes, a function of ``seed``.

    ``experts``: ids of the routed experts that hold data ("all", a list, or None for a layer with
    attention and router only); the shared expert comes with any. ``shared_fp8`` stores it as
    MXFP8. An expert's content does not depend on which others are asked for.
    """
    specs = weight_specs(shape)
    t: dict[str, Tensor] = {}
    for name in ("g_in", "g_post", "g_q", "g_k", "g_iq", "g_ik"):
        t[name] = draws.normal(draws.generator(seed, name), specs[name][0], 0.1).bfloat16()
    for p in PROJECTIONS:
        n, k = specs[f"w_{p}"][0]
        rng = draws.generator(seed, p)
        t[f"w_{p}"] = draws.e4m3_bytes(rng, (n, k))
        t[f"s_{p}"] = draws.scales(rng, (n,), k**-0.5 / draws.E4M3_SIGMA)
    gate = draws.normal(draws.generator(seed, "w_gate"), specs["w_gate"][0], shape.hidden**-0.5)
    t["w_gate"] = gate.bfloat16()
    t["bias"] = draws.normal(draws.generator(seed, "bias"), specs["bias"][0], 0.05)

    entries = expert_entries(shape, experts)
    if entries:
        t |= empty_experts(shape)
    if entries and shared_fp8:
        entries = entries[:-1]
        t |= _random_shared(shape, seed)
    for e in entries:
        for name, k in (("13", shape.hidden), ("2", shape.inter)):
            rng = draws.generator(seed, f"experts{name}", e)
            w, s = t[f"w{name}"], t[f"s{name}"]
            w[e] = draws.e2m1_bytes(rng, w.shape[1:])
            s[e] = draws.scale_bytes(rng, s.shape[1:], k**-0.5 / draws.E2M1_SIGMA)
    return LayerWeights(shape, **t, present=entries)


def _random_shared(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    specs, t = weight_specs(shape), {}
    for name, k in (("13", shape.hidden), ("2", shape.inter)):
        rng = draws.generator(seed, f"shared{name}")
        t[f"shared_w{name}"] = draws.e4m3_bytes(rng, specs[f"shared_w{name}"][0])
        mean = k**-0.5 / draws.E4M3_SIGMA
        t[f"shared_s{name}"] = draws.scale_bytes(rng, specs[f"shared_s{name}"][0], mean)
    return t


# ------------------------------------------------------------------------------- a rank's kernels


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

    def place(self, memory: Memory, names: Sequence[str] | None = None) -> dict[str, Allocation]:
        """Put the tensors (``names``, default all) into ``memory``: argument name -> allocation.

        Of an expert's elements only the present entries are written. With MXFP8 shared tables,
        ``sh_args`` is the device array of their four addresses.
        """
        placed: dict[str, Allocation] = {}
        for name, t in self.tensors().items():
            if names is not None and name not in names:
                continue
            if name not in ("w13", "w2"):
                placed[name] = memory.place(name, t, rank=self.rank)
                continue
            placed[name] = memory.alloc(name, t.numel(), rank=self.rank)
            for e in self.present:
                placed[name].write(t[e], e * t[e].numel())
        if all(name in placed for name in SHARED_TABLES):
            table = torch.tensor([placed[name].addr for name in SHARED_TABLES])
            placed["sh_args"] = memory.place("sh_args", table, rank=self.rank)
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
