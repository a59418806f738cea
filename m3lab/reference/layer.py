"""The kernel reference's stages chained: the layer before, in and after attention, and whole.

A step is S rows (``context.step_rows``); tensors carry the rows first. Every part returns all it
made, so that a check can name the first stage that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3lab.model.formats import bf16_round, quantize_mxfp8
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.model.weights import LayerWeights
from m3lab.reference.attention import SplitPartials, merge, split
from m3lab.reference.context import Context, Inserted, Row, ZeroPage, gather, step_rows
from m3lab.reference.experts import expert_intermediates, expert_partial
from m3lab.reference.output import all_reduce, h_mid, output_partial
from m3lab.reference.pre_attn import (
    CacheEntry,
    NormedInput,
    block_scores,
    cache_entry,
    index_key_entry,
    input_norm,
    norm_rope,
    project,
    rope_table,
)
from m3lab.reference.router import Route, RouterScores, post_norm, route, router_scores
from m3lab.reference.selection import TOPK_BLOCKS, Selection, select
from m3lab.reference.shard import RankShard

StaticScales = tuple[float, float]  # a static-scale cache's K and V scale


@dataclass
class PreAttention:
    """K1: the residual and normed row, then what the heads put out (model-wide heads)."""

    normed: NormedInput
    q: Tensor  # bf16 values [S, q heads, 128]
    k: CacheEntry  # [S, kv heads, 128]
    v: CacheEntry
    iq: Tensor  # bf16 values [S, index heads, 128]
    ik: Tensor  # E4M3 bytes [S, 128]


@dataclass
class AttentionHalf:
    """From q to the middle residual. ``ranks`` says whose the per-rank lists are."""

    ranks: list[int]
    selections: list[list[Selection]]  # [row][kv head of the model]
    split: list[list[SplitPartials]]  # [rank][row], the rank's query heads in order
    attnq: list[Tensor]  # [rank]: E4M3 bytes [S, o_k]
    attnq_scale: list[Tensor]  # [rank]: fp32 [S]
    partials: list[Tensor]  # [rank]: bf16 values [S, hidden]
    a: Tensor  # bf16 values [S, hidden]
    h_mid: Tensor  # bf16 values [S, hidden]


@dataclass
class MlpHalf:
    """From the all-reduced attention row to the all-reduced MLP row."""

    xn: Tensor  # bf16 values [S, hidden]
    x8: Tensor  # E4M3 bytes [S, hidden]
    xsc: Tensor  # E8M0 bytes [S, hidden / 32]
    scores: RouterScores
    route: Route
    intermediates: list[Tensor]  # [rank]: bf16 values [S, slots, inter]
    partials: list[Tensor]  # [rank]: bf16 values [S, hidden]
    out: Tensor  # bf16 values [S, hidden]


@dataclass
class LayerStep:
    pre: PreAttention
    scores: list[Tensor | None]  # [row]: fp32 [index heads, blocks]; None where not scored
    attention: AttentionHalf
    mlp: MlpHalf


def pre_attention(
    layer: LayerWeights,
    model: ModelShape,
    ar: Tensor,
    res: Tensor,
    positions: Tensor,
    static: StaticScales | None = None,
) -> PreAttention:
    """``ar``, ``res``: bf16 [S, hidden]; ``positions``: int [S]."""
    normed = input_norm(ar, res, layer.g_in, model.rms_eps)
    cos_sin = rope_table(positions, model.rope_theta, model.rope_dim)

    def heads(w: Tensor, s_w: Tensor) -> Tensor:
        return project(normed.x8, normed.scale, w, s_w).unflatten(-1, (-1, model.head_dim))

    def rotated(w: Tensor, s_w: Tensor, g: Tensor) -> Tensor:
        return norm_rope(heads(w, s_w), g, cos_sin, model.rms_eps)

    k_scale, v_scale = static or (None, None)
    return PreAttention(
        normed,
        q=bf16_round(rotated(layer.w_q, layer.s_q, layer.g_q)),
        k=cache_entry(bf16_round(rotated(layer.w_k, layer.s_k, layer.g_k)), k_scale),
        v=cache_entry(heads(layer.w_v, layer.s_v), v_scale),
        iq=bf16_round(rotated(layer.w_iq, layer.s_iq, layer.g_iq)),
        ik=index_key_entry(rotated(layer.w_ik, layer.s_ik, layer.g_ik)[:, 0]),
    )


def insert(
    pre: PreAttention, contexts: Sequence[Context | None], q_len: int
) -> list[Context | None]:
    """The requests' contexts with their ``q_len`` last keys replaced by this step's."""
    out: list[Context | None] = []
    for i, context in enumerate(contexts):
        rows = slice(i * q_len, (i + 1) * q_len)
        out.append(
            None
            if context is None
            else Inserted(
                context,
                pre.k.bytes[rows],
                pre.k.scale[rows],
                pre.v.bytes[rows],
                pre.v.scale[rows],
                pre.ik[rows],
            )
        )
    return out


def score_rows(
    iq: Tensor, rows: Sequence[Row], contexts: Sequence[Context | None], sm_scale: float
) -> list[Tensor | None]:
    """Block scores of every row and index head; None where the selection keeps every block."""
    out: list[Tensor | None] = []
    for row, heads in zip(rows, iq, strict=True):
        context = None if row.request is None else contexts[row.request]
        if context is None or row.blocks <= TOPK_BLOCKS:
            out.append(None)
            continue
        keys = torch.stack([context.index_k(b) for b in range(row.blocks)])
        out.append(torch.stack([block_scores(head, keys, row.keys, sm_scale) for head in heads]))
    return out


def attention_half(
    layer: LayerWeights,
    shape: RankShape,
    q: Tensor,
    h_in: Tensor,
    rows: Sequence[Row],
    contexts: Sequence[Context | None],
    scores: Sequence[Tensor | None],
    ranks: Sequence[int] | None = None,
    static: StaticScales | None = None,
) -> AttentionHalf:
    """Selection to h_mid.

    ``q``: bf16 values [S, q heads of the model, 128]; ``h_in``: bf16 [S, hidden]; ``scores``: per
    row fp32 [index heads, blocks], or None for a row of up to 16 blocks; ``ranks``: the ranks that
    take part (default all; one alone is the solo form); ``static``: scales of a static-scale cache.
    """
    model = shape.model
    ranks = list(range(shape.tp) if ranks is None else ranks)
    selections = [_select_row(model, row, s) for row, s in zip(rows, scores, strict=True)]
    per_rank: list[list[SplitPartials]] = []
    attnq, attnq_scale, partials = [], [], []
    for rank in ranks:
        shard = RankShard(layer, shape, rank)
        parts = [
            _split_row(shard, q[t], row, contexts, selections[t], static)
            for t, row in enumerate(rows)
        ]
        merged = [merge(*part) for part in parts]
        per_rank.append(parts)
        attnq.append(torch.stack([m.bytes for m in merged]))
        attnq_scale.append(torch.stack([m.scale for m in merged]))
        partials.append(output_partial(attnq[-1], attnq_scale[-1], shard.w_o(), layer.s_o))
    a = all_reduce(partials)
    return AttentionHalf(
        ranks, selections, per_rank, attnq, attnq_scale, partials, a, h_mid(a, h_in)
    )


def _select_row(model: ModelShape, row: Row, scores: Tensor | None) -> list[Selection]:
    """One selection a kv head (an index head scores for one kv head)."""
    return [
        select(
            None if scores is None else scores[head],
            row.blocks,
            row.keys,
            model.init_blocks,
            model.local_blocks,
            model.topk_blocks,
        )
        for head in range(model.kv_heads)
    ]


def _split_row(
    shard: RankShard,
    q: Tensor,
    row: Row,
    contexts: Sequence[Context | None],
    selections: list[Selection],
    static: StaticScales | None,
) -> SplitPartials:
    """A row's partitions over every query head of the rank."""
    context = None if row.request is None else contexts[row.request]
    context = context or ZeroPage(shard.shape.model.kv_heads)
    group = shard.shape.heads_per_kv
    parts = []
    for i, kv in enumerate(shard.shape.kv_range(shard.rank)):
        blocks, n_ctx = selections[kv]
        k_scale: Tensor | float
        v_scale: Tensor | float
        if static is None:
            k_scale = gather(context.k_scale, blocks, n_ctx)[:, kv]
            v_scale = gather(context.v_scale, blocks, n_ctx)[:, kv]
        else:
            k_scale, v_scale = static
        parts.append(
            split(
                shard.heads(q)[i * group : (i + 1) * group],
                gather(context.k, blocks, n_ctx)[:, kv],
                k_scale,
                gather(context.v, blocks, n_ctx)[:, kv],
                v_scale,
                n_ctx,
                shard.shape.model.sm_scale,
            )
        )
    return SplitPartials(*(torch.cat(field, 1) for field in zip(*parts, strict=True)))


def mlp_half(
    layer: LayerWeights,
    shape: RankShape,
    a: Tensor,
    h_in: Tensor,
    ranks: Sequence[int] | None = None,
    shared_fp8: bool = False,
) -> MlpHalf:
    """Post-attention norm to the layer's output; ``a`` and ``h_in`` bf16 values [S, hidden].

    ``shared_fp8``: the build whose shared expert is MXFP8.
    """
    model = shape.model
    xn = post_norm(a, h_in, layer.g_post, model.rms_eps)
    x8, xsc = quantize_mxfp8(xn)
    scores = router_scores(xn, layer.w_gate, layer.bias)
    routed = route(*scores, model.route_scale, model.shared_weight, model.top_k)
    intermediates, partials = [], []
    for rank in range(shape.tp) if ranks is None else ranks:
        shard = RankShard(layer, shape, rank, shared_fp8)
        intermediates.append(
            expert_intermediates(
                x8, xsc, routed.experts, shard.w13, model.swiglu_limit, model.swiglu_alpha
            )
        )
        partials.append(expert_partial(intermediates[-1], routed, shard.w2))
    return MlpHalf(xn, x8, xsc, scores, routed, intermediates, partials, all_reduce(partials))


def layer_step(
    layer: LayerWeights,
    shape: RankShape,
    ar: Tensor,
    res: Tensor,
    contexts: Sequence[Context | None],
    q_len: int = 1,
    ranks: Sequence[int] | None = None,
    static: StaticScales | None = None,
    shared_fp8: bool = False,
) -> LayerStep:
    """The whole layer for one decode step of ``len(contexts) * q_len`` rows.

    ``ar``, ``res``: bf16 [S, hidden]. A context's length counts the step's own keys, whose content
    this step replaces; None is a padding request. The step's outputs are ``mlp.out`` and
    ``attention.h_mid``.
    """
    rows = step_rows([None if c is None else c.length for c in contexts], q_len)
    if len(rows) != len(ar):
        raise ValueError(
            f"{len(contexts)} requests of {q_len} tokens are {len(rows)} rows, got {len(ar)}"
        )
    positions = torch.tensor([row.position for row in rows])
    pre = pre_attention(layer, shape.model, ar, res, positions, static)
    cached = insert(pre, contexts, q_len)
    scores = score_rows(pre.iq, rows, cached, shape.model.sm_scale)
    attention = attention_half(
        layer, shape, pre.q, pre.normed.h, rows, cached, scores, ranks, static
    )
    mlp = mlp_half(layer, shape, attention.a, pre.normed.h, ranks, shared_fp8)
    return LayerStep(pre, scores, attention, mlp)
