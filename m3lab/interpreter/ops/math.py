"""Elementary functions: ``math``, ``llvm.intr``, the AMDGPU intrinsics and their ``rocdl`` forms.

rcp, rsq, exp2, log2 and the other transcendental functions give the correctly rounded value, as far
as fp64 in between can tell (the part itself is within 1 ulp, and flushes denormals in some of them:
not modelled). fma is rounded once, always.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable

import torch

from m3lab.interpreter.ops import lane_op
from m3lab.interpreter.ops.arith import maximumf, maxnumf, minimumf, minnumf
from m3lab.interpreter.ops.values import (
    BITS,
    by_ctas,
    narrow,
    round_to_odd,
    shift_right_logical,
    through_f64,
    unsigned,
)
from m3lab.interpreter.program import Op

Tensor = torch.Tensor

# ---------------------------------------------------------------------- fused multiply-add


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c rounded once to the operands' own type (fp64: see ``_fused_f64``).

    The product of two fp32 is exact in fp64; the fp64 sum is rounded to odd before it is narrowed,
    so that the second rounding cannot see a false tie.
    """
    if a.dtype == torch.float64:
        raise ValueError("fma of fp64 is not modelled (f16, bf16 and f32 are)")
    return by_ctas(_fused, a, b, c)


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x, y, z = (v.to(torch.float64) for v in (a, b, c))
    total = torch.addcmul(z, x, y)
    if a.dtype != torch.float32 or total.device.type != "cpu":
        return narrow(_to_odd(x, y, z, total), a.dtype)
    result = total.to(torch.float32)
    if _may_tie(total):
        bits = total.view(torch.int64) & 0x1FFFFFFF
        doubtful = (bits == 0x10000000) | ((total.abs() < 2.0**-126) & (total != 0))
        x, y, z = (v.expand(total.shape)[doubtful] for v in (x, y, z))
        result[doubtful] = _to_odd(x, y, z, total[doubtful]).to(torch.float32)
    return result


def _to_odd(x: Tensor, y: Tensor, z: Tensor, total: Tensor) -> Tensor:
    """``total`` = fp64(x y + z) rounded to odd instead, x y being exact."""
    # TwoSum (Knuth): the exact error of the fp64 addition
    product = x * y
    back = total - product
    residue = (product - (total - back)) + (z - back)
    return round_to_odd(total, residue)


def _may_tie(total: Tensor) -> bool:
    """Could narrowing fp64 ``total`` to fp32 meet a midpoint, or a denormal's shorter mantissa?

    Quick and never wrong when it says no: minima cost a tenth of comparisons.
    """
    past_fp32 = (total.view(torch.int64) & 0x1FFFFFFF) ^ 0x10000000
    return int(past_fp32.amin()) == 0 or not float(total.abs().amin()) >= 2.0**-126


@lane_op(
    "math.fma",
    "vector.fma",
    "llvm.intr.fma",
    "llvm.intr.fmuladd",
    "llvm.call_intrinsic:llvm.fma.f32",
    "llvm.call_intrinsic:llvm.fma.f16",
    "llvm.call_intrinsic:llvm.fma.v2f32",
    "llvm.call_intrinsic:llvm.fma.v4f32",
    "llvm.call_intrinsic:llvm.fmuladd.f32",
)
def fma(op: Op, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Rounded once; ``fmuladd`` too, which gfx950 contracts."""
    return fused(a, b, c)


# ---------------------------------------------------------------------- one-operand functions


def _cbrt(x: Tensor) -> Tensor:
    root = torch.sign(x) * torch.pow(x.abs(), 1.0 / 3.0)
    # one Newton step brings pow's error below an fp64 ulp or two
    step = torch.where((x == 0) | ~torch.isfinite(x), 0.0, (root - x / (root * root)) / 3.0)
    return torch.where(x == 0, x, root - step)


def _turns(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """v_sin_f32 and v_cos_f32 take turns, not radians."""
    return lambda x: function((x - torch.round(x)) * (2.0 * pymath.pi))


_THROUGH_F64: tuple[tuple[Callable[[Tensor], Tensor], tuple[str, ...]], ...] = (
    (torch.exp2, ("math.exp2", "rocdl.exp2", "llvm.intr.exp2")),
    (torch.log2, ("math.log2", "rocdl.log", "llvm.intr.log2")),
    (torch.rsqrt, ("math.rsqrt", "rocdl.rsq")),
    (torch.exp, ("math.exp", "rocdl.exp", "llvm.intr.exp")),
    (torch.expm1, ("math.expm1",)),
    (torch.log, ("math.log", "llvm.intr.log")),
    (torch.log10, ("math.log10", "llvm.intr.log10")),
    (torch.log1p, ("math.log1p",)),
    (torch.sin, ("math.sin", "llvm.intr.sin")),
    (torch.cos, ("math.cos", "llvm.intr.cos")),
    (torch.tan, ("math.tan", "llvm.intr.tan")),
    (torch.asin, ("math.asin",)),
    (torch.acos, ("math.acos",)),
    (torch.atan, ("math.atan",)),
    (torch.sinh, ("math.sinh",)),
    (torch.cosh, ("math.cosh",)),
    (torch.tanh, ("math.tanh", "rocdl.tanh", "llvm.intr.tanh")),
    (torch.asinh, ("math.asinh",)),
    (torch.acosh, ("math.acosh",)),
    (torch.atanh, ("math.atanh",)),
    (torch.erf, ("math.erf",)),
    (torch.erfc, ("math.erfc",)),
    (_cbrt, ("math.cbrt",)),
    (_turns(torch.sin), ("rocdl.sin",)),
    (_turns(torch.cos), ("rocdl.cos",)),
)
_INTRINSIC_NAMES: dict[str, tuple[str, ...]] = {
    "rocdl.exp2": ("llvm.amdgcn.exp2", "llvm.exp2"),
    "rocdl.log": ("llvm.amdgcn.log", "llvm.log2"),
    "rocdl.rsq": ("llvm.amdgcn.rsq",),
    "rocdl.sin": ("llvm.amdgcn.sin",),
    "rocdl.cos": ("llvm.amdgcn.cos",),
    "rocdl.rcp": ("llvm.amdgcn.rcp",),
    "rocdl.sqrt": ("llvm.amdgcn.sqrt", "llvm.sqrt"),
    "rocdl.tanh": ("llvm.amdgcn.tanh",),
    "math.exp": ("llvm.exp",),
    "math.log": ("llvm.log",),
    "math.sin": ("llvm.sin",),
    "math.cos": ("llvm.cos",),
    "math.absf": ("llvm.fabs",),
    "math.floor": ("llvm.floor",),
    "math.ceil": ("llvm.ceil",),
    "math.trunc": ("llvm.trunc",),
    "math.round": ("llvm.round",),
    "math.roundeven": ("llvm.roundeven", "llvm.rint", "llvm.nearbyint"),
}
_FLOAT_SUFFIXES = ("f32", "f16", "bf16", "v2f32", "v4f32")


def with_intrinsics(*kinds: str) -> tuple[str, ...]:
    """``kinds`` and the ``llvm.call_intrinsic`` kinds that mean the same, at every float type."""
    names = [n for kind in kinds for n in _INTRINSIC_NAMES.get(kind, ())]
    calls = (f"llvm.call_intrinsic:{n}.{suffix}" for n in names for suffix in _FLOAT_SUFFIXES)
    return (*kinds, *calls)


def _register_through_f64(function: Callable[[Tensor], Tensor], kinds: tuple[str, ...]) -> None:
    @lane_op(*with_intrinsics(*kinds))
    def run(op: Op, a: Tensor) -> Tensor:
        return through_f64(function, a)


for _function, _kinds in _THROUGH_F64:
    _register_through_f64(_function, _kinds)


@lane_op(*with_intrinsics("rocdl.rcp"))
def rcp(op: Op, a: Tensor) -> Tensor:
    """1 / a, correctly rounded."""
    return through_f64(torch.reciprocal, a) if BITS[a.dtype] == 16 else torch.reciprocal(a)


@lane_op(*with_intrinsics("math.sqrt", "rocdl.sqrt", "llvm.intr.sqrt"))
def sqrt(op: Op, a: Tensor) -> Tensor:
    """Correctly rounded (torch's own fp32 root is not: sqrt(1 - 2^-24) gives 1)."""
    return through_f64(torch.sqrt, a)


@lane_op(*with_intrinsics("math.absf", "llvm.intr.fabs"))
def absf(op: Op, a: Tensor) -> Tensor:
    return a.abs()


@lane_op(*with_intrinsics("math.floor", "llvm.intr.floor"))
def floor(op: Op, a: Tensor) -> Tensor:
    return torch.floor(a)


@lane_op(*with_intrinsics("math.ceil", "llvm.intr.ceil"))
def ceil(op: Op, a: Tensor) -> Tensor:
    return torch.ceil(a)


@lane_op(*with_intrinsics("math.trunc", "llvm.intr.trunc"))
def trunc(op: Op, a: Tensor) -> Tensor:
    return torch.trunc(a)


@lane_op(
    *with_intrinsics("math.roundeven"),
    "llvm.intr.roundeven",
    "llvm.intr.rint",
    "llvm.intr.nearbyint",
)
def roundeven(op: Op, a: Tensor) -> Tensor:
    """Halves to even."""
    return torch.round(a)


@lane_op(*with_intrinsics("math.round", "llvm.intr.round"))
def round_half_away(op: Op, a: Tensor) -> Tensor:
    """Halves away from zero; -0.3 gives -0."""
    whole = torch.trunc(a)
    step = torch.copysign((a - whole).abs().ge(0.5).to(a.dtype), a)
    return torch.where(torch.isfinite(a), torch.copysign(whole + step, a), a)


@lane_op("math.isnan")
def isnan(op: Op, a: Tensor) -> Tensor:
    return torch.isnan(a)


@lane_op("math.isinf")
def isinf(op: Op, a: Tensor) -> Tensor:
    return torch.isinf(a)


@lane_op("math.isfinite")
def isfinite(op: Op, a: Tensor) -> Tensor:
    return torch.isfinite(a)


@lane_op("math.isnormal")
def isnormal(op: Op, a: Tensor) -> Tensor:
    return torch.isfinite(a) & (a.abs() >= torch.finfo(a.dtype).smallest_normal)


@lane_op("math.sincos")
def sincos(op: Op, a: Tensor) -> tuple[Tensor, Tensor]:
    return through_f64(torch.sin, a), through_f64(torch.cos, a)


# ---------------------------------------------------------------------- two and three operands


@lane_op("math.copysign", "llvm.intr.copysign", "llvm.call_intrinsic:llvm.copysign.f32")
def copysign(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return torch.copysign(a, b)


@lane_op("math.powf", "llvm.intr.pow")
def powf(op: Op, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float64:
        return torch.pow(a, b)
    return narrow(torch.pow(a.to(torch.float64), b.to(torch.float64)), a.dtype)


@lane_op("math.fpowi")
def fpowi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return narrow(torch.pow(a.to(torch.float64), b.to(torch.float64)), a.dtype)


@lane_op("math.atan2")
def atan2(op: Op, a: Tensor, b: Tensor) -> Tensor:
    return narrow(torch.atan2(a.to(torch.float64), b.to(torch.float64)), a.dtype)


@lane_op("math.clampf")
def clampf(op: Op, a: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """max(low, min(a, high)), NaN where any is NaN."""
    return maximumf(op, minimumf(op, a, high), low)


@lane_op("rocdl.fmed3", "llvm.call_intrinsic:llvm.amdgcn.fmed3.f32")
def fmed3(op: Op, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The middle one of three; the least of the others where one is NaN (v_med3_f32)."""
    low, high = minnumf(op, a, b), maxnumf(op, a, b)
    middle = maxnumf(op, low, minnumf(op, high, c))
    any_nan = torch.isnan(a) | torch.isnan(b) | torch.isnan(c)
    return torch.where(any_nan, minnumf(op, low, c), middle)


@lane_op("llvm.intr.ldexp", "llvm.call_intrinsic:llvm.ldexp.f32.i32")
def ldexp(op: Op, a: Tensor, exponent: Tensor) -> Tensor:
    """a * 2^exponent, rounded once."""
    # two steps of at most 2^+-1022: fp64 holds every fp32 times the first without loss
    steps = exponent.to(torch.int64).clamp(-600, 600)
    scale = (steps + 1023 << 52).view(torch.float64)
    return narrow(a.to(torch.float64) * scale, a.dtype)


# ---------------------------------------------------------------------- integers and bits


@lane_op("math.absi", "llvm.intr.abs")
def absi(op: Op, a: Tensor) -> Tensor:
    """The least integer stays itself."""
    return a if a.dtype == torch.bool else a.abs()


@lane_op("math.ipowi")
def ipowi(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Wraps; a negative power is 0 but for bases 1 and -1 (and 0 over 0's power is 1)."""
    result = torch.ones_like(a * b)
    base, power = a, torch.clamp(b, min=0)
    for _ in range(BITS[a.dtype] - 1):
        result = torch.where((power & 1) != 0, result * base, result)
        base, power = base * base, power >> 1
    inverse = torch.where(a == -1, 1 - 2 * (b & 1), (a == 1).to(a.dtype))
    return torch.where(b < 0, inverse, result).to(a.dtype)


@lane_op(
    "math.ctpop",
    "llvm.intr.ctpop",
    "llvm.call_intrinsic:llvm.ctpop.i32",
    "llvm.call_intrinsic:llvm.ctpop.i64",
)
def ctpop(op: Op, a: Tensor) -> Tensor:
    """Number of one bits."""
    if a.dtype == torch.bool:
        return a
    return count_ones(a).to(a.dtype)


def count_ones(a: Tensor) -> Tensor:
    """Number of one bits, as int64."""
    x = a if a.dtype == torch.int64 else unsigned(a)
    x = x - (shift_right_logical(x, 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return shift_right_logical(x * 0x0101010101010101, 56)


@lane_op("math.ctlz", "llvm.intr.ctlz")
def ctlz(op: Op, a: Tensor, _zero_is_poison: Tensor | None = None) -> Tensor:
    """Zero bits above the highest one; the width for 0."""
    if a.dtype == torch.bool:
        return ~a
    x = a if a.dtype == torch.int64 else unsigned(a)
    for step in (1, 2, 4, 8, 16, 32):
        x = x | shift_right_logical(x, step)
    return (BITS[a.dtype] - count_ones(x)).to(a.dtype)


@lane_op("math.cttz", "llvm.intr.cttz")
def cttz(op: Op, a: Tensor, _zero_is_poison: Tensor | None = None) -> Tensor:
    """Zero bits below the lowest one; the width for 0."""
    if a.dtype == torch.bool:
        return ~a
    below = (a & -a) - 1  # ones below the lowest one; for 0 all ones
    return ctpop(op, below)


@lane_op("llvm.intr.bitreverse", "llvm.call_intrinsic:llvm.bitreverse.i32")
def bitreverse(op: Op, a: Tensor) -> Tensor:
    bits = BITS[a.dtype]
    result = torch.zeros_like(a)
    for i in range(bits):
        result |= (shift_right_logical(a, i) & 1) << (bits - 1 - i)
    return result


@lane_op("llvm.intr.fshl", "llvm.call_intrinsic:llvm.fshl.i32")
def fshl(op: Op, high: Tensor, low: Tensor, amount: Tensor) -> Tensor:
    """The upper word of (high : low) shifted left by ``amount`` mod the width (up to 32)."""
    bits = BITS[high.dtype]
    wide = (high.to(torch.int64) << bits) | unsigned(low)
    return ((wide << (unsigned(amount) % bits)) >> bits).to(high.dtype)


@lane_op(
    "llvm.intr.fshr",
    "llvm.call_intrinsic:llvm.fshr.i32",
    "llvm.call_intrinsic:llvm.amdgcn.alignbit",
)
def fshr(op: Op, high: Tensor, low: Tensor, amount: Tensor) -> Tensor:
    """The lower word of (high : low) shifted right by ``amount`` modulo the width."""
    bits = BITS[high.dtype]
    wide = (high.to(torch.int64) << bits) | unsigned(low)
    return (wide >> (unsigned(amount) % bits)).to(high.dtype)


@lane_op(
    "llvm.intr.expect",
    "llvm.intr.expect.with.probability",
    "llvm.call_intrinsic:llvm.expect.i1",
    "llvm.call_intrinsic:llvm.expect.i32",
    "llvm.call_intrinsic:llvm.expect.i64",
)
def expect(op: Op, a: Tensor, _expected: Tensor) -> Tensor:
    """A hint to the compiler: the value itself."""
    return a


@lane_op("llvm.freeze", "llvm.intr.ssa.copy", "llvm.intr.arithmetic.fence")
def freeze(op: Op, a: Tensor) -> Tensor:
    return a


@lane_op("llvm.call_intrinsic:llvm.amdgcn.ubfe.i32")
def ubfe(op: Op, a: Tensor, offset: Tensor, width: Tensor) -> Tensor:
    """``width`` bits of ``a`` from bit ``offset``, zeros above (v_bfe_u32)."""
    field = (1 << (width & 31).to(torch.int64)) - 1
    return ((unsigned(a) >> (offset & 31).to(torch.int64)) & field).to(a.dtype)


@lane_op("llvm.call_intrinsic:llvm.amdgcn.sbfe.i32")
def sbfe(op: Op, a: Tensor, offset: Tensor, width: Tensor) -> Tensor:
    """``width`` bits of ``a`` from bit ``offset``, the sign repeated above (v_bfe_i32)."""
    size = (width & 31).to(torch.int64)
    low = (unsigned(a) >> (offset & 31).to(torch.int64)) & ((1 << size) - 1)
    sign = (1 << size) >> 1
    return ((low ^ sign) - sign).to(a.dtype)


__all__ = ["count_ones", "fused", "with_intrinsics"]
