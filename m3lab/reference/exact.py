"""The exact reference: the layer in fp32 (or fp64) over dequantized weights and caches.

No activation is quantized or rounded, no sum is sharded; the new tokens' keys enter the attention
as they are. It agrees with transformers' ``MiniMaxM3VLDecoderLayer`` on the same dequantized
weights to fp32 rounding, and says how far the kernel's number formats move a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from m3lab.model.formats import dequantize_mxfp4, dequantize_ptpc, e4m3_decode
from m3lab.model.shapes import ModelShape
from m3lab.model.weights import LayerWeights
from m3lab.reference.context import Context, Row, gather, overlaid, step_rows
from m3lab.reference.pre_attn import SCORE_CHUNK, rope_angles, score_scale
from m3lab.reference.selection import SPARSE_BLOCK, select
from m3lab.reference.shard import routed_tables


class ExactContext(Protocol):
    """A request's keys as numbers: block b's 128 keys, [128, kv heads, 128] or [128, 128]."""

    @property
    def length(self) -> int: ...
    def keys(self, block: int) -> Tensor: ...
    def values(self, block: int) -> Tensor: ...
    def index_keys(self, block: int) -> Tensor: ...


@dataclass(frozen=True)
class Dequantized:
    """The numbers a quantized context stands for. ``static``: a static-scale cache's two scales."""

    base: Context
    static: tuple[float, float] | None = None

    @property
    def length(self) -> int:
        return self.base.length

    def keys(self, block: int) -> Tensor:
        scale = self.static[0] if self.static else self.base.k_scale(block)[..., None]
        return e4m3_decode(self.base.k(block)) * scale

    def values(self, block: int) -> Tensor:
        scale = self.static[1] if self.static else self.base.v_scale(block)[..., None]
        return e4m3_decode(self.base.v(block)) * scale

    def index_keys(self, block: int) -> Tensor:
        return e4m3_decode(self.base.index_k(block))


@dataclass(frozen=True)
class _Extended:
    """A context whose last keys are this step's own, unquantized."""

    base: ExactContext
    new_k: Tensor
    new_v: Tensor
    new_ik: Tensor

    @property
    def length(self) -> int:
        return self.base.length

    def _block(self, old: Tensor, block: int, new: Tensor) -> Tensor:
        return overlaid(old.to(new.dtype), block, self.length - len(new), new)

    def keys(self, block: int) -> Tensor:
        return self._block(self.base.keys(block), block, self.new_k)

    def values(self, block: int) -> Tensor:
        return self._block(self.base.values(block), block, self.new_v)

    def index_keys(self, block: int) -> Tensor:
        return self._block(self.base.index_keys(block), block, self.new_ik)


@dataclass
class ExactHeads:
    """The unrounded residual sum and the heads made of it."""

    h: Tensor  # [S, hidden]
    q: Tensor  # [S, q heads, 128]
    k: Tensor  # [S, kv heads, 128]
    v: Tensor
    iq: Tensor  # [S, index heads, 128]
    ik: Tensor  # [S, 128]


@dataclass
class ExactAttention:
    blocks: list[list[Tensor]]  # [row][kv head]: selected block ids, the tail block last
    out: Tensor  # [S, q heads * 128], before the output projection
    a: Tensor  # [S, hidden]
    h_mid: Tensor  # [S, hidden]


@dataclass
class ExactMlp:
    xn: Tensor  # [S, hidden]
    experts: Tensor  # int64 [S, top_k], best first
    weights: Tensor  # [S, top_k]
    out: Tensor  # [S, hidden]


@dataclass
class ExactStep:
    heads: ExactHeads
    scores: list[Tensor]  # [row]: fp32 [index heads, blocks]
    attention: ExactAttention
    mlp: ExactMlp


def _norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """Gemma's RMSNorm in x's own precision."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + w.to(x.dtype))


def _rope(x: Tensor, angles: Tensor) -> Tensor:
    """NeoX halves over the first ``2 * angles.shape[-1]`` dims of heads [S, heads, 128]."""
    half = angles.shape[-1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def pre_attention(
    layer: LayerWeights,
    model: ModelShape,
    ar: Tensor,
    res: Tensor,
    positions: Tensor,
    dtype: torch.dtype = torch.float32,
) -> ExactHeads:
    """``ar``, ``res``: [S, hidden], any float dtype; ``positions``: int [S].

    The angles are the model's, rounded to fp32 at every step; ``dtype`` begins at their cosine.
    """
    h = ar.to(dtype) + res.to(dtype)
    x = _norm(h, layer.g_in, model.rms_eps)
    angles = rope_angles(positions, model.rope_theta, model.rope_dim).to(dtype)

    def heads(w: Tensor, s: Tensor) -> Tensor:
        return (x @ dequantize_ptpc(w, s).to(dtype).t()).unflatten(-1, (-1, model.head_dim))

    def rotated(w: Tensor, s: Tensor, g: Tensor) -> Tensor:
        return _rope(_norm(heads(w, s), g, model.rms_eps), angles)

    return ExactHeads(
        h,
        q=rotated(layer.w_q, layer.s_q, layer.g_q),
        k=rotated(layer.w_k, layer.s_k, layer.g_k),
        v=heads(layer.w_v, layer.s_v),
        iq=rotated(layer.w_iq, layer.s_iq, layer.g_iq),
        ik=rotated(layer.w_ik, layer.s_ik, layer.g_ik)[:, 0],
    )


def block_scores(iq: Tensor, row: Row, context: ExactContext, sm_scale: float) -> Tensor:
    """fp32 [index heads, blocks] of one row's ``iq`` [index heads, 128]."""
    best = []
    for first in range(0, row.blocks, SCORE_CHUNK):
        blocks = range(first, min(first + SCORE_CHUNK, row.blocks))
        keys = torch.cat([context.index_keys(b) for b in blocks]).to(iq.dtype)
        dots = iq @ keys.t()
        dots[:, max(0, row.keys - first * SPARSE_BLOCK) :] = -torch.inf
        best.append(dots.unflatten(-1, (-1, SPARSE_BLOCK)).amax(-1))
    return torch.cat(best, -1).float() * score_scale(sm_scale)


def _select(model: ModelShape, row: Row, scores: Tensor) -> list[Tensor]:
    """The blocks of every kv head of one row."""
    pinned = (model.init_blocks, model.local_blocks, model.topk_blocks)
    return [select(s, row.blocks, row.keys, *pinned).blocks for s in scores]


def _attend(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """Softmax attention of heads ``q`` [heads, 128] over keys [n, 128]."""
    return torch.softmax((q @ k.t()) * sm_scale, -1) @ v


def attention_half(
    layer: LayerWeights,
    model: ModelShape,
    q: Tensor,
    h: Tensor,
    rows: Sequence[Row],
    contexts: Sequence[ExactContext | None],
    blocks: Sequence[Sequence[Tensor]],
) -> ExactAttention:
    """Sparse attention to h_mid, all ranks' heads at once.

    ``q``: [S, q heads, 128]; ``h``: [S, hidden], same dtype; ``blocks``: per row and kv head, the
    tail block last. A padding row's attention is zero.
    """
    group = model.q_heads // model.kv_heads
    out = torch.zeros_like(q)
    for t, row in enumerate(rows):
        context = None if row.request is None else contexts[row.request]
        if context is None:
            continue
        tail_keys = row.keys - (row.blocks - 1) * SPARSE_BLOCK
        for kv in range(model.kv_heads):
            n_ctx = (len(blocks[t][kv]) - 1) * SPARSE_BLOCK + tail_keys
            k = gather(context.keys, blocks[t][kv], n_ctx)[:, kv].to(q.dtype)
            v = gather(context.values, blocks[t][kv], n_ctx)[:, kv].to(q.dtype)
            heads = slice(kv * group, (kv + 1) * group)
            out[t, heads] = _attend(q[t, heads], k, v, model.sm_scale)
    out = out.flatten(-2)
    a = out @ dequantize_ptpc(layer.w_o, layer.s_o).to(q.dtype).t()
    return ExactAttention([list(b) for b in blocks], out, a, a + h)


def _swiglu(gate: Tensor, up: Tensor, model: ModelShape) -> Tensor:
    g = gate.clamp(max=model.swiglu_limit)
    u = up.clamp(-model.swiglu_limit, model.swiglu_limit)
    return (u + 1.0) * g * torch.sigmoid(model.swiglu_alpha * g)


def _tables(layer: LayerWeights, e: int) -> tuple[Tensor, Tensor]:
    """fp32 w13 and w2 of entry ``e``; the shared expert's as the layer stores it."""
    if e == layer.shared_entry and layer.shared_w13 is not None:
        return layer.dequant("shared_w13"), layer.dequant("shared_w2")
    w13, s13, w2, s2 = routed_tables(layer, e)
    return dequantize_mxfp4(w13, s13), dequantize_mxfp4(w2, s2)


def expert_rows(model: ModelShape, w13: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    """An expert, or a rank's shard of one, over rows ``x`` [n, hidden].

    ``w13`` [2 * inter, hidden], gate rows then up rows, and ``w2`` [hidden, inter] as numbers.
    """
    gate, up = (x @ w13.t()).chunk(2, -1)
    return _swiglu(gate, up, model) @ w2.t()


def _expert(layer: LayerWeights, model: ModelShape, e: int, x: Tensor) -> Tensor:
    """Expert ``e`` of rows ``x`` [n, hidden]; ``model.experts`` is the shared one."""
    w13, w2 = (t.to(x.dtype) for t in _tables(layer, e))
    return expert_rows(model, w13, w2, x)


def choose_experts(scores: Tensor, bias: Tensor, model: ModelShape) -> tuple[Tensor, Tensor]:
    """Experts by score + bias (ties to the lower) and their normalized, scaled scores."""
    order = (scores + bias.to(scores.dtype)).argsort(dim=-1, descending=True, stable=True)
    experts = order[..., : model.top_k]
    chosen = scores.gather(-1, experts)
    return experts, chosen / chosen.sum(-1, keepdim=True) * model.route_scale


def route_rows(
    layer: LayerWeights, model: ModelShape, h_mid: Tensor, experts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(xn [S, hidden], experts [S, top_k], their weights) of the unrounded ``h_mid``.

    ``experts``: as ``mlp_half`` takes them.
    """
    xn = _norm(h_mid, layer.g_post, model.rms_eps)
    scores = torch.sigmoid(xn @ layer.w_gate.to(xn.dtype).t())
    if experts is None:
        return xn, *choose_experts(scores, layer.bias, model)
    picked = scores.gather(-1, experts)
    return xn, experts, picked / picked.sum(-1, keepdim=True) * model.route_scale


def mlp_half(
    layer: LayerWeights, model: ModelShape, h_mid: Tensor, experts: Tensor | None = None
) -> ExactMlp:
    """Post-attention norm to the layer's output, from the unrounded ``h_mid`` [S, hidden].

    ``experts``: int [S, top_k] to use instead of this reference's own choice, so that one flipped
    pick does not hide what the number formats do.
    """
    xn, chosen, weights = route_rows(layer, model, h_mid, experts)
    out = model.shared_weight * _expert(layer, model, model.experts, xn)
    for e in chosen.unique().tolist():
        token, slot = (chosen == e).nonzero(as_tuple=True)
        out[token] += weights[token, slot, None] * _expert(layer, model, e, xn[token])
    return ExactMlp(xn, chosen, weights, out)


def layer_step(
    layer: LayerWeights,
    model: ModelShape,
    ar: Tensor,
    res: Tensor,
    contexts: Sequence[ExactContext | None],
    q_len: int = 1,
    dtype: torch.dtype = torch.float32,
    blocks: Sequence[Sequence[Tensor]] | None = None,
    experts: Tensor | None = None,
) -> ExactStep:
    """The whole layer for ``len(contexts) * q_len`` rows; the outputs are ``mlp.out`` and
    ``attention.h_mid``.

    A context's length counts the step's own keys, whose content this step replaces; None is a
    padding request. ``blocks`` [row][kv head] and ``experts`` [S, top_k] stand in for this
    reference's own choices where given.
    """
    rows = step_rows([None if c is None else c.length for c in contexts], q_len)
    if len(rows) != len(ar):
        raise ValueError(
            f"{len(contexts)} requests of {q_len} tokens are {len(rows)} rows, got {len(ar)}"
        )
    positions = torch.tensor([row.position for row in rows])
    heads = pre_attention(layer, model, ar, res, positions, dtype)
    cached: list[ExactContext | None] = []
    for i, c in enumerate(contexts):
        new = slice(i * q_len, (i + 1) * q_len)
        cached.append(
            None if c is None else _Extended(c, heads.k[new], heads.v[new], heads.ik[new])
        )
    scores = [_row_scores(heads.iq[t], row, cached, model) for t, row in enumerate(rows)]
    own = [_select(model, row, s) for row, s in zip(rows, scores, strict=True)]
    attention = attention_half(layer, model, heads.q, heads.h, rows, cached, blocks or own)
    return ExactStep(heads, scores, attention, mlp_half(layer, model, attention.h_mid, experts))


def _row_scores(
    iq: Tensor, row: Row, contexts: Sequence[ExactContext | None], model: ModelShape
) -> Tensor:
    context = None if row.request is None else contexts[row.request]
    if context is None:
        return torch.zeros(model.index_heads, row.blocks)
    return block_scores(iq, row, context, model.sm_scale)
