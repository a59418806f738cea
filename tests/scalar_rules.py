"""What each operation gives, as plain scalar rules: the independent half of the tests.

Integers are Python ints, floats are Python floats worked out as Fractions and rounded once; lane
maps are written out lane by lane. Shared by the tests of single functions and of whole kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from lane_arithmetic import F32, Float, bare, nearest, signed

# ---------------------------------------------------------------------- integers and floats


def trunc_div(a: int, b: int, bits: int) -> int:
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def trunc_rem(a: int, b: int, bits: int) -> int:
    return a if b == 0 else a - b * trunc_div(a, b, bits)


def shift_left(a: int, b: int, bits: int) -> int:
    return a << b if 0 <= b < bits else 0


def shift_right(a: int, b: int, bits: int) -> int:
    return a >> b if 0 <= b < bits else (-1 if a < 0 else 0)


def shift_right_bare(a: int, b: int, bits: int) -> int:
    return bare(a, bits) >> b if 0 <= b < bits else 0


def div_bare(a: int, b: int, bits: int) -> int:
    return -1 if b == 0 else bare(a, bits) // bare(b, bits)


def rem_bare(a: int, b: int, bits: int) -> int:
    return a if b == 0 else bare(a, bits) % bare(b, bits)


INT_OPS: dict[str, Callable[[int, int, int], int]] = {
    "arith.addi": lambda a, b, n: a + b,
    "arith.subi": lambda a, b, n: a - b,
    "arith.muli": lambda a, b, n: a * b,
    "arith.andi": lambda a, b, n: a & b,
    "arith.ori": lambda a, b, n: a | b,
    "arith.xori": lambda a, b, n: a ^ b,
    "arith.divsi": trunc_div,
    "arith.remsi": trunc_rem,
    "arith.floordivsi": lambda a, b, n: a // b if b else -1,
    "arith.ceildivsi": lambda a, b, n: -(-a // b) if b else -1,
    "arith.divui": div_bare,
    "arith.remui": rem_bare,
    "arith.ceildivui": lambda a, b, n: -(-bare(a, n) // bare(b, n)) if b else -1,
    "arith.shli": shift_left,
    "arith.shrsi": shift_right,
    "arith.shrui": shift_right_bare,
    "arith.maxsi": lambda a, b, n: max(a, b),
    "arith.minsi": lambda a, b, n: min(a, b),
    "arith.maxui": lambda a, b, n: max(bare(a, n), bare(b, n)),
    "arith.minui": lambda a, b, n: min(bare(a, n), bare(b, n)),
}


COMPARE: list[Callable[[int, int], bool]] = [
    lambda a, b: a == b,
    lambda a, b: a != b,
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
]


def add(a: float, b: float, form: Float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a + b
    both_negative = math.copysign(1, a) < 0 and math.copysign(1, b) < 0
    return nearest(Fraction(a) + Fraction(b), form, negative_zero=both_negative)


def sign_differs(a: float, b: float) -> bool:
    return (math.copysign(1, a) < 0) != (math.copysign(1, b) < 0)


def signed_zero(value: float, a: float, b: float) -> float:
    return math.copysign(value, -1 if sign_differs(a, b) else 1) if value == 0 else value


def multiply(a: float, b: float, form: Float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return signed_zero(nearest(Fraction(a) * Fraction(b), form), a, b)


def divide(a: float, b: float, form: Float) -> float:
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    sign = -1.0 if sign_differs(a, b) else 1.0
    if b == 0 or math.isinf(a):
        return math.copysign(math.inf, sign)
    if math.isinf(b):
        return math.copysign(0.0, sign)
    return signed_zero(nearest(Fraction(a) / Fraction(b), form), a, b)


def larger(a: float, b: float) -> float:
    if a == b == 0:
        return a if math.copysign(1, a) > 0 else b
    return max(a, b)


def smaller(a: float, b: float) -> float:
    return -larger(-a, -b)


def either_nan(rule: Callable[[float, float], float]) -> Callable[[float, float, Float], float]:
    return lambda a, b, _: math.nan if math.isnan(a) or math.isnan(b) else rule(a, b)


def not_nan(rule: Callable[[float, float], float]) -> Callable[[float, float, Float], float]:
    return lambda a, b, _: b if math.isnan(a) else a if math.isnan(b) else rule(a, b)


def remainder(a: float, b: float, form: Float) -> float:
    if math.isnan(a) or math.isnan(b) or math.isinf(a) or b == 0:
        return math.nan
    return math.fmod(a, b)


FLOAT_OPS: dict[str, Callable[[float, float, Float], float]] = {
    "arith.addf": add,
    "arith.subf": lambda a, b, form: add(a, -b, form),
    "arith.mulf": multiply,
    "arith.divf": divide,
    "arith.remf": remainder,
    "arith.maximumf": either_nan(larger),
    "arith.minimumf": either_nan(smaller),
    "arith.maxnumf": not_nan(larger),
    "arith.minnumf": not_nan(smaller),
}


FLOAT_COMPARE = [
    ("false", lambda a, b: False, False),
    ("oeq", lambda a, b: a == b, False),
    ("ogt", lambda a, b: a > b, False),
    ("oge", lambda a, b: a >= b, False),
    ("olt", lambda a, b: a < b, False),
    ("ole", lambda a, b: a <= b, False),
    ("one", lambda a, b: a != b, False),
    ("ord", lambda a, b: True, False),
    ("ueq", lambda a, b: a == b, True),
    ("ugt", lambda a, b: a > b, True),
    ("uge", lambda a, b: a >= b, True),
    ("ult", lambda a, b: a < b, True),
    ("ule", lambda a, b: a <= b, True),
    ("une", lambda a, b: a != b, True),
    ("uno", lambda a, b: False, True),
    ("true", lambda a, b: True, True),
]


# ---------------------------------------------------------------------- functions


def exact_fma(a: float, b: float, c: float, form: Float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c if math.isinf(a) or math.isinf(b) or math.isnan(a * b) else a * 0 + c
    product, negative = Fraction(a) * Fraction(b), (math.copysign(1, a) * math.copysign(1, b)) < 0
    total = product + Fraction(c)
    if total == 0:
        # an exact zero is negative only where both terms are
        return -0.0 if negative and math.copysign(1, c) < 0 and product == 0 == c else 0.0
    value = nearest(total, form)
    return math.copysign(value, total) if value == 0 else value


def exact_rcp(x: float, form: Float = F32) -> float:
    if math.isnan(x):
        return x
    if x == 0:
        return math.copysign(math.inf, x)
    if math.isinf(x):
        return math.copysign(0.0, x)
    return nearest(1 / Fraction(x), form)


def nearest_root(square: Fraction, form: Float = F32) -> float:
    """The square root of a positive rational to nearest even, by integer square root."""
    shift = 2 * max(0, 200 - (square.numerator.bit_length() - square.denominator.bit_length()) // 2)
    root = Fraction(math.isqrt((square.numerator << shift) // square.denominator), 1 << shift // 2)
    exact = root * root == square
    return nearest(root if exact else root + Fraction(1, 1 << (shift // 2 + 2)), form)


def exact_sqrt(x: float) -> float:
    if math.isnan(x) or x < 0:
        return math.nan
    return x if x == 0 or math.isinf(x) else nearest_root(Fraction(x))


def exact_rsqrt(x: float) -> float:
    if math.isnan(x) or x < 0:
        return math.nan
    if x == 0:
        return math.copysign(math.inf, x)
    return 0.0 if math.isinf(x) else nearest_root(1 / Fraction(x))


def exact_exp2(x: float) -> float:
    if math.isnan(x):
        return x
    if x >= 128:
        return math.inf
    if x < -160:
        return 0.0
    with localcontext() as ctx:
        ctx.prec = 60
        whole = math.floor(x)
        part = (Decimal(x) - whole) * Decimal(2).ln()
        return nearest(Fraction(part.exp()) * Fraction(2) ** whole, F32)


def exact_log2(x: float) -> float:
    if math.isnan(x) or x < 0:
        return math.nan
    if x == 0:
        return -math.inf
    if math.isinf(x):
        return x
    with localcontext() as ctx:
        ctx.prec = 60
        mantissa, exponent = math.frexp(x)
        return nearest(Fraction(Decimal(mantissa).ln() / Decimal(2).ln()) + exponent, F32)


# ---------------------------------------------------------------------- small floats and bytes


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The value of a code without sign bit, no specials."""
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


E4M3 = [small_float(c, 4, 3, 7) for c in range(0x7F)]  # 0x7F is NaN


E5M2 = [small_float(c, 5, 2, 15) for c in range(0x7C)]  # 0x7C is infinite, above it NaN


E2M1 = [small_float(c, 2, 1, 1) for c in range(8)]


def nearest_code(x: Fraction, values: list[Fraction], step_past: Fraction) -> int:
    """The code nearest |x|, ties to even; one past the last where it rounds beyond the last."""
    size = abs(x)
    extended = [*values, values[-1] + step_past]
    below = max(i for i, v in enumerate(extended) if v <= size)
    if below == len(values):
        return below
    low, high = extended[below], extended[below + 1]
    if size - low != high - size:
        return below if size - low < high - size else below + 1
    return below if below % 2 == 0 else below + 1


def e4m3(x: float) -> int:
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    if not math.isfinite(x):
        return sign | 0x7F
    return sign | min(nearest_code(Fraction(x), E4M3, Fraction(32)), 0x7F)


def e5m2(x: float) -> int:
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return sign | 0x7F
    if math.isinf(x):
        return sign | 0x7C
    return sign | min(nearest_code(Fraction(x), E5M2, Fraction(8192)), 0x7C)


def e2m1(x: float) -> int:
    sign = 8 if math.copysign(1, x) < 0 else 0
    if not math.isfinite(x):
        return sign | 7
    return sign | min(nearest_code(Fraction(x), E2M1, Fraction(10**40)), 7)


def value_e4m3(code: int) -> float:
    size = math.nan if code & 0x7F == 0x7F else float(E4M3[code & 0x7F])
    return -size if code >> 7 else size


def value_e5m2(code: int) -> float:
    low = code & 0x7F
    size = float(E5M2[low]) if low < 0x7C else math.inf if low == 0x7C else math.nan
    return -size if code >> 7 else size


def value_e2m1(code: int) -> float:
    return -float(E2M1[code & 7]) if code & 8 else float(E2M1[code & 7])


ENCODE = {"fp8": e4m3, "bf8": e5m2}


DECODE = {"fp8": value_e4m3, "bf8": value_e5m2}


def permute_bytes(high: int, low: int, select: int) -> int:
    source = [(bare(low, 32) >> 8 * i) & 0xFF for i in range(4)]
    source += [(bare(high, 32) >> 8 * i) & 0xFF for i in range(4)]
    out = 0
    for i in range(4):
        pick = (bare(select, 32) >> 8 * i) & 0xFF
        if pick < 8:
            byte = source[pick]
        elif pick < 12:
            byte = 0xFF if source[2 * (pick - 8) + 1] & 0x80 else 0
        else:
            byte = 0 if pick == 12 else 0xFF
        out |= byte << 8 * i
    return signed(out, 32)


# ---------------------------------------------------------------------- lane maps


def row_of(lane: int) -> int:
    return lane & ~15


DPP: list[tuple[int, Callable[[int], int | None]]] = [
    (0b00_01_10_11, lambda n: n & ~3 | 3 - (n & 3)),
    (0xB1, lambda n: n ^ 1),  # quad_perm [1, 0, 3, 2]
    (0x4E, lambda n: n ^ 2),  # quad_perm [2, 3, 0, 1]
    (0x00, lambda n: n & ~3),
    (0x101, lambda n: n + 1 if n % 16 + 1 < 16 else None),
    (0x10F, lambda n: n + 15 if n % 16 == 0 else None),
    (0x111, lambda n: n - 1 if n % 16 >= 1 else None),
    (0x118, lambda n: n - 8 if n % 16 >= 8 else None),
    (0x121, lambda n: row_of(n) | (n % 16 - 1) % 16),
    (0x124, lambda n: row_of(n) | (n % 16 - 4) % 16),
    (0x128, lambda n: row_of(n) | (n % 16 - 8) % 16),
    (0x130, lambda n: n + 1 if n < 63 else None),
    (0x134, lambda n: (n + 1) % 64),
    (0x138, lambda n: n - 1 if n > 0 else None),
    (0x13C, lambda n: (n - 1) % 64),
    (0x140, lambda n: row_of(n) | 15 - n % 16),
    (0x141, lambda n: n & ~7 | 7 - n % 8),
    (0x142, lambda n: row_of(n) - 1 if n >= 16 else None),
    (0x143, lambda n: 31 if n >= 32 else None),
    (0x150, row_of),
    (0x15B, lambda n: row_of(n) | 11),
]
