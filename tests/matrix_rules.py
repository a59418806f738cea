"""Layouts and sums of the matrix instructions, written out in plain Python from the specification.

Small integers (and powers of two as scales) make every partial sum exact, so that results must be
equal whatever the order of summation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lane_arithmetic import signed

LANES = 64
Lane = list[list[float]]  # [lane][element]


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def e4m3(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else minifloat(code, 4, 3)


def e5m2(code: int) -> float:
    if code & 0x7F >= 0x7C:
        return math.nan if code & 3 else math.copysign(math.inf, 0x7F - code)
    return minifloat(code, 5, 2)


@dataclass
class Codec:
    """An element format: bits, value of a code, and the codes of small whole numbers."""

    bits: int
    value: Callable[[int], float]

    def whole(self) -> list[int]:
        """Codes whose values are -4..4."""
        return [c for c in range(1 << self.bits) if self.value(c) in range(-4, 5)]


E4M3, E5M2 = Codec(8, e4m3), Codec(8, e5m2)


E2M3, E3M2 = Codec(6, lambda c: minifloat(c, 2, 3)), Codec(6, lambda c: minifloat(c, 3, 2))


E2M1 = Codec(4, lambda c: minifloat(c, 2, 1))


INT8 = Codec(8, lambda c: float(signed(c, 8)))


CODECS = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2, "fp4_e2m1": E2M1}


def packed(codes: list[int], bits: int) -> bytes:
    """Codes one after the other, the first in the lowest bits."""
    number = sum(c << (bits * i) for i, c in enumerate(codes))
    return number.to_bytes(len(codes) * bits // 8, "little")


def accumulator_place(lane: int, element: int, rows: int) -> tuple[int, int]:
    """(row, column) of an accumulator element."""
    g, r = lane // rows, lane % rows
    if rows == 16:
        return 4 * g + element, r
    return 8 * (element // 4) + 4 * g + element % 4, r


def multiply(
    a: dict[tuple[int, int], float], b: dict[tuple[int, int], float], c: Lane, rows: int, depth: int
) -> list[float]:
    """Accumulators in lane order; a, b: (row or column, k) -> value."""
    out = []
    for lane in range(LANES):
        for element in range(len(c[lane])):
            i, j = accumulator_place(lane, element, rows)
            terms = [a[i, k] * b[j, k] for k in range(depth)]
            out.append(math.fsum([c[lane][element], *terms]))
    return out


def scaled_place(lane: int, i: int, bits: int, rows: int) -> tuple[int, int]:
    """(row or column, k) of a lane's element i."""
    g, r = lane // rows, lane % rows
    if bits < 8:
        return r, 32 * g + i
    half = 32 * (LANES // rows) // 2
    return r, (i // 16) * half + 16 * g + i % 16


def tensor_of(lanes: list[bytes], dtype: torch.dtype, n: int) -> torch.Tensor:
    """Bytes of each lane as a [1, 1, 64(, n)] value."""
    flat = torch.frombuffer(bytearray(b"".join(lanes)), dtype=dtype)
    flat = flat.to(torch.get_default_device(), copy=True)
    return flat.reshape(1, 1, LANES, n) if n else flat.reshape(1, 1, LANES)


def scaled_side(
    rng: random.Random, name: str, rows: int, whole: bool, extra: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[tuple[int, int], float]]:
    """(operand, scale dwords with the byte in use at 2, (row, k) -> scaled value)."""
    codec = CODECS[name]
    choices = codec.whole() if whole else [
        c for c in range(1 << codec.bits) if math.isfinite(codec.value(c))
    ]  # fmt: skip
    codes = [[rng.choice(choices) for _ in range(32)] for _ in range(LANES)]
    exponents = [rng.randrange(124, 131) for _ in range(LANES)]
    raw = [packed(c, codec.bits) + b"\xee" * extra for c in codes]
    operand = tensor_of(raw, torch.int32, len(raw[0]) // 4)
    scales = tensor_of([bytes((1, 255, e, 0)) for e in exponents], torch.int32, 0)
    matrix = {}
    for lane in range(LANES):
        for i, code in enumerate(codes[lane]):
            r, k = scaled_place(lane, i, codec.bits, rows)
            matrix[r, k] = codec.value(code) * 2.0 ** (exponents[rows * (k // 32) + r] - 127)
    return operand, scales, matrix


def small_accumulators(rng: random.Random, rows: int) -> Lane:
    return [
        [float(rng.randrange(-50, 50)) for _ in range(rows * rows // LANES)] for _ in range(LANES)
    ]


def as_accumulators(c: Lane, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(c).to(dtype).reshape(1, 1, LANES, -1)


PLAIN = [
    ("f32.16x16x32.fp8.fp8", 16, 8, E4M3, E4M3, torch.int64, 0),
    ("f32.16x16x32.fp8.bf8", 16, 8, E4M3, E5M2, torch.int64, 0),
    ("f32.16x16x32.bf8.fp8", 16, 8, E5M2, E4M3, torch.int64, 0),
    ("f32.16x16x32.bf8.bf8", 16, 8, E5M2, E5M2, torch.int64, 0),
    ("f32.32x32x16.fp8.fp8", 32, 8, E4M3, E4M3, torch.int64, 0),
    ("f32.32x32x16.bf8.fp8", 32, 8, E5M2, E4M3, torch.int64, 0),
    ("i32.16x16x32.i8", 16, 8, INT8, INT8, torch.int64, 0),
    ("i32.16x16x64.i8", 16, 16, INT8, INT8, torch.int32, 4),
    ("i32.32x32x16.i8", 32, 8, INT8, INT8, torch.int64, 0),
    ("i32.32x32x32.i8", 32, 16, INT8, INT8, torch.int32, 4),
]


HALF = [
    ("f32.16x16x32.bf16", 16, 8, torch.bfloat16),
    ("f32.16x16x32.f16", 16, 8, torch.float16),
    ("f32.16x16x16bf16.1k", 16, 4, torch.bfloat16),
    ("f32.16x16x16f16", 16, 4, torch.float16),
    ("f32.32x32x16.bf16", 32, 8, torch.bfloat16),
    ("f32.32x32x16.f16", 32, 8, torch.float16),
    ("f32.32x32x8bf16.1k", 32, 4, torch.bfloat16),
    ("f32.32x32x8f16", 32, 4, torch.float16),
]
