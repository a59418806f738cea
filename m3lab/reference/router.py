"""Post-attention norm, router scores and the choice of experts.

Routing keys and the choice are integers and follow the kernel's rules exactly; only the logit,
rounded to bf16, can differ from the kernel's by a rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from m3lab.model.formats import bf16_round
from m3lab.reference.numerics import LOG2E, butterfly_sum, exp2, f32, fma, rcp, rsq

THREADS = 512
WAVE = 64
WAVE_OFFSETS = (32, 16, 8, 4, 2, 1)
WEIGHT_FLOOR = 1e-20


class RouterScores(NamedTuple):
    """Per expert: the int32 routing key and the fp32 sigmoid without bias, both [..., experts]."""

    key: Tensor
    sigmoid: Tensor


class Route(NamedTuple):
    """Slots 0 .. top_k - 1 routed, best first, then the shared expert: [..., top_k + 1]."""

    experts: Tensor  # int64; the shared expert is number ``experts``
    weights: Tensor  # fp32


def _row_sum_of_squares(v: Tensor) -> Tensor:
    """The router task's order: a thread's fma chain, the wave's butterfly, the waves in turn."""
    parts = v.unflatten(-1, (THREADS, -1))
    total = torch.zeros(parts.shape[:-1])
    for e in range(parts.shape[-1]):
        total = fma(parts[..., e], parts[..., e], total)
    waves = butterfly_sum(total.unflatten(-1, (-1, WAVE)), WAVE_OFFSETS)
    out = waves[..., 0]
    for w in range(1, waves.shape[-1]):
        out = out + waves[..., w]
    return out


def post_norm(a: Tensor, h_in: Tensor, g_post: Tensor, eps: float) -> Tensor:
    """xn, bf16 values [..., hidden]: the norm of ``a`` + ``h_in``, their sum left unrounded.

    ``a``: the all-reduced bf16 row; ``h_in``: bf16 residual; ``g_post``: bf16 [hidden].
    """
    v = a.float() + h_in.float()
    rstd = rsq(_row_sum_of_squares(v) / v.shape[-1] + f32(eps))
    return bf16_round((v * rstd[..., None]) * (g_post.float() + 1.0))


def routing_key(score: Tensor, expert: Tensor) -> Tensor:
    """int32: ``score``'s signed-orderable bits, the low 7 replaced by 127 - ``expert``."""
    bits = score.contiguous().view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits & -128) | (127 - expert).int()


def router_logits(xn: Tensor, w_gate: Tensor) -> Tensor:
    """bf16 values [..., experts]; fp64 sums, so that a kernel's order errs around their middle."""
    return bf16_round((xn.double() @ w_gate.double().t()).float())


def router_scores(xn: Tensor, w_gate: Tensor, bias: Tensor) -> RouterScores:
    """``xn``: bf16 values [..., hidden]; ``w_gate``: bf16 [experts, hidden]; ``bias``: fp32."""
    logit = router_logits(xn, w_gate)
    sigmoid = rcp(1.0 + exp2(-logit * LOG2E))
    expert = torch.arange(w_gate.shape[0])
    return RouterScores(routing_key(sigmoid + bias.float(), expert), sigmoid)


def route(
    key: Tensor, sigmoid: Tensor, route_scale: float, shared_weight: float, top_k: int = 4
) -> Route:
    """The ``top_k`` largest keys, their sigmoids normalized and scaled; the shared expert last."""
    best = key.long().topk(top_k, dim=-1).values  # keys are distinct: the expert is in them
    experts = 127 - (best & 127)
    chosen = sigmoid.gather(-1, experts)
    total = butterfly_sum(chosen, (1, 2))
    factor = f32(route_scale) / torch.maximum(total, f32(WEIGHT_FLOOR))
    shared = torch.full_like(experts[..., :1], key.shape[-1])
    last = torch.full_like(chosen[..., :1], shared_weight)
    weights = torch.cat([chosen * factor[..., None], last], -1)
    return Route(torch.cat([experts, shared], -1), weights)
