"""Number steps both references share: roundings, hardware functions, matrix products.

Every value is an fp32 tensor, whatever format it is rounded to; bytes are ``torch.uint8``. The
hardware's ``exp2`` / ``rcp`` / ``rsq`` are modelled as correctly rounded (computed in fp64, rounded
once), which the part misses by an ulp at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FP8_MAX = 448.0
# Past the midpoint of 448 and the absent 480 a value rounds to NaN; the midpoint itself is a tie
# that goes to 448, whose mantissa is even.
FP8_LAST_FINITE = 464.0
INV_FP8_MAX = torch.tensor(1.0 / FP8_MAX, dtype=torch.float32)
LOG2E = torch.tensor(math.log2(math.e), dtype=torch.float32)


def f32(value: float) -> Tensor:
    """``value`` rounded to fp32, as a 0-dim tensor (so that arithmetic with it stays fp32)."""
    return torch.tensor(value, dtype=torch.float32)


def bf16_round(x: Tensor) -> Tensor:
    """fp32 -> nearest-even bf16, returned as fp32."""
    return x.to(torch.bfloat16).to(torch.float32)


def exp2(x: Tensor) -> Tensor:
    return torch.exp2(x.double()).float()


def rcp(x: Tensor) -> Tensor:
    return (1.0 / x.double()).float()


def rsq(x: Tensor) -> Tensor:
    return (1.0 / torch.sqrt(x.double())).float()


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 ``a * b + c`` rounded once.

    The product is exact in fp64. The sum is brought to fp64 by rounding to odd (the last bit is set
    where anything was lost), so that the final rounding to fp32 is that of the exact value.
    """
    product, addend = a.double() * b.double(), c.double()
    product, addend = torch.broadcast_tensors(product, addend)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)  # Knuth's two-sum: exact
    bits = total.contiguous().view(torch.int64)
    towards_zero = (lost > 0) != (total > 0)
    odd = torch.where(towards_zero, bits - 1, bits | 1)
    inexact = (lost != 0) & torch.isfinite(total) & ((bits & 1) == 0)
    return torch.where(inexact, odd, bits).view(torch.float64).float()


def butterfly_sum(x: Tensor, offsets: Sequence[int]) -> Tensor:
    """Sum over the last dim in the order of xor exchanges at ``offsets``; every lane ends equal.

    ``x``: [..., lanes], lanes = the product of 2 over the offsets. Returns [...] (lane 0's sum).
    """
    lane = torch.arange(x.shape[-1])
    for offset in offsets:
        x = x + x[..., lane ^ offset]
    return x[..., 0]


def e4m3_encode(x: Tensor) -> Tensor:
    """fp32 -> E4M3 bytes, nearest even; what rounds past 448 becomes NaN, as on gfx950."""
    byte = x.to(torch.float8_e4m3fn).view(torch.uint8)
    sign = (torch.signbit(x).to(torch.uint8) << 7).to(torch.uint8)
    past = ~(x.abs() <= FP8_LAST_FINITE)
    return torch.where(past, sign | 0x7F, byte)


def e4m3_decode(byte: Tensor) -> Tensor:
    return byte.contiguous().view(torch.float8_e4m3fn).float()


def e4m3_values(w: Tensor) -> Tensor:
    """E4M3 bytes decoded; a floating tensor is taken as decoded already (decode a weight once)."""
    return e4m3_decode(w) if w.dtype == torch.uint8 else w.float()


def matmul_t(x: Tensor, w: Tensor) -> Tensor:
    """fp32 ``x [..., K] @ w [N, K]^T``: narrow formats' products are exact, the order is BLAS's."""
    return torch.matmul(x, w.t())
