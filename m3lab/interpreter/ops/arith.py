"""Integer and float arithmetic (``arith``, and the ``llvm`` forms of the same).

Integers wrap. What LLVM leaves undefined is defined here, so that a lane that is masked off cannot
stop a run: a shift by the width or more gives 0 (sign bits for the arithmetic one), a division by
zero gives all ones and the dividend as remainder, the least integer over -1 gives itself. Floats
are IEEE at their own width, denormals kept; fast-math flags are ignored. Booleans are torch.bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from m3lab.interpreter.ops import lane_op
from m3lab.interpreter.ops.values import (
    BITS,
    INT64_MIN,
    as_bits,
    dtype_of,
    lanes_last,
    narrow,
    on_cpu_none,
    ordered,
    python_scalar,
    shift_right_logical,
    unsigned,
    wrap,
)
from m3lab.interpreter.program import Op, Type

Tensor = torch.Tensor
Binary = Callable[[Op, Tensor, Tensor], Tensor]

# ---------------------------------------------------------------------- constants

_CONSTANTS: dict[tuple[str, Type, str], Tensor] = {}


def constant_value(value: Any, kind: Type, device: str | torch.device = "cpu") -> Tensor:
    """A constant of type ``kind`` (a list: a vector's elements), shared: never write to it.

    Shape [1, 1, 1], a vector's [1, 1, 1, n].
    """
    key = (repr(value), kind, str(device))
    known = _CONSTANTS.get(key)
    if known is None:
        known = _CONSTANTS[key] = _make_constant(value, kind).to(device)
    return known


def _make_constant(value: Any, kind: Type) -> Tensor:
    dtype = dtype_of(kind)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if dtype.is_floating_point:
        tensor = narrow(torch.tensor(values, dtype=torch.float64), dtype)
    elif dtype == torch.bool:
        tensor = torch.tensor([bool(v) for v in values])
    else:
        tensor = torch.tensor([wrap(int(v), BITS[dtype]) for v in values], dtype=dtype)
    if not kind.n:
        return tensor.reshape(1, 1, 1)
    return tensor.expand(kind.n).contiguous().reshape(1, 1, 1, kind.n)


@lane_op("arith.constant", "llvm.mlir.constant")
def constant(op: Op, *, device: str | torch.device = "cpu") -> Tensor:
    """``attrs['value']``: an int, bool or float, a list for a vector."""
    return constant_value(op.attrs["value"], op.types[0], device)


@lane_op("llvm.mlir.undef", "llvm.mlir.poison", "llvm.mlir.zero")
def undefined(op: Op, *, device: str | torch.device = "cpu") -> Any:
    """Zeros: an undefined value may be anything. A struct starts as Nones to be inserted into."""
    kind = op.types[0]
    if kind.elem == "struct":
        return (None,) * kind.n
    return constant_value(0.0 if dtype_of(kind).is_floating_point else 0, kind, device)


# ---------------------------------------------------------------------- add, multiply, bits


@lane_op("arith.addi", "llvm.add")
def addi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a ^ b if a.dtype == torch.bool else a + b


@lane_op("arith.subi", "llvm.sub")
def subi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a ^ b if a.dtype == torch.bool else a - b


@lane_op("arith.muli", "llvm.mul")
def muli(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a & b if a.dtype == torch.bool else a * b


@lane_op("arith.andi", "llvm.and")
def andi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a & b


@lane_op("arith.ori", "llvm.or")
def ori(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a | b


@lane_op("arith.xori", "llvm.xor")
def xori(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a ^ b


@lane_op("arith.addui_extended", "llvm.intr.uadd.with.overflow")
def addui_extended(op: Op, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, carry)."""
    if a.dtype == torch.bool:
        return a ^ b, a & b
    total = a + b
    return total, ordered(total) < ordered(a)


@lane_op("arith.subui_extended", "llvm.intr.usub.with.overflow")
def subui_extended(op: Op, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(difference, borrow)."""
    if a.dtype == torch.bool:
        return a ^ b, ~a & b
    return a - b, ordered(a) < ordered(b)


@lane_op("arith.mulsi_extended")
def mulsi_extended(op: Op, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(low word, high word) of the signed product."""
    bits = BITS[a.dtype]
    if bits < 64:
        wide = a.to(torch.int64) * b.to(torch.int64)
        return wide.to(a.dtype), (wide >> bits).to(a.dtype)
    low, high = _unsigned_product_64(a, b)
    return low, high - torch.where(a < 0, b, 0) - torch.where(b < 0, a, 0)


@lane_op("arith.mului_extended")
def mului_extended(op: Op, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(low word, high word) of the unsigned product."""
    bits = BITS[a.dtype]
    if bits < 64:
        wide = unsigned(a) * unsigned(b)
        return wide.to(a.dtype), shift_right_logical(wide, bits).to(a.dtype)
    return _unsigned_product_64(a, b)


def _unsigned_product_64(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    half = 0xFFFFFFFF
    a_low, a_high = a & half, shift_right_logical(a, 32)
    b_low, b_high = b & half, shift_right_logical(b, 32)
    low = a_low * b_low
    middle = a_high * b_low + shift_right_logical(low, 32)
    middle2 = a_low * b_high + (middle & half)
    high = a_high * b_high + shift_right_logical(middle, 32) + shift_right_logical(middle2, 32)
    return a * b, high


# ---------------------------------------------------------------------- division


def _safe(b: Tensor) -> Tensor:
    """``b`` with 0 and -1 replaced by 1: what the processor can divide by without a trap."""
    return torch.where((b == 0) | (b == -1), 1, b)


def _divide(a: Tensor, b: Tensor, rounding: str) -> Tensor:
    known = python_scalar(b)
    if known is not None and known > 0:
        if rounding == "floor" and known & (known - 1) == 0:
            return a >> (known.bit_length() - 1)
        return torch.div(a, known, rounding_mode=rounding)
    quotient = torch.div(a, _safe(b), rounding_mode=rounding)
    quotient = torch.where(b == -1, -a, quotient)
    return torch.where(b == 0, -1, quotient)


@lane_op("arith.divsi", "llvm.sdiv")
def divsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Toward zero."""
    if a.dtype == torch.bool:
        return a | ~b  # -1 over -1 wraps to -1, anything over 0 gives all ones
    return _divide(a, b, "trunc")


@lane_op("arith.floordivsi")
def floordivsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return _divide(a, b, "floor")


@lane_op("arith.ceildivsi")
def ceildivsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Toward positive infinity: one more than the floor where a remainder is left."""
    quotient = _divide(a, b, "floor")
    left_over = (quotient * b != a) & (b != 0) & (b != -1)
    return quotient + left_over.to(a.dtype)


@lane_op("arith.remsi", "llvm.srem")
def remsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Sign of the dividend."""
    if a.dtype == torch.bool:
        return a & ~b
    known = python_scalar(b)
    if known is not None and known > 0:
        return torch.fmod(a, known)
    remainder = torch.fmod(a, _safe(b))
    return torch.where(b == 0, a, remainder)


def _divide_unsigned(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(quotient, remainder) of integers read without sign."""
    known = python_scalar(b)
    if known is not None and known > 0 and known & (known - 1) == 0:
        return shift_right_logical(a, known.bit_length() - 1), a & (known - 1)
    if a.dtype != torch.int64:
        wide_a, wide_b = unsigned(a), unsigned(b)
        quotient = torch.div(wide_a, torch.where(wide_b == 0, 1, wide_b), rounding_mode="trunc")
        remainder = wide_a - quotient * wide_b
        return torch.where(wide_b == 0, -1, quotient).to(a.dtype), remainder.to(a.dtype)
    # halve, divide, double, correct by one (Hacker's Delight, 9-3); a divisor with its top bit
    # set goes in once or not at all
    small = torch.where(b > 0, b, 1)
    quotient = torch.div(shift_right_logical(a, 1), small, rounding_mode="trunc") << 1
    remainder = a - quotient * b
    more = ordered(remainder) >= ordered(b)
    quotient = torch.where(b > 0, quotient + more.to(torch.int64), 0)
    quotient = torch.where((b < 0) & (ordered(a) >= ordered(b)), 1, quotient)
    quotient = torch.where(b == 0, -1, quotient)
    return quotient, torch.where(b == 0, a, a - quotient * b)


@lane_op("arith.divui", "llvm.udiv")
def divui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a | ~b
    return _divide_unsigned(a, b)[0]


@lane_op("arith.remui", "llvm.urem")
def remui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a & ~b
    return _divide_unsigned(a, b)[1]


@lane_op("arith.ceildivui")
def ceildivui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    quotient, remainder = _divide_unsigned(a, b)
    return torch.where((remainder != 0) & (b != 0), quotient + 1, quotient)


# ---------------------------------------------------------------------- shifts


@lane_op("arith.shli", "llvm.shl")
def shli(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """torch's own rule: an amount outside 0 .. width - 1 gives 0."""
    return a & ~b if a.dtype == torch.bool else a << b


@lane_op("arith.shrsi", "llvm.ashr")
def shrsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """torch's own rule: an amount outside 0 .. width - 1 gives the sign bits."""
    return a if a.dtype == torch.bool else a >> b


@lane_op("arith.shrui", "llvm.lshr")
def shrui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a & ~b
    bits = BITS[a.dtype]
    known = python_scalar(b)
    if known is not None and 0 <= known < bits:
        return shift_right_logical(a, known)
    if bits < 64:
        wide = unsigned(a) >> b.to(torch.int64)
        return torch.where((b < 0) | (b >= bits), 0, wide).to(a.dtype)
    # one bit by hand, so that the rest is a shift of a non-negative number
    rest = shift_right_logical(a, 1) >> torch.clamp(b - 1, min=0)
    return torch.where(b == 0, a, torch.where((b < 0) | (b >= bits), 0, rest))


# ---------------------------------------------------------------------- comparison, selection

_INT_COMPARE: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.eq,
    torch.ne,
    torch.lt,
    torch.le,
    torch.gt,
    torch.ge,
)


@lane_op("arith.cmpi", "llvm.icmp")
def cmpi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """``predicate`` 0..9: eq ne slt sle sgt sge ult ule ugt uge (a signed i1 is 0 or -1)."""
    predicate = op.attrs["predicate"]
    if predicate < 2:
        return _INT_COMPARE[predicate](a, b)
    if a.dtype == torch.bool:
        a, b = a.to(torch.int8), b.to(torch.int8)
        if predicate < 6:
            a, b = -a, -b
    elif predicate >= 6:
        a, b = ordered(a), ordered(b)
    return _INT_COMPARE[predicate - 4 if predicate >= 6 else predicate](a, b)


@lane_op("arith.cmpf", "llvm.fcmp")
def cmpf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """``predicate`` 0..15: false oeq ogt oge olt ole one ord ueq ugt uge ult ule une uno true."""
    predicate = op.attrs["predicate"]
    if predicate in (0, 15):
        return torch.full_like(a == b, predicate == 15)
    ordered_form = _FLOAT_COMPARE.get(predicate)
    if ordered_form is not None:
        return ordered_form(a, b)
    return ~_FLOAT_COMPARE[_OPPOSITE[predicate]](a, b)


_FLOAT_COMPARE: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    1: torch.eq,
    2: torch.gt,
    3: torch.ge,
    4: torch.lt,
    5: torch.le,
    6: lambda a, b: (a < b) | (a > b),
    7: lambda a, b: (a == a) & (b == b),
    13: torch.ne,
}
# an unordered comparison is the negation of the opposite ordered one
_OPPOSITE = {8: 6, 9: 5, 10: 4, 11: 3, 12: 2, 14: 7}


@lane_op("arith.select", "llvm.select")
def select(op: Op, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Per lane, or per element where the condition is a vector."""
    return torch.where(lanes_last(condition, a), a, b)


@lane_op("arith.maxsi", "llvm.intr.smax")
def maxsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a & b if a.dtype == torch.bool else torch.maximum(a, b)


@lane_op("arith.minsi", "llvm.intr.smin")
def minsi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a | b if a.dtype == torch.bool else torch.minimum(a, b)


@lane_op("arith.maxui", "llvm.intr.umax")
def maxui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a | b if a.dtype == torch.bool else ordered(torch.maximum(ordered(a), ordered(b)))


@lane_op("arith.minui", "llvm.intr.umin")
def minui(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a & b if a.dtype == torch.bool else ordered(torch.minimum(ordered(a), ordered(b)))


# ---------------------------------------------------------------------- floats


@lane_op("arith.addf", "llvm.fadd")
def addf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a + b


@lane_op("arith.subf", "llvm.fsub")
def subf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a - b


@lane_op("arith.mulf", "llvm.fmul")
def mulf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a * b


@lane_op("arith.divf", "llvm.fdiv")
def divf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return a / b


@lane_op("arith.remf", "llvm.frem")
def remf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """C's fmod: exact, sign of the dividend (in fp64: torch's fp32 form overflows on the way)."""
    return torch.fmod(a.to(torch.float64), b.to(torch.float64)).to(a.dtype)


@lane_op("arith.negf", "llvm.fneg")
def negf(op: Op, a: Tensor) -> Tensor:
    return -a


def _zero_sign(result: Tensor, a: Tensor, b: Tensor, larger: bool) -> Tensor:
    """+0 is larger than -0 (torch takes whichever comes first)."""
    zero = result == 0
    if on_cpu_none(zero):
        return result
    bits = as_bits(a) & as_bits(b) if larger else as_bits(a) | as_bits(b)
    both = (a == 0) & (b == 0)
    return torch.where(both, bits.view(a.dtype), result)


@lane_op("arith.maximumf", "llvm.intr.maximum")
def maximumf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """NaN where either is NaN."""
    return _zero_sign(torch.maximum(a, b), a, b, larger=True)


@lane_op("arith.minimumf", "llvm.intr.minimum")
def minimumf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """NaN where either is NaN."""
    return _zero_sign(torch.minimum(a, b), a, b, larger=False)


@lane_op("arith.maxnumf", "llvm.intr.maxnum")
def maxnumf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """The other operand where one is NaN."""
    return _zero_sign(torch.fmax(a, b), a, b, larger=True)


@lane_op("arith.minnumf", "llvm.intr.minnum")
def minnumf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """The other operand where one is NaN."""
    return _zero_sign(torch.fmin(a, b), a, b, larger=False)


# ---------------------------------------------------------------------- widths and types


@lane_op("arith.extsi", "llvm.sext")
def extsi(op: Op, a: Tensor) -> Tensor:
    """A boolean becomes 0 or -1."""
    wide = a.to(dtype_of(op.types[0]))
    return -wide if a.dtype == torch.bool else wide


@lane_op("arith.extui", "llvm.zext")
def extui(op: Op, a: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return a.to(dtype_of(op.types[0]))
    mask = (1 << BITS[a.dtype]) - 1
    return a.to(dtype_of(op.types[0])) & mask


@lane_op("arith.trunci", "llvm.trunc")
def trunci(op: Op, a: Tensor) -> Tensor:
    """The low bits; i1 takes bit 0."""
    dtype = dtype_of(op.types[0])
    return (a & 1).to(torch.bool) if dtype == torch.bool else a.to(dtype)


@lane_op("arith.index_cast")
def index_cast(op: Op, a: Tensor) -> Tensor:
    return extsi(op, a) if a.dtype == torch.bool else a.to(dtype_of(op.types[0]))


@lane_op("arith.index_castui")
def index_castui(op: Op, a: Tensor) -> Tensor:
    dtype = dtype_of(op.types[0])
    return extui(op, a) if BITS[dtype] > BITS[a.dtype] else a.to(dtype)


@lane_op("arith.sitofp", "llvm.sitofp")
def sitofp(op: Op, a: Tensor) -> Tensor:
    """Rounded once, to nearest even; a boolean is 0 or -1."""
    if a.dtype == torch.bool:
        return -a.to(dtype_of(op.types[0]))
    return _int_to_float(a, dtype_of(op.types[0]))


@lane_op("arith.uitofp", "llvm.uitofp")
def uitofp(op: Op, a: Tensor) -> Tensor:
    """Rounded once, to nearest even."""
    dtype = dtype_of(op.types[0])
    if a.dtype != torch.int64:
        return _int_to_float(unsigned(a), dtype)
    # a top bit set: halve with the lost bit kept sticky, convert, double
    halved = shift_right_logical(a, 1) | (a & 1)
    return torch.where(a >= 0, _int_to_float(a, dtype), _int_to_float(halved, dtype) * 2)


def _int_to_float(a: Tensor, dtype: torch.dtype) -> Tensor:
    if BITS[dtype] >= 32:
        return a.to(dtype)
    # to 16 bits by way of fp64, which holds 53 bits: of a longer integer the low 11 go, kept as
    # one sticky bit
    wide = a.to(torch.int64)
    sticky = (wide & -2048) | (((wide & 2047) != 0).to(torch.int64) << 11)
    wide = torch.where((wide.abs() >> 53) != 0, sticky, wide)
    return narrow(wide.to(torch.float64), dtype)


@lane_op("arith.fptosi", "llvm.fptosi")
def fptosi(op: Op, a: Tensor) -> Tensor:
    """Toward zero; past the range saturates and NaN is 0, as v_cvt_i32_f32 does (LLVM: poison)."""
    dtype = dtype_of(op.types[0])
    return _float_to_int(a, dtype, -(1 << (BITS[dtype] - 1)), (1 << (BITS[dtype] - 1)) - 1)


@lane_op("arith.fptoui", "llvm.fptoui")
def fptoui(op: Op, a: Tensor) -> Tensor:
    """Toward zero; past the range saturates and NaN is 0, as v_cvt_u32_f32 does (LLVM: poison)."""
    dtype = dtype_of(op.types[0])
    if dtype != torch.int64:
        return _float_to_int(a, dtype, 0, (1 << BITS[dtype]) - 1)
    wide = torch.nan_to_num(a.to(torch.float64), nan=0.0).clamp(min=0.0)
    top = wide >= 2.0**63
    low = torch.where(top, wide - 2.0**63, wide).clamp(max=2.0**63 - 1024)
    value = low.to(torch.int64) ^ torch.where(top, INT64_MIN, 0)
    return torch.where(wide >= 2.0**64, -1, value)


def _float_to_int(a: Tensor, dtype: torch.dtype, least: int, most: int) -> Tensor:
    wide = torch.nan_to_num(a.to(torch.float64), nan=0.0)
    if BITS[dtype] < 64:
        value = wide.clamp(float(least), float(most)).to(torch.int64)
        return (value & 1).to(torch.bool) if dtype == torch.bool else value.to(dtype)
    value = wide.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
    return torch.where(wide >= 2.0**63, most, value)


@lane_op("arith.extf", "llvm.fpext")
def extf(op: Op, a: Tensor) -> Tensor:
    return a.to(dtype_of(op.types[0]))


@lane_op("arith.truncf", "llvm.fptrunc")
def truncf(op: Op, a: Tensor) -> Tensor:
    """To nearest even; too large becomes infinite."""
    return narrow(a, dtype_of(op.types[0]))


__all__ = ["constant_value"]
