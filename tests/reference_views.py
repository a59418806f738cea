"""What a kernel that rounds as the reference does would publish: for testing the verdicts.

Every rank's views are made by the kernel reference's stages, chained; no kernel runs.
"""

import torch

from m3lab.model.formats import e4m3_decode, quantize_mxfp8
from m3lab.reference import kernel as ref
from m3lab.step import DecodeStep, StepResult
from m3lab.verify.verify import split_reference, table_reference
from m3lab.verify.views import RankViews

COPIES = 8


class NoBuild:
    """Stands for the kernel where a test looks at the host's side only."""

    program = None


def published(step: DecodeStep) -> StepResult:
    """The reference's own views of every rank, as a launch's result."""
    ranks = _attention(step)
    if step.until != "o_proj":
        for views in ranks:
            _router(step, views)
    if step.until is None:
        _experts(step, ranks)
    return StepResult(ranks, 1, report=None, seconds=0.0)  # type: ignore[arg-type]


def _attention(step: DecodeStep) -> list[RankViews]:
    own, views = [], []
    for rank in range(step.npes):
        rows = range(step.tokens)
        splits = [split_reference(step, rank, row) for row in rows]
        merged = [ref.merge(*split) for split in splits]
        heads = range(step.shape.kv_heads)
        tables = [
            torch.cat([table_reference(step, rank, row, head)[0] for head in heads]) for row in rows
        ]
        attnq = torch.stack([m.bytes for m in merged])
        scale = torch.stack([m.scale for m in merged])
        o_k = step.shape.o_k
        w_o = e4m3_decode(step.weights.w_o[:, rank * o_k : (rank + 1) * o_k].contiguous())
        own.append(ref.output_partial(attnq, scale, w_o, step.weights.s_o))
        sp_o, sp_m, sp_l = (torch.stack([s[i] for s in splits]) for i in range(3))
        views.append([sp_o, sp_m, sp_l, torch.stack(tables), attnq, scale])
    a = ref.all_reduce(own)
    h_mid = ref.h_mid(a, step.inputs.h_in)
    return [
        RankViews(*v, partials=torch.stack(own), a=a.clone(), h_mid=h_mid.clone()) for v in views
    ]


def _router(step: DecodeStep, views: RankViews) -> None:
    w = step.weights
    xn = ref.post_norm(views.a, step.inputs.h_in, w.g_post, step.model.rms_eps)
    views.xn8, views.xsc = quantize_mxfp8(xn)
    scores = ref.router_scores(xn, w.w_gate, w.bias)
    views.keys = scores.key.repeat(COPIES, 1, 1)
    views.sigmoids = scores.sigmoid.repeat(COPIES, 1, 1)


def _experts(step: DecodeStep, ranks: list[RankViews]) -> None:
    m, own = step.model, []
    for rank, views in enumerate(ranks):
        shard = ref.RankShard(step.weights, step.shape, rank)
        keys, sigmoids = views["keys"][0], views["sigmoids"][0]
        route = ref.route(keys, sigmoids, m.route_scale, m.shared_weight, m.top_k)
        views.experts, views.weights = route.experts.int(), route.weights
        limits = (m.swiglu_limit, m.swiglu_alpha)
        views.intermediates = ref.expert_intermediates(
            views["xn8"], views["xsc"], route.experts, shard.w13, *limits
        )
        own.append(ref.expert_partial(views.intermediates, route, shard.w2))
    for views in ranks:
        views.ffn = torch.stack(own)
        views.ar_out = ref.all_reduce(own)
