"""Building, taking apart and reshaping vectors (``vector``, and the ``llvm`` forms of the same).

A vector value carries its elements on a fourth axis; several dimensions are flattened into one, in
row-major order. Bits are reinterpreted little-endian, as the part does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3lab.interpreter.ops import arith, lane_op
from m3lab.interpreter.ops.math import fused
from m3lab.interpreter.ops.values import BITS, common_shape, dtype_of, python_scalar
from m3lab.interpreter.program import Op, Type

Tensor = torch.Tensor
_DYNAMIC = -(1 << 63)  # MLIR's mark of a position that is an operand


def reinterpret(x: Tensor, source: Type, target: Type) -> Tensor:
    """The bits of ``x`` as type ``target``, which has as many of them."""
    dtype = dtype_of(target)
    if x.dtype == dtype and bool(source.n) == bool(target.n):
        return x
    if torch.bool in (x.dtype, dtype):
        raise ValueError(f"bitcast of {source} to {target} is not modelled: i1 is one bit")
    if not source.n:
        x = x.unsqueeze(-1)
    if BITS[dtype] != BITS[x.dtype] and x.stride(-1) != 1:
        x = x.contiguous()
    if BITS[dtype] > BITS[x.dtype]:
        ratio = BITS[dtype] // BITS[x.dtype]
        if x.storage_offset() % ratio or any(s % ratio for s in x.stride()[:-1]):
            x = x.contiguous()
    x = x.view(dtype)
    return x if target.n else x.squeeze(-1)


@lane_op("vector.bitcast", "arith.bitcast", "llvm.bitcast")
def bitcast(op: Op, x: Tensor) -> Tensor:
    return reinterpret(x, op.in_types[0], op.types[0])


@lane_op("vector.shape_cast")
def shape_cast(op: Op, x: Tensor) -> Tensor:
    if op.types[0].n and not op.in_types[0].n:
        return x.unsqueeze(-1)
    return x if op.types[0].n else x.squeeze(-1)


@lane_op("vector.broadcast", "vector.splat")
def broadcast(op: Op, x: Tensor) -> Tensor:
    """A scalar to every element (no copy), or a vector repeated along new leading dimensions."""
    n = op.types[0].n
    if not op.in_types[0].n:
        return x.unsqueeze(-1).expand(*x.shape, n)
    return x if x.shape[-1] == n else x.repeat(1, 1, 1, n // x.shape[-1])


@lane_op("vector.from_elements")
def from_elements(op: Op, *elements: Tensor) -> Tensor:
    if len(elements) == 1:
        return elements[0].unsqueeze(-1)
    shape = common_shape(*(e.shape for e in elements))
    first = elements[0]
    result = torch.empty((*shape, len(elements)), dtype=first.dtype, device=first.device)
    for i, element in enumerate(elements):  # half the time of torch.stack
        result[..., i] = element
    return result


@lane_op("vector.to_elements")
def to_elements(op: Op, x: Tensor) -> Any:
    return x.unbind(-1) if x.shape[-1] > 1 else x.squeeze(-1)


def _position(op: Op, index: Tensor | None) -> int | Tensor:
    static = op.attrs.get("static_position", [])
    if len(static) > 1:
        raise ValueError(
            f"{op.kind} at {len(static)} positions is not modelled: flatten the vector"
        )
    if index is not None:
        known = python_scalar(index)
        return index if known is None else known
    return int(static[0]) if static else 0


def _take(x: Tensor, index: Tensor) -> Tensor:
    shape = common_shape(x.shape[:3], index.shape)
    where = index.to(torch.int64).clamp(0, x.shape[-1] - 1).expand(shape).unsqueeze(-1)
    return x.expand(*shape, x.shape[-1]).gather(-1, where).squeeze(-1)


def _put(x: Tensor, value: Tensor, index: int | Tensor) -> Tensor:
    slots = torch.arange(x.shape[-1], device=x.device)
    here = slots == (index.unsqueeze(-1) if isinstance(index, Tensor) else index)
    return torch.where(here, value.unsqueeze(-1), x)


@lane_op("vector.extract")
def extract(op: Op, x: Tensor, index: Tensor | None = None) -> Tensor:
    """One element; a position past the end is clamped (undefined in MLIR)."""
    if not op.attrs.get("static_position"):
        return x
    where = _position(op, index)
    return _take(x, where) if isinstance(where, Tensor) else x[..., where]


@lane_op("vector.insert")
def insert(op: Op, value: Tensor, x: Tensor, index: Tensor | None = None) -> Tensor:
    return _put(x, value, _position(op, index))


@lane_op("llvm.extractelement", "vector.extractelement")
def extractelement(op: Op, x: Tensor, index: Tensor) -> Tensor:
    known = python_scalar(index)
    return _take(x, index) if known is None else x[..., known]


@lane_op("llvm.insertelement")
def insertelement(op: Op, x: Tensor, value: Tensor, index: Tensor) -> Tensor:
    known = python_scalar(index)
    return _put(x, value, index if known is None else known)


@lane_op("vector.insertelement")
def vector_insertelement(op: Op, value: Tensor, x: Tensor, index: Tensor) -> Tensor:
    return insertelement(op, x, value, index)


@lane_op("vector.shuffle", "llvm.shufflevector")
def shuffle(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Elements of a : b by ``mask`` (-1: any, here element 0)."""
    mask = [max(0, int(m)) for m in op.attrs["mask"]]
    n = a.shape[-1]
    run = range(mask[0], mask[0] + len(mask))
    if mask == list(run) and (run[-1] < n or run[0] >= n):
        source, start = (a, run[0]) if run[-1] < n else (b, run[0] - n)
        return source[..., start : start + len(mask)]
    parts = [a[..., m] if m < n else b[..., m - n] for m in mask]
    return from_elements(op, *parts)


@lane_op("vector.extract_strided_slice")
def extract_strided_slice(op: Op, x: Tensor) -> Tensor:
    offsets, sizes = op.attrs["offsets"], op.attrs["sizes"]
    if len(offsets) != 1:
        raise ValueError(f"{op.kind} of {len(offsets)} dimensions is not modelled")
    step = op.attrs["strides"][0]
    return x[..., offsets[0] : offsets[0] + sizes[0] * step : step]


@lane_op("vector.insert_strided_slice")
def insert_strided_slice(op: Op, value: Tensor, x: Tensor) -> Tensor:
    offsets, step = op.attrs["offsets"], op.attrs["strides"][0]
    if len(offsets) != 1:
        raise ValueError(f"{op.kind} of {len(offsets)} dimensions is not modelled")
    shape = common_shape(value.shape[:3], x.shape[:3])
    result = x.expand(*shape, x.shape[-1]).clone()
    result[..., offsets[0] : offsets[0] + value.shape[-1] * step : step] = value
    return result


@lane_op("vector.interleave")
def interleave(op: Op, a: Tensor, b: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(a, b)
    return torch.stack((a, b), dim=-1).flatten(-2)


@lane_op("vector.deinterleave")
def deinterleave(op: Op, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., 0::2], x[..., 1::2]


@lane_op("vector.step")
def step(op: Op, *, device: str | torch.device = "cpu") -> Tensor:
    return torch.arange(op.types[0].n, device=device).reshape(1, 1, 1, -1)


# ---------------------------------------------------------------------- reductions

_REDUCE: dict[str, Callable[[Op, Tensor, Tensor], Tensor]] = {
    "add": lambda op, a, b: a + b if a.dtype.is_floating_point else arith.addi(op, a, b),
    "mul": lambda op, a, b: a * b if a.dtype.is_floating_point else arith.muli(op, a, b),
    "minui": arith.minui,
    "minsi": arith.minsi,
    "minnumf": arith.minnumf,
    "minimumf": arith.minimumf,
    "maxui": arith.maxui,
    "maxsi": arith.maxsi,
    "maxnumf": arith.maxnumf,
    "maximumf": arith.maximumf,
    "and": arith.andi,
    "or": arith.ori,
    "xor": arith.xori,
}


@lane_op("vector.reduction")
def reduction(op: Op, x: Tensor, start: Tensor | None = None) -> Tensor:
    """In element order from ``start`` (or the first element), each step rounded."""
    name = str(op.attrs["kind"]).split("<")[-1].rstrip(">")
    combine = _REDUCE[name]
    elements = list(x.unbind(-1))
    total = elements.pop(0) if start is None else start
    for element in elements:
        total = combine(op, total, element)
    return total


@lane_op("vector.outerproduct")
def outerproduct(op: Op, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """Row-major a_i * b_j (+ c, fused)."""
    rows = a.repeat_interleave(b.shape[-1], dim=-1)
    columns = b.repeat(1, 1, 1, a.shape[-1])
    return rows * columns if c is None else fused(rows, columns, c)


# ---------------------------------------------------------------------- structs


@lane_op("llvm.extractvalue")
def extractvalue(op: Op, struct: tuple[Any, ...]) -> Any:
    value: Any = struct
    for index in op.attrs["position"]:
        value = value[index]
    return value


@lane_op("llvm.insertvalue")
def insertvalue(op: Op, struct: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    (index,) = op.attrs["position"]
    return (*struct[:index], value, *struct[index + 1 :])


__all__ = ["reinterpret"]
