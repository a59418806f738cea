"""K1: input norm, the fused projection, the heads, what enters the caches, block scores.

All of it is the same on every rank but for which heads a rank holds, so these functions take any
number of heads. Numerics and reduction orders: ``k1.md``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from m3lab.model.formats import bf16_round, e4m3_decode, e4m3_encode, quantize_rows
from m3lab.reference.numerics import e4m3_values, f32, fma, matmul_t, rsq, sum_of_squares
from m3lab.reference.selection import SPARSE_BLOCK

WARP_OFFSETS = (16, 8, 4, 2, 1)
NORM_CHAIN = 8  # consecutive elements of a logical thread of the input norm
HEAD_CHAIN = 4  # dims of a head a lane holds
SCORE_CHUNK = 256  # blocks decoded at a time


class NormedInput(NamedTuple):
    """Residual out (bf16 values) and the normed row as E4M3 bytes with its fp32 scale."""

    h: Tensor
    x8: Tensor
    scale: Tensor


def input_norm(ar: Tensor, res: Tensor, g_in: Tensor, eps: float) -> NormedInput:
    """``ar``, ``res``: bf16 [..., hidden]; the norm reads their unrounded fp32 sum."""
    acc = ar.float() + res.float()
    total = sum_of_squares(acc, NORM_CHAIN, WARP_OFFSETS)
    rstd = rsq(total / acc.shape[-1] + f32(eps))
    x8, scale = quantize_rows((acc * rstd[..., None]) * (g_in.float() + 1.0))
    return NormedInput(bf16_round(acc), x8, scale)


def project(x8: Tensor, x_scale: Tensor, w: Tensor, s_w: Tensor) -> Tensor:
    """bf16 values [..., rows] of an FP8 projection: (sum * x_scale) * w_scale.

    ``w``: E4M3 bytes [rows, hidden], or decoded; ``s_w``: fp32 [rows].
    """
    total = matmul_t(e4m3_decode(x8), e4m3_values(w))
    return bf16_round((total * x_scale[..., None]) * s_w)


def rope_angles(positions: Tensor, theta: float, rope_dim: int) -> Tensor:
    """fp32 [..., rope_dim / 2] angles, rounded as the model's own fp32 computation rounds them."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    return positions[..., None].float() * (1.0 / theta**exponent)


def rope_table(positions: Tensor, theta: float, rope_dim: int) -> Tensor:
    """bf16 [..., rope_dim]: a position's cosines, then its sines (the ``cos_sin`` rows)."""
    angles = rope_angles(positions, theta, rope_dim)
    return torch.cat([angles.cos(), angles.sin()], -1).bfloat16()


def norm_rope(x: Tensor, g: Tensor, cos_sin: Tensor, eps: float) -> Tensor:
    """QK norm and RoPE of heads ``x`` [tokens, heads, 128] (bf16 values), fp32 out, not rounded.

    ``g``: bf16 [128]; ``cos_sin``: bf16 [tokens, rope_dim].
    """
    total = sum_of_squares(x.float(), HEAD_CHAIN, WARP_OFFSETS)
    rstd = rsq(total / x.shape[-1] + f32(eps))
    y = (x.float() * rstd[..., None]) * (g.float() + 1.0)
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.float()[:, None].split(half, dim=-1)
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    return torch.cat([fma(a, cos, -(b * sin)), fma(b, cos, a * sin), rest], -1)


class CacheEntry(NamedTuple):
    """E4M3 bytes [..., 128] and the fp32 scale [...] they are stored with."""

    bytes: Tensor
    scale: Tensor


def cache_entry(x: Tensor, static_scale: float | None) -> CacheEntry:
    """K or V heads (bf16 values [..., 128]) as the cache stores them.

    Per token and head: scale = amax / 448, 1.0 for a zero head. Static: the cache's one scale, the
    quotient clamped to +-448.
    """
    if static_scale is None:
        return CacheEntry(*quantize_rows(x))
    scale = f32(static_scale)
    return CacheEntry(e4m3_encode(x / scale, saturate=True), scale.expand(x.shape[:-1]))


def index_key_entry(ik: Tensor) -> Tensor:
    """Index keys (fp32 [..., 128]) as E4M3 bytes of unit scale: bf16, clamped to +-448."""
    return e4m3_encode(bf16_round(ik), saturate=True)


def score_scale(sm_scale: float) -> Tensor:
    """fp32(fp32(sm_scale) * fp32(log2 e))."""
    return f32(sm_scale) * f32(math.log2(math.e))


def block_scores(iq: Tensor, index_keys: Tensor, n_keys: int, sm_scale: float) -> Tensor:
    """fp32 [blocks]: a block's best causal key against one index query head.

    ``iq``: bf16 values [128]; ``index_keys``: E4M3 bytes [blocks, 128 keys, 128]; keys from
    ``n_keys`` on are not causal; -inf where none is. Pinned blocks get their plain score too, which
    no kernel computes or reads.
    """
    best = [(e4m3_decode(chunk) @ iq.float()).flatten() for chunk in index_keys.split(SCORE_CHUNK)]
    dots = torch.cat(best)
    dots[n_keys:] = -torch.inf
    return dots.view(-1, SPARSE_BLOCK).amax(-1) * score_scale(sm_scale)
