"""The expert GEMVs of one rank: up / gate, SwiGLU-OAI, down, the route-weighted partial row.

Narrow and wide forms of the kernel share these numerics: the mid row is rounded to bf16 and then
to MXFP8 in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from m3lab.model.formats import bf16_round, dequantize_mxfp8, quantize_mxfp8
from m3lab.reference.numerics import exp2, f32, matmul_t, mx_values, rcp
from m3lab.reference.router import Route

ExpertTable = tuple[Tensor, Tensor | None]  # codes and E8M0 scales, or (decoded fp32, None)


def swiglu(gate: Tensor, up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """(min(g, limit) * sigmoid(alpha min(g, limit))) * (clamp(u, +-limit) + 1), all fp32."""
    g = torch.minimum(gate, f32(limit))
    sigmoid = rcp(1.0 + exp2(g * f32(-alpha * math.log2(math.e))))
    return (g * sigmoid) * (up.clamp(-limit, limit) + 1.0)


def expert_mid(x: Tensor, w13: ExpertTable, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """bf16 values [..., inter] of one expert's rank shard.

    ``x``: the dequantized MXFP8 row, fp32 [..., hidden] (products with it are exact); ``w13``:
    [2 * inter, hidden], gate rows then up rows.
    """
    gate, up = matmul_t(x, mx_values(*w13)).chunk(2, dim=-1)
    return bf16_round(swiglu(gate, up, limit, alpha))


def expert_down(mid: Tensor, w2: ExpertTable) -> Tensor:
    """fp32 [..., hidden] of bf16 ``mid`` [..., inter], which is quantized to MXFP8 first."""
    return matmul_t(dequantize_mxfp8(*quantize_mxfp8(mid)), mx_values(*w2))


def expert_intermediates(
    x8: Tensor,
    xsc: Tensor,
    experts: Tensor,
    w13: Callable[[int], ExpertTable],
    limit: float = 7.0,
    alpha: float = 1.702,
) -> Tensor:
    """bf16 values [tokens, slots, inter]: every (token, slot)'s activated intermediate.

    ``x8``, ``xsc``: MXFP8 of xn [tokens, hidden]; ``experts``: [tokens, slots]; ``w13(e)``: the
    rank's table of expert e, asked for once per distinct expert. Every token goes through every
    distinct expert, chosen or not: a row's bits then cannot depend on what the others chose.
    """
    x = dequantize_mxfp8(x8, xsc)
    intermediates = torch.zeros(())
    for e in experts.unique().tolist():
        mid = expert_mid(x, w13(e), limit, alpha)
        intermediates = torch.where((experts == e)[..., None], mid[:, None], intermediates)
    return intermediates


def expert_partial(intermediates: Tensor, route: Route, w2: Callable[[int], ExpertTable]) -> Tensor:
    """One rank's partial MLP rows, bf16 values [tokens, hidden].

    ``intermediates``: bf16 values [tokens, slots, inter]; ``w2(e)``: the rank's [hidden, inter] of
    expert e. Slots are added in slot order, each down row times its route weight in fp32.
    """
    token = torch.arange(len(intermediates))
    down = torch.zeros(())
    for e in route.experts.unique().tolist():
        chosen = route.experts == e
        slot = chosen.int().argmax(-1)  # a token has an expert once; slot 0 where it has not
        rows = expert_down(intermediates[token, slot], w2(e))
        down = torch.where(chosen[..., None], rows[:, None], down)
    total = torch.zeros_like(down[:, 0])
    for s in range(down.shape[1]):
        total = total + down[:, s] * route.weights[:, s, None]
    return bf16_round(total)
