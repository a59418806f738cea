"""Verdicts on the layer's second half: router, experts, the MLP all-reduce.

Only live rows are compared: what a padding row makes of itself is nobody's. The weights are decoded
a rank at a time, once for all three comparisons (stage, chained, exact), since that is what costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m3lab.model.formats import dequantize_mxfp8, quantize_mxfp8
from m3lab.model.shapes import MX_BLOCK
from m3lab.reference import exact
from m3lab.reference import kernel as ref
from m3lab.reference.compare import experts_agree, rel_l2, scale_bytes_agree
from m3lab.reference.numerics import mx_values
from m3lab.verify.verdicts import (
    Verdict,
    check_alarm,
    check_close,
    check_equal,
    check_exactly,
    reported,
    unequal_bits,
)

if TYPE_CHECKING:
    from m3lab.step import DecodeStep
    from m3lab.verify.views import RankViews

ROUTER_ORDER = ("xn8", "xsc", "sigmoid", "keys", "copies")
EXPERTS_ORDER = ("sel", "picks", "weights", "mid", "ffn", "ffn_sum", "ar_out")


# -------------------------------------------------------------------------------------- the router


def router(step: DecodeStep, views: RankViews, rank: int) -> Iterator[Verdict]:
    """The normed row as MXFP8, and every expert's sigmoid and routing key in all copies."""
    live = step.live_rows
    xn = _normed(step, views.a[:live])
    x8, xsc = quantize_mxfp8(xn)
    got8, got_sc = views["xn8"][:live], views["xsc"][:live]
    yield check_close("xn8", rank, None, dequantize_mxfp8(got8, got_sc), dequantize_mxfp8(x8, xsc))
    amax = xn.unflatten(-1, (-1, MX_BLOCK)).abs().amax(-1)
    unequal = 0 if scale_bytes_agree(got_sc, xsc, amax) else int((got_sc != xsc).sum())
    yield check_exactly("xsc", rank, None, unequal)
    scores = ref.router_scores(xn, step.weights.w_gate, step.weights.bias)
    keys, sigmoids = views["keys"][:, :live], views["sigmoids"][:, :live]
    yield check_close("sigmoid", rank, None, sigmoids[0], scores.sigmoid)
    expert = torch.arange(step.model.experts)
    own = ref.routing_key(sigmoids[0] + step.weights.bias, expert)
    yield check_equal("keys", rank, None, keys[0], own)
    copies = unequal_bits(keys, keys[:1].expand_as(keys))
    copies += unequal_bits(sigmoids, sigmoids[:1].expand_as(sigmoids))
    yield check_exactly("copies", rank, None, copies)


def _normed(step: DecodeStep, a: Tensor) -> Tensor:
    """xn of the live rows as the kernel makes it of ``a``."""
    h_in = step.inputs.h_in[: step.live_rows]
    return ref.post_norm(a, h_in, step.weights.g_post, step.model.rms_eps)


# ------------------------------------------------------------------------------------- the experts


@dataclass
class _Tables:
    """A rank's expert shards as numbers, decoded once."""

    step: DecodeStep
    rank: int
    read: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def _get(self, name: str, expert: int) -> Tensor:
        if (name, expert) not in self.read:
            shard = ref.RankShard(self.step.weights, self.step.shape, self.rank)
            entry = min(max(expert, 0), self.step.weights.shared_entry)  # as the kernel clamps ids
            self.read[name, expert] = mx_values(*getattr(shard, name)(entry))
        return self.read[name, expert]

    def w13(self, expert: int) -> tuple[Tensor, None]:
        return self._get("w13", expert), None

    def w2(self, expert: int) -> tuple[Tensor, None]:
        return self._get("w2", expert), None


@dataclass
class _Inputs:
    """What the experts of every rank read: MXFP8 rows and the routing."""

    x8: Tensor
    xsc: Tensor
    route: ref.Route


def _chained_inputs(step: DecodeStep, a: Tensor) -> _Inputs:
    m, w = step.model, step.weights
    xn = _normed(step, a)
    scores = ref.router_scores(xn, w.w_gate, w.bias)
    return _Inputs(*quantize_mxfp8(xn), ref.route(*scores, m.route_scale, m.shared_weight, m.top_k))


def _own_route(step: DecodeStep, views: RankViews) -> ref.Route:
    """The routing that a rank published, of its live rows."""
    live = step.live_rows
    return ref.Route(views["experts"][:live].long(), views["weights"][:live])


def experts(
    step: DecodeStep, ranks: list[RankViews], chained_a: Tensor, exact_a: Tensor
) -> Iterator[Verdict]:
    """Routing, intermediates, partial rows and their sum on every rank; then end to end.

    ``chained_a``, ``exact_a``: [live rows, hidden], the attention rows of the two references.
    """
    chained = _chained_inputs(step, chained_a)
    numbers = _Exact(step, exact_a, _own_route(step, ranks[0]).experts[:, :-1])
    own, chained_partials, exact_rows = [], [], torch.zeros(())
    for rank, views in enumerate(ranks):
        tables = _Tables(step, rank)
        yield from _routing(step, views, rank)
        intermediates, partial = _stage(step, views, tables)
        yield check_close(
            "mid", rank, None, views["intermediates"][: step.live_rows], intermediates
        )
        own.append(partial)
        chained_intermediates = _intermediates(step, chained, tables.w13)
        chained_partials.append(ref.expert_partial(chained_intermediates, chained.route, tables.w2))
        exact_rows = exact_rows + numbers.partial(tables)
    for rank, views in enumerate(ranks):
        yield from _reduced(step, views, rank, own)
    yield from _end_to_end(step, ranks[0], ref.all_reduce(chained_partials), exact_rows)
    yield reported("sel", 0, "exact", numbers.other_picks)


def _routing(step: DecodeStep, views: RankViews, rank: int) -> Iterator[Verdict]:
    """The record: what the rank's own keys say, and what the reference's scores would."""
    m, w, live = step.model, step.weights, step.live_rows
    got = _own_route(step, views)
    keys, sigmoids = views["keys"][0, :live], views["sigmoids"][0, :live]
    want = ref.route(keys, sigmoids, m.route_scale, m.shared_weight, m.top_k)
    yield check_equal("sel", rank, None, got.experts, want.experts)
    yield check_close("weights", rank, None, got.weights, want.weights)
    xn = _normed(step, views.a[:live])
    logits = ref.router_logits(xn, w.w_gate)
    scores = ref.router_scores(xn, w.w_gate, w.bias)
    picks = ref.route(*scores, m.route_scale, m.shared_weight, m.top_k).experts
    for row in range(live):
        a, b = got.experts[row, :-1].tolist(), picks[row, :-1].tolist()
        agree = all(0 <= e < m.experts for e in a) and experts_agree(
            a, b, scores.sigmoid[row] + w.bias, logits[row]
        )
        differ = 0 if agree else max(1, sum(x != y for x, y in zip(a, b, strict=True)))
        yield check_exactly("picks", rank, row, differ)


def _intermediates(step: DecodeStep, inputs: _Inputs, w13: Callable) -> Tensor:
    limit, alpha = step.model.swiglu_limit, step.model.swiglu_alpha
    return ref.expert_intermediates(inputs.x8, inputs.xsc, inputs.route.experts, w13, limit, alpha)


def _stage(step: DecodeStep, views: RankViews, tables: _Tables) -> tuple[Tensor, Tensor]:
    """A rank's intermediates from its own rows; its partial rows from its own intermediates."""
    live = step.live_rows
    route = _own_route(step, views)
    intermediates = _intermediates(
        step, _Inputs(views["xn8"][:live], views["xsc"][:live], route), tables.w13
    )
    return intermediates, ref.expert_partial(views["intermediates"][:live], route, tables.w2)


def _reduced(step: DecodeStep, views: RankViews, rank: int, own: list[Tensor]) -> Iterator[Verdict]:
    """What one rank received and summed. ``own``: every rank's reference rows."""
    live = step.live_rows
    for source, rows in enumerate(own):
        yield check_close("ffn", rank, None, views["ffn"][source, :live], rows)
    yield check_close("ar_out", rank, None, views["ar_out"][:live], ref.all_reduce(own))
    yield check_equal(
        "ffn_sum", rank, None, views["ar_out"][:live], ref.all_reduce(views["ffn"][:, :live])
    )


def _end_to_end(
    step: DecodeStep, views: RankViews, chained: Tensor, exact_rows: Tensor
) -> Iterator[Verdict]:
    got = views["ar_out"][: step.live_rows]
    yield reported("ar_out", 0, "chained", rel_l2(got, chained))
    yield check_alarm("ar_out", 0, got, exact_rows)


class _Exact:
    """The exact MLP half of the live rows, rank by rank, on the kernel's own picks.

    ``picks`` [live rows, top_k]: so that one flipped pick does not hide what the formats do.
    """

    def __init__(self, step: DecodeStep, a: Tensor, picks: Tensor) -> None:
        self.model, w = step.model, step.weights
        picks = picks.clamp(0, self.model.experts - 1)
        h_mid = a + step.inputs.h_in[: step.live_rows].float()
        self.xn, self.picks, self.weights = exact.route_rows(w, self.model, h_mid, picks)
        own = exact.route_rows(w, self.model, h_mid)[1]
        self.other_picks = float((own.sort(-1).values != picks.sort(-1).values).sum())

    def partial(self, tables: _Tables) -> Tensor:
        """fp32 [live rows, hidden]: what one rank's shards add."""
        shared = self.model.experts
        out = self.model.shared_weight * self._rows(tables, shared, self.xn)
        for e in self.picks.unique().tolist():
            token, slot = (self.picks == e).nonzero(as_tuple=True)
            out[token] += self.weights[token, slot, None] * self._rows(tables, e, self.xn[token])
        return out

    def _rows(self, tables: _Tables, expert: int, x: Tensor) -> Tensor:
        return exact.expert_rows(self.model, tables.w13(expert)[0], tables.w2(expert)[0], x)
