"""Address arithmetic. A pointer is its byte address as an integer: int64 in global memory, int32
(an offset in the CTA's LDS) in LDS."""

from __future__ import annotations

import torch

from m3lab.interpreter.ops import lane_op
from m3lab.interpreter.program import Op, Type

_DYNAMIC = -(2**31)
_BITS = {"i1": 8, "index": 64}


def type_bytes(t: Type) -> int:
    """Bytes of a value of type ``t`` in memory."""
    if t.elem.startswith("ptr"):
        bits = 32 if t.elem == "ptr<3>" else 64
    else:
        bits = _BITS.get(t.elem) or int("".join(c for c in t.elem if c.isdigit()) or 0)
    if bits % 8 or not bits:
        raise ValueError(f"type {t} has no size in memory that the interpreter knows")
    return bits // 8 * max(t.n, 1)


@lane_op("llvm.getelementptr")
def getelementptr(op: Op, base: torch.Tensor, *dynamic: torch.Tensor) -> torch.Tensor:
    """Base plus index times element size; one index (plain element types)."""
    elem, indices = op.attrs["elem_type"], op.attrs["rawConstantIndices"]
    if len(indices) != 1 or not isinstance(elem, Type):
        raise ValueError(f"getelementptr with {len(indices)} indices into {elem}")
    size = type_bytes(elem)
    if indices[0] != _DYNAMIC:
        return base + indices[0] * size
    return base + dynamic[0].to(base.dtype) * size


@lane_op("llvm.inttoptr", "llvm.ptrtoint", "llvm.addrspacecast")
def cast(op: Op, value: torch.Tensor) -> torch.Tensor:
    """The same number as another type."""
    narrow = op.types[0].elem in ("ptr<3>", "i32")
    return value.to(torch.int32 if narrow else torch.int64)
