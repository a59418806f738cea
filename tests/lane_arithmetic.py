"""Scalar arithmetic for the tests of the interpreter's operations: ints, Fractions, struct.

Nothing here uses torch to compute; torch only carries the operands and results.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from m3lab.interpreter.ops import CROSS, LANE, MATRIX
from m3lab.interpreter.program import Op, Type


def load_operations() -> None:
    """Register every operation module."""
    import m3lab.interpreter.ops.arith
    import m3lab.interpreter.ops.convert
    import m3lab.interpreter.ops.crosslane
    import m3lab.interpreter.ops.math
    import m3lab.interpreter.ops.matrix
    import m3lab.interpreter.ops.vector  # noqa: F401


load_operations()


def type_of(text: str) -> Type:
    """``f32`` or ``4xf32``."""
    if "x" in text[:3] and text[0].isdigit():
        n, elem = text.split("x", 1)
        return Type(elem, int(n))
    return Type(text)


def make_op(kind: str, /, ins: str = "", outs: str = "", **attrs: Any) -> Op:
    """An operation with types given as text, several separated by blanks."""
    return Op(
        kind=kind,
        operands=(),
        results=(),
        in_types=tuple(type_of(t) for t in ins.split()),
        types=tuple(type_of(t) for t in outs.split()),
        attrs=dict(attrs),
    )


def run(kind: str, /, *operands: torch.Tensor, ins: str = "", outs: str = "", **attrs: Any) -> Any:
    """The registered function of ``kind`` on ``operands``."""
    table = LANE if kind in LANE else MATRIX if kind in MATRIX else CROSS
    return table[kind](make_op(kind, ins, outs, **attrs), *operands)


# ---------------------------------------------------------------------- integers

INT_DTYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def bare(value: int, bits: int) -> int:
    """Read without sign."""
    return value & ((1 << bits) - 1)


def int_values(bits: int) -> list[int]:
    """Every value of 8 bits; of more, the edges and some in between."""
    if bits == 8:
        return [signed(v, 8) for v in range(256)]
    top = 1 << (bits - 1)
    around = [0, 1, 2, 3, 5, 7, 10, 31, 32, 33, 63, 64, 100, top >> 1, (top >> 1) - 1, top - 1, top]
    odd = [0x5A5A5A5A5A5A5A5A, 0x123456789ABCDEF0, 0xDEADBEEFCAFEF00D]
    return sorted({signed(s * v, bits) for v in around for s in (1, -1)} | {
        signed(v, bits) for v in odd
    })  # fmt: skip


def int_pairs(bits: int) -> tuple[list[int], list[int]]:
    values = int_values(bits)
    return [a for a in values for _ in values], [b for _ in values for b in values]


def ints(values: list[int], bits: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT_DTYPES[bits]).reshape(1, 1, -1)


# ---------------------------------------------------------------------- floats


@dataclass(frozen=True)
class Float:
    """A binary format: significant bits, least and greatest normal exponent."""

    digits: int
    least: int
    most: int
    bits: int
    dtype: torch.dtype


F32 = Float(24, -126, 127, 32, torch.float32)
F16 = Float(11, -14, 15, 16, torch.float16)
BF16 = Float(8, -126, 127, 16, torch.bfloat16)
FLOATS = {"f32": F32, "f16": F16, "bf16": BF16}


def nearest(x: Fraction, form: Float, negative_zero: bool = False) -> float:
    """``x`` to nearest even in a format (as a Python float: all formats here fit)."""
    if x == 0:
        return -0.0 if negative_zero else 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    assert Fraction(2) ** exponent <= size < Fraction(2) ** (exponent + 1)
    unit = Fraction(2) ** (max(exponent, form.least) - form.digits + 1)
    count = round(size / unit)  # Python rounds a Fraction's half to even
    value = count * unit
    if value >= Fraction(2) ** (form.most + 1):
        result = math.inf
    else:
        result = float(value)
    return -result if x < 0 else result


def f32_bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits(bits: int, form: Float) -> float:
    """The value of a bit pattern."""
    if form is F16:
        return struct.unpack("<e", struct.pack("<H", bits))[0]
    return struct.unpack("<f", struct.pack("<I", bits << (32 - form.bits)))[0]


def float_values(form: Float) -> list[float]:
    """Zeros, denormals, neighbours of one, ties, extremes, infinities, NaN and some others."""
    top = 1 << (form.bits - 1)
    mantissa = form.digits - 1
    one = (form.most) << mantissa
    infinity = (2 * form.most + 1) << mantissa
    patterns = [
        0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, (1 << mantissa) + 1, one - 1, one, one + 1,
        one + (1 << mantissa), one + (3 << (mantissa - 1)), (one >> 1) + 5, one + 0x15, one + 0x2B,
        infinity - 1, infinity - (1 << mantissa), infinity, infinity | (1 << (mantissa - 1)),
    ]  # fmt: skip
    return [from_bits(p | s, form) for p in patterns for s in (0, top)]


def floats(values: list[float], form: Float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).to(form.dtype).reshape(1, 1, -1)


def identical(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def first_difference(got: torch.Tensor, want: list[Any], *operands: list[Any]) -> str:
    """The first lane that differs, with its operands: for a test's message."""
    for i, (g, w) in enumerate(zip(got.flatten().tolist(), want, strict=True)):
        if not (identical(g, w) if isinstance(w, float) else g == w):
            return f"lane {i}: {[o[i] for o in operands]} gave {g!r}, expected {w!r}"
    return ""
