"""Bits that nothing wrote, followed through arithmetic.

A taint is an integer tensor of a value's shape whose set bits are unknown bits of it (a bool tensor
for i1). Bitwise operations, selects and moves are followed bit by bit, so that masking garbage away
clears it; any other operation on an unknown bit makes its whole result unknown.
"""

from __future__ import annotations

from typing import Any

import torch

from m3lab.interpreter.ops import LANE
from m3lab.interpreter.ops.crosslane import MOVES
from m3lab.interpreter.program import Op

_INT_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# operations that only move bits: run on the taint itself
_MOVES = {
    "arith.bitcast", "arith.trunci", "arith.extui", "arith.extsi", "arith.index_cast",
    "arith.index_castui", "vector.extract", "vector.from_elements", "vector.broadcast",
    "vector.splat", "vector.bitcast", "vector.shuffle", "vector.insert", "vector.shape_cast",
    "vector.extract_strided_slice", "vector.insert_strided_slice", "llvm.bitcast",
}  # fmt: skip


def int_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.bool else _INT_OF[dtype.itemsize]


def full_like(value: torch.Tensor) -> torch.Tensor:
    """A taint with every bit of ``value`` unknown."""
    dtype = int_dtype(value.dtype)
    if dtype == torch.bool:
        return torch.ones(value.shape, dtype=dtype, device=value.device)
    fill = 255 if dtype == torch.uint8 else -1
    return torch.full(value.shape, fill, dtype=dtype, device=value.device)


def lanes(taint: torch.Tensor, vector: bool) -> torch.Tensor:
    """Which lanes hold an unknown bit: [ctas, waves, 64] bool."""
    any_bit = taint if taint.dtype == torch.bool else taint != 0
    return any_bit.any(-1) if vector else any_bit


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype == torch.bool else value.view(int_dtype(value.dtype))


def of(op: Op, operands: list[Any], taints: list[Any], result: Any) -> Any:
    """The taint of ``result``; ``taints`` holds None for clean operands."""
    if isinstance(result, tuple):
        return tuple(_smear(op, taints, r) for r in result)
    kind = op.kind
    if kind == "llvm.extractvalue" and isinstance(taints[0], tuple):
        return taints[0][op.attrs["position"][0]]
    if kind == "arith.andi":
        return clean(_and(operands, taints))
    if kind == "arith.ori":
        return clean(_or(operands, taints))
    if kind == "arith.xori":
        t = [x for x in taints if x is not None]
        return clean(t[0] | t[1] if len(t) == 2 else t[0].expand(result.shape).clone())
    if kind in ("arith.shli", "arith.shrui", "arith.shrsi") and taints[1] is None:
        fn = LANE["arith.shrui" if kind == "arith.shrui" else kind]
        return clean(fn(op, taints[0], operands[1]))
    if kind == "arith.select":
        return clean(_select(operands, taints, result))
    if kind in _MOVES and kind in LANE:
        parts = [
            t if t is not None else torch.zeros_like(_bits(v))
            for v, t in zip(operands, taints, strict=True)
        ]
        try:
            moved = LANE[kind](op, *[_as(v, t) for v, t in zip(operands, parts, strict=True)])
            return clean(_bits(moved))
        except (RuntimeError, TypeError):
            pass
    return _smear(op, taints, result)


def _as(value: torch.Tensor, taint: torch.Tensor) -> torch.Tensor:
    """The taint's bits in the value's dtype, so that a move handles them as it does the value."""
    return taint if value.dtype == taint.dtype else taint.contiguous().view(value.dtype)


def moved(fn: Any, op: Op, operands: list[Any], taints: list[Any], mask: Any, result: Any) -> Any:
    """Taint of a cross-lane operation: the move itself, run on the taints of what it moves.

    An unknown lane number, or an unknown operand of what is no move (ballot), smears.
    """
    moves = MOVES.get(op.kind, ())
    if any(t is not None for i, t in enumerate(taints) if i not in moves):
        parts = result if isinstance(result, tuple) else (result,)
        smeared = tuple(full_like(r) for r in parts)
        return smeared if isinstance(result, tuple) else smeared[0]
    inputs = list(operands)
    for i in moves:
        t = taints[i]
        bits = torch.zeros_like(_bits(operands[i])) if t is None else t
        inputs[i] = _as(operands[i], bits)
    bits, _ = fn(op, *inputs, mask=mask)
    if isinstance(bits, tuple):
        return tuple(clean(_bits(b)) for b in bits)
    return clean(_bits(bits))


def _and(values: list[torch.Tensor], taints: list[Any]) -> torch.Tensor:
    a, b = (_bits(v) for v in values)
    ta, tb = taints
    if ta is None:
        return tb & a
    if tb is None:
        return ta & b
    return (ta & tb) | (ta & b) | (tb & a)


def _or(values: list[torch.Tensor], taints: list[Any]) -> torch.Tensor:
    a, b = (_bits(v) for v in values)
    ta, tb = taints
    if ta is None:
        return tb & ~a
    if tb is None:
        return ta & ~b
    return (ta & tb) | (ta & ~b) | (tb & ~a)


def _select(values: list[torch.Tensor], taints: list[Any], result: torch.Tensor) -> torch.Tensor:
    cond = values[0]
    tc, ta, tb = taints
    if cond.dim() < result.dim():
        cond = cond.unsqueeze(-1)
    zero = torch.zeros((1,) * result.dim(), dtype=int_dtype(result.dtype), device=result.device)
    out = torch.where(cond, zero if ta is None else ta, zero if tb is None else tb)
    if tc is not None:
        if tc.dim() < result.dim():
            tc = tc.unsqueeze(-1)
        out = torch.where(tc, full_like(result), out)
    return out


def _smear(op: Op, taints: list[Any], result: torch.Tensor) -> torch.Tensor | None:
    """Every result bit unknown in the lanes where any operand bit is."""
    hit = None
    for t, ty in zip(taints, op.in_types, strict=True):
        if t is None:
            continue
        parts = t if isinstance(t, tuple) else (t,)
        for part in parts:
            if part is None:
                continue
            m = lanes(part, ty.n > 0 and ty.elem != "struct")
            hit = m if hit is None else hit | m
    if hit is None:
        return None
    vector = bool(op.types and op.types[0].n)
    if vector:
        hit = hit.unsqueeze(-1)
    full = full_like(result)
    return clean(torch.where(hit, full, torch.zeros_like(full)))


def clean(taint: torch.Tensor) -> torch.Tensor | None:
    """None where no bit is left."""
    return taint if bool((taint != 0).any()) else None
