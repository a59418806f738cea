"""How lane values look as torch tensors, and the few tricks that every operation module shares.

Element types to dtypes, unsigned views of signed integers (torch's own unsigned types have almost
no arithmetic), exact rounding helpers and a table cache per device. Not an operation itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from m3lab.interpreter.program import Op, Type

DTYPES: dict[str, torch.dtype] = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "index": torch.int64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "ptr<0>": torch.int64,
    "ptr<1>": torch.int64,
    "ptr<3>": torch.int64,
}
BITS: dict[torch.dtype, int] = {
    torch.bool: 1,
    torch.int8: 8,
    torch.int16: 16,
    torch.int32: 32,
    torch.int64: 64,
    torch.float16: 16,
    torch.bfloat16: 16,
    torch.float32: 32,
    torch.float64: 64,
}
INTS: dict[int, torch.dtype] = {
    8: torch.int8,
    16: torch.int16,
    32: torch.int32,
    64: torch.int64,
}
INT64_MIN = -(1 << 63)


def dtype_of(kind: Type) -> torch.dtype:
    """The dtype of a value of type ``kind`` (a vector: of its elements)."""
    try:
        return DTYPES[kind.elem]
    except KeyError:
        raise ValueError(
            f"no tensor form for element type {kind.elem}; known: {', '.join(DTYPES)}"
        ) from None


def wrap(value: int, bits: int) -> int:
    """``value`` modulo 2^bits as a signed integer of ``bits`` bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if bits > 1 and value >> (bits - 1) else value


def python_scalar(x: torch.Tensor) -> int | None:
    """The one integer that ``x`` holds, or None: several lanes' values, or a device's.

    Reading a device's value would wait for the device, so only CPU tensors answer.
    """
    if x.numel() != 1 or x.device.type != "cpu":
        return None
    return int(x.item())


def immediate(op: Op, name: str, operand: torch.Tensor | None) -> int:
    """An immediate: the attribute ``name`` of a rocdl form, a constant operand of an intrinsic.

    An operand's value is kept as the attribute, so that a device is asked for it once.
    """
    if name not in op.attrs:
        if operand is None or operand.numel() != 1:
            raise ValueError(f"{op.kind}: {name} must be a constant")
        op.attrs[name] = int(operand.item())
    return int(op.attrs[name])


def unsigned(x: torch.Tensor) -> torch.Tensor:
    """An integer of up to 32 bits, read without sign, as int64."""
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    if x.dtype == torch.int64:
        raise ValueError("a 64-bit integer has no wider unsigned form")
    return x.to(torch.int64) & ((1 << BITS[x.dtype]) - 1)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """A signed integer that orders like ``x`` read without sign (the sign bit flipped)."""
    if x.dtype == torch.bool:
        return x
    return x ^ torch.iinfo(x.dtype).min


def shift_right_logical(x: torch.Tensor, amount: int) -> torch.Tensor:
    """``x`` shifted right by a constant below its width, zeros in from the left."""
    if amount == 0:
        return x
    return (x >> amount) & ((1 << (BITS[x.dtype] - amount)) - 1)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The same bits as a signed integer of the same width."""
    if not x.dtype.is_floating_point:
        return x
    return x.view(INTS[BITS[x.dtype]])


def on_cpu_none(x: torch.Tensor) -> bool:
    """True where it is known, without waiting for a device, that no element is set."""
    return x.device.type == "cpu" and not bool(x.any())


def lanes_last(condition: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``condition`` with an element axis where ``other`` has one and it has not."""
    return condition.unsqueeze(-1) if condition.dim() < other.dim() else condition


def round_to_odd(x: torch.Tensor, residue: torch.Tensor) -> torch.Tensor:
    """fp64 ``x`` made odd where ``residue`` (true value - x) is not zero.

    Rounding the result to a format of at most 51 significant bits gives the correctly rounded true
    value: an inexact odd value is never a midpoint (Boldo and Melquiond, 2008).
    """
    bits = x.view(torch.int64)
    away = (residue > 0) == (x > 0)
    step = torch.where(away, 1, -1)
    move = (residue != 0) & ((bits & 1) == 0) & torch.isfinite(x)
    return torch.where(move, bits + step, bits).view(torch.float64)


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a float to ``dtype`` once, to nearest even.

    torch alone takes fp64 to 16 bits by way of fp32, which rounds twice.
    """
    if x.dtype == torch.float64 and BITS[dtype] == 16:
        near = x.to(torch.float32)
        back = near.to(torch.float64)
        bits = near.view(torch.int32)
        inexact = (back != x) & ((bits & 1) == 0) & torch.isfinite(near) & (near != 0)
        step = torch.where((x > back) == (near > 0), 1, -1).to(torch.int32)
        x = torch.where(inexact, bits + step, bits).view(torch.float32)
    return x.to(dtype)


def through_f64(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """``function`` in fp64, rounded once to x's own type.

    For fp32 and narrower this is the correctly rounded value but where the true value lies within
    2^-28 of an ulp of a midpoint: fp64 keeps 29 bits more.
    """
    if x.dtype == torch.float64:
        return function(x)
    return by_ctas(lambda part: narrow(function(part.to(torch.float64)), x.dtype), x)


def by_ctas(
    function: Callable[..., torch.Tensor], *operands: torch.Tensor, most: int = 1 << 16
) -> torch.Tensor:
    """An elementwise ``function``, some CTAs at a time: ``most`` results go through it at once.

    Wide temporaries of a whole grid would each be fresh memory (a page fault a page costs more than
    the arithmetic); those of a part stay in the cache.
    """
    shape = common_shape(*(x.shape for x in operands))
    count = 1
    for n in shape:
        count *= n
    if count <= 2 * most or shape[0] == 1 or operands[0].device.type != "cpu":
        return function(*operands)
    step = max(1, most * shape[0] // count)
    parts = [x.split(step) if x.shape[0] > 1 else None for x in operands]
    pieces = [
        function(*(x if p is None else p[i] for x, p in zip(operands, parts, strict=True)))
        for i in range(-(-shape[0] // step))
    ]
    return torch.cat(pieces)


@cache
def table(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """The constant table that ``make`` builds, kept per device."""
    return make().to(device)


def common_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all broadcast to (``torch.broadcast_shapes`` imports sympy: 0.3 s)."""
    rank = max(len(s) for s in shapes)
    out = [1] * rank
    for shape in shapes:
        for i, n in enumerate(shape, rank - len(shape)):
            if n != 1:
                if out[i] not in (1, n):
                    raise ValueError(f"shapes {shapes} do not broadcast")
                out[i] = n
    return tuple(out)
