"""One layer's weights: ``LayerWeights`` as stored, ``PreparedLayer`` as one rank's kernels read it.

``LayerWeights`` is the whole model's layer, row-major and quantized: what a checkpoint loads into,
what the references read. ``prepare`` cuts a rank's shard and puts its bytes in the kernels' order.
No kernel and no device here; ``PreparedLayer.place`` only asks a memory for room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from m3lab.model import synthetic
from m3lab.model.formats import (
    E8M0_NAN,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_ptpc,
    quantize_mxfp4,
    quantize_mxfp8,
)
from m3lab.model.shapes import MX_BLOCK, ModelShape

if TYPE_CHECKING:
    pass

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
        t[name] = synthetic.normal(synthetic.generator(seed, name), specs[name][0], 0.1).bfloat16()
    for p in PROJECTIONS:
        n, k = specs[f"w_{p}"][0]
        rng = synthetic.generator(seed, p)
        t[f"w_{p}"] = synthetic.e4m3_bytes(rng, (n, k))
        t[f"s_{p}"] = synthetic.scales(rng, (n,), k**-0.5 / synthetic.E4M3_SIGMA)
    gate = synthetic.normal(
        synthetic.generator(seed, "w_gate"), specs["w_gate"][0], shape.hidden**-0.5
    )
    t["w_gate"] = gate.bfloat16()
    t["bias"] = synthetic.normal(synthetic.generator(seed, "bias"), specs["bias"][0], 0.05)

    entries = expert_entries(shape, experts)
    if entries:
        t |= empty_experts(shape)
    if entries and shared_fp8:
        entries = entries[:-1]
        t |= _random_shared(shape, seed)
    for e in entries:
        for name, k in (("13", shape.hidden), ("2", shape.inter)):
            rng = synthetic.generator(seed, f"experts{name}", e)
            w, s = t[f"w{name}"], t[f"s{name}"]
            w[e] = synthetic.e2m1_bytes(rng, w.shape[1:])
            s[e] = synthetic.scale_bytes(rng, s.shape[1:], k**-0.5 / synthetic.E2M1_SIGMA)
    return LayerWeights(shape, **t, present=entries)


def _random_shared(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    specs, t = weight_specs(shape), {}
    for name, k in (("13", shape.hidden), ("2", shape.inter)):
        rng = synthetic.generator(seed, f"shared{name}")
        t[f"shared_w{name}"] = synthetic.e4m3_bytes(rng, specs[f"shared_w{name}"][0])
        mean = k**-0.5 / synthetic.E4M3_SIGMA
        t[f"shared_s{name}"] = synthetic.scale_bytes(rng, specs[f"shared_s{name}"][0], mean)
    return t
