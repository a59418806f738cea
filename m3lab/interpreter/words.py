"""Bytes in memory as values, and values as bytes: what global memory and LDS have in common."""

from __future__ import annotations

from typing import Any

import torch

from m3lab.interpreter import uninitialized
from m3lab.interpreter.program import Type

ELEMENTS = {
    "i1": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "index": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64, "ptr<3>": torch.int32,
}  # fmt: skip


def gather(views: dict[int, torch.Tensor], offset: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Bytes at ``offset`` (any shape) as int words: [..., k] of the widest aligned unit."""
    unit = unit_of(offset, nbytes)
    if unit == nbytes:
        flat = views[unit].index_select(0, (offset // unit).reshape(-1))
        if unit == 16:
            return flat.view(*offset.shape, 4)
        return flat.view(*offset.shape, 1)
    parts = []
    for k in range(0, nbytes, unit):
        flat = views[unit].index_select(0, ((offset + k) // unit).reshape(-1))
        parts.append(flat.view(*offset.shape, -1))
    return torch.cat(parts, -1)


def unit_of(offset: torch.Tensor, nbytes: int) -> int:
    unit = nbytes & -nbytes
    unit = min(unit, 16)
    while unit > 1 and bool((offset % unit).any()):
        unit //= 2
    return unit


def as_type(raw: torch.Tensor, t: Type) -> torch.Tensor:
    """Gathered words as a value of type ``t``."""
    dtype = ELEMENTS.get(t.elem, torch.int64)
    value = raw.view(dtype) if raw.dtype != dtype else raw
    if t.elem == "i1":
        value = value != 0
    return value if t.n else value.squeeze(-1)


def as_words(value: torch.Tensor, nbytes: int, unit: int, vector: bool) -> torch.Tensor:
    """A value's bytes as int words of ``unit`` bytes, [..., nbytes // unit]."""
    if value.dtype == torch.bool:
        value = value.to(torch.uint8)
    if not vector:
        value = value.unsqueeze(-1)
    want = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int32}[unit]
    value = value.contiguous()
    return value.view(want) if value.dtype != want else value


def mark_as(mark: torch.Tensor, t: Type) -> torch.Tensor:
    if t.elem == "i1":
        return (mark != 0).squeeze(-1)
    return as_type(mark, t).view(uninitialized.int_dtype(ELEMENTS.get(t.elem, torch.int64)))


def alignment(op: Any, nbytes: int) -> int:
    return int(op.attrs.get("alignment", 1) or 1)
