"""Arithmetic of the references: hardware functions, ordered sums, matrix products.

Formats and their codecs are ``m3lab.model.formats``; here every value is an fp32 tensor. The
hardware's ``exp2`` / ``rcp`` / ``rsq`` are modelled as correctly rounded (computed in fp64, rounded
once), which the part misses by an ulp at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from m3lab.model.formats import E4M3_MAX, dequantize_mxfp4, dequantize_mxfp8, e4m3_decode
from m3lab.model.shapes import MX_BLOCK

INV_E4M3_MAX = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
LOG2E = torch.tensor(math.log2(math.e), dtype=torch.float32)


def f32(value: float) -> Tensor:
    """``value`` rounded to fp32, as a 0-dim tensor (so that arithmetic with it stays fp32)."""
    return torch.tensor(value, dtype=torch.float32)


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


def e4m3_values(w: Tensor) -> Tensor:
    """E4M3 bytes decoded; a floating tensor is taken as decoded already (decode a weight once)."""
    return e4m3_decode(w) if w.dtype == torch.uint8 else w.float()


def matmul_t(x: Tensor, w: Tensor) -> Tensor:
    """fp32 ``x [..., K] @ w [N, K]^T``: narrow formats' products are exact, the order is BLAS's."""
    return torch.matmul(x, w.t())


def mx_values(codes: Tensor, scales: Tensor | None) -> Tensor:
    """fp32 [..., K] of an MX table: MXFP4 (K/2 bytes a row) or MXFP8 (K bytes a row) by its width.

    ``scales``: E8M0 [..., K/32], or None where ``codes`` is the decoded fp32 tensor itself.
    """
    if scales is None:
        return codes.float()
    if codes.shape[-1] == scales.shape[-1] * MX_BLOCK:
        return dequantize_mxfp8(codes, scales)
    return dequantize_mxfp4(codes, scales)


def sum_of_squares(x: Tensor, chain: int, warps: Sequence[int]) -> Tensor:
    """Sum of squares over the last dim in a kernel's order: [..., n] -> [...].

    A logical thread squares and adds ``chain`` consecutive elements with fma, in order; then
    threads meet in butterflies at ``warps`` offsets, group after group (a group's lanes are
    2 ** len(offsets)), until one value is left; missing lanes count zero.
    """
    parts = x.unflatten(-1, (-1, chain))
    total = torch.zeros(parts.shape[:-1])
    for e in range(chain):
        total = fma(parts[..., e], parts[..., e], total)
    lanes = 2 ** len(warps)
    while total.shape[-1] > 1:
        total = torch.nn.functional.pad(total, (0, -total.shape[-1] % lanes))
        total = butterfly_sum(total.unflatten(-1, (-1, lanes)), warps)
    return total[..., 0]
