"""Verdicts: what a launch published against the references, stage by stage and end to end.

Each stage of the kernel reference is fed with the kernel's own published inputs to that stage, so
that one flipped rounding upstream does not spoil the stages after it; integers must be equal. The
chained and the exact comparison are reported with a looser bound. Nothing here runs a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m3lab.layout.kv_cache import BLOCK_PAGES
from m3lab.layout.regions import SPARSE_TABLE_WORDS
from m3lab.model.formats import E8M0_NAN, e4m3_decode
from m3lab.reference import kernel as ref
from m3lab.reference.compare import rel_l2
from m3lab.verify import mlp
from m3lab.verify.verdicts import (
    EXACT_ALARM,
    STAGE_BOUND,
    Verdict,
    check_alarm,
    check_close,
    check_equal,
    check_exactly,
    reported,
    unequal_bits,
)

if TYPE_CHECKING:
    from m3lab.step import DecodeStep, StepResult
    from m3lab.verify.views import RankViews
__all__ = ["EXACT_ALARM", "ORDER", "STAGE_BOUND", "Verdict", "same_bits", "verify"]

ATTENTION_ORDER = (
    *("sparse_table", "sp_o", "sp_m", "sp_l", "attnq", "partial", "a", "a_sum", "h_mid"),
)
ORDER = (*ATTENTION_ORDER, *mlp.ROUTER_ORDER, *mlp.EXPERTS_ORDER, "ranks", "nan")
PAGES = SPARSE_TABLE_WORDS - 2  # page ids of a sparse table, before the length and a spare word
# what every rank computes for itself and must agree on, bit for bit
SAME_ON_RANKS = ("a", "h_mid", "xn8", "xsc", "keys", "sigmoids", "experts", "weights", "ar_out")


def verify(step: DecodeStep, result: StepResult) -> list[Verdict]:
    """Every verdict of one launch, ranks in order."""
    w_o = [_rank_w_o(step, rank) for rank in range(step.npes)]
    own = [_partial_reference(step, v, w_o[r]) for r, v in enumerate(result.ranks)]
    verdicts = []
    for rank, views in enumerate(result.ranks):
        verdicts += list(_published(rank, views))
        verdicts += list(_attention(step, views, rank))
        verdicts += list(_output(step, views, rank, own))
        if step.until != "o_proj":
            verdicts += list(mlp.router(step, views, rank))
        verdicts.append(_no_nan(step, views, rank))
    chained, exact = _references(step, w_o)
    verdicts += list(_end_to_end(step, result, chained, exact))
    if step.until is None:
        verdicts += list(mlp.experts(step, result.ranks, chained, exact))
    verdicts += list(_ranks_agree(step, result.ranks))
    return verdicts


def same_bits(first: StepResult, other: StepResult, schedule: int) -> Verdict:
    """Whether two launches of one step published the same bits everywhere (NaN equals NaN)."""
    unequal = 0
    for a, b in zip(first.ranks, other.ranks, strict=True):
        x, y = a.tensors(), b.tensors()
        unequal += sum(unequal_bits(x[name], y[name]) for name in x)
    note = f"schedule {schedule} against the first run"
    return Verdict("repeat", 0, None, "stage", float(unequal), 0.0, unequal == 0, note)


def _published(rank: int, views: RankViews) -> Iterator[Verdict]:
    """Every region holds this launch's tag in every pair."""
    for name in views.missing:
        yield Verdict(
            name, rank, None, "stage", float("inf"), 0.0, False, "not published by this launch"
        )


def _attention(step: DecodeStep, views: RankViews, rank: int) -> Iterator[Verdict]:
    """Selection, split and merge of every row of one rank."""
    for row in range(step.tokens):
        yield _selection(step, views, rank, row)
        partials = split_reference(step, rank, row)
        yield check_close("sp_o", rank, row, views.sp_o[row], partials.sp_o)
        yield check_close("sp_m", rank, row, *_without_masked(views.sp_m[row], partials.sp_m))
        yield check_close("sp_l", rank, row, views.sp_l[row], partials.sp_l)
        if views.attnq is not None and views.attnq_s is not None:
            got = e4m3_decode(views.attnq[row]) * views.attnq_s[row]
            want = ref.merge_nearest(views.sp_o[row], views.sp_m[row], views.sp_l[row], got)
            yield check_close("attnq", rank, row, got, want)


def _output(step: DecodeStep, views: RankViews, rank: int, own: list[Tensor]) -> Iterator[Verdict]:
    """What one rank received, summed and finished. ``own``: every rank's reference rows."""
    for source, rows in enumerate(own):
        yield check_close("partial", rank, None, views.partials[source], rows)
    yield check_close("a", rank, None, views.a, ref.all_reduce(own))
    yield check_equal("a_sum", rank, None, views.a, ref.all_reduce(views.partials))
    if views.h_mid is not None:
        h_mid = ref.h_mid(views.a, step.inputs.h_in)
        yield check_close("h_mid", rank, None, views.h_mid, h_mid)


def _selection(step: DecodeStep, views: RankViews, rank: int, row: int) -> Verdict:
    """Page ids and the sparse context length of every kv head, bit for bit."""
    heads = step.shape.kv_heads
    unequal = 0
    for head, got in enumerate(views.table[row].unflatten(-1, (heads, -1))):
        want, used = table_reference(step, rank, row, head)
        unequal += int((got[:used] != want[:used]).sum()) + int(got[PAGES] != want[PAGES])
    return check_exactly("sparse_table", rank, row, unequal)


def table_reference(step: DecodeStep, rank: int, row: int, head: int) -> tuple[Tensor, int]:
    """int32 [130]: page ids, then the sparse context length; and how many page ids are used."""
    chosen = step.selections[rank][row * step.shape.kv_heads + head]
    table = torch.zeros(SPARSE_TABLE_WORDS, dtype=torch.int32)
    table[:PAGES] = ref.sparse_table(chosen.blocks, step.block_table[row], step.layout.page_stride)
    table[PAGES] = chosen.n_ctx
    return table, BLOCK_PAGES * len(chosen.blocks)


def _without_masked(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """Maxima of partitions with a valid key; where there is none both must hold NEG exactly."""
    masked = want <= ref.NEG
    if torch.equal(got[masked], want[masked]):
        return got[~masked], want[~masked]
    return got, want


def selected_kv(step: DecodeStep, rank: int, row: int, head: int = 0) -> tuple[Tensor, ...]:
    """(k bytes, k scale, v bytes, v scale) of what the row selects under a kv head of the rank."""
    from m3lab.step.step import padding_context

    request = step._request_of(row)
    ctx = padding_context(step) if request is None else step.inputs.contexts[request]
    blocks = step.selections[rank][row * step.shape.kv_heads + head].blocks.tolist()
    kv = step.shape.kv_range(rank)[head]
    k = torch.cat([ctx.k(b)[:, kv] for b in blocks])
    v = torch.cat([ctx.v(b)[:, kv] for b in blocks])
    if step.layout.static_scale:
        return k, torch.tensor(ctx.k_scale_static), v, torch.tensor(ctx.v_scale_static)
    k_scale = torch.cat([ctx.k_scale(b)[:, kv] for b in blocks])
    v_scale = torch.cat([ctx.v_scale(b)[:, kv] for b in blocks])
    return k, k_scale, v, v_scale


def rank_q(step: DecodeStep, rank: int, row: int, head: int = 0) -> Tensor:
    """fp32 [heads, 128]: the row's query heads that share a kv head of this rank."""
    group = step.shape.heads_per_kv
    first = rank * step.shape.q_heads + head * group
    return step.inputs.q[row, first : first + group].float()


def split_reference(step: DecodeStep, rank: int, row: int) -> ref.SplitPartials:
    """A row's partitions over every query head of the rank."""
    parts = []
    for head in range(step.shape.kv_heads):
        n_ctx = step.selections[rank][row * step.shape.kv_heads + head].n_ctx
        q = rank_q(step, rank, row, head)
        k, k_scale, v, v_scale = selected_kv(step, rank, row, head)
        parts.append(ref.split(q, k, k_scale, v, v_scale, n_ctx, step.model.sm_scale))
    return ref.SplitPartials(*(torch.cat(field, 1) for field in zip(*parts, strict=True)))


def _rank_w_o(step: DecodeStep, rank: int) -> Tensor:
    """fp32 [hidden, o_k]: this rank's columns of the output projection, decoded, unscaled."""
    columns = slice(rank * step.shape.o_k, (rank + 1) * step.shape.o_k)
    return e4m3_decode(step.weights.w_o[:, columns].contiguous())


def _project(step: DecodeStep, rows: list[ref.QuantizedRow], w_o: Tensor) -> Tensor:
    attnq, scale = torch.stack([r.bytes for r in rows]), torch.stack([r.scale for r in rows])
    return ref.output_partial(attnq, scale, w_o, step.weights.s_o)


def _partial_reference(step: DecodeStep, views: RankViews, w_o: Tensor) -> Tensor:
    """A rank's o_proj rows from the kernel's own merged attention (one token: its partitions)."""
    if views.attnq is not None and views.attnq_s is not None:
        return ref.output_partial(views.attnq, views.attnq_s, w_o, step.weights.s_o)
    rows = [
        ref.merge(views.sp_o[row], views.sp_m[row], views.sp_l[row]) for row in range(step.tokens)
    ]
    return _project(step, rows, w_o)


def _no_nan(step: DecodeStep, views: RankViews, rank: int) -> Verdict:
    """No live row holds a NaN, in any format."""
    found = 0
    for name in views.tensors():
        live = views.rows(name, step.live_rows)
        if live.is_floating_point():
            found += int(live.isnan().sum())
        elif name in ("attnq", "xn8"):
            found += int(e4m3_decode(live).isnan().sum())
        elif name == "xsc":
            found += int((live == E8M0_NAN).sum())
    return check_exactly("nan", rank, None, found)


def _ranks_agree(step: DecodeStep, ranks: list[RankViews]) -> Iterator[Verdict]:
    """Every rank sums and routes for itself; one that differed would push into another's rows."""
    for rank, views in enumerate(ranks[1:], 1):
        unequal = 0
        for name in views.tensors().keys() & set(SAME_ON_RANKS):
            mine, first = (v.rows(name, step.live_rows) for v in (views, ranks[0]))
            unequal += unequal_bits(mine, first)
        yield check_exactly("ranks", rank, None, unequal, "against rank 0")


def _references(step: DecodeStep, w_o: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The live rows of ``a`` from the step's inputs on: chained, and exact."""
    chained = ref.all_reduce([_chained_partial(step, r, w) for r, w in enumerate(w_o)])
    exact = torch.stack([_exact_partial(step, r, w) for r, w in enumerate(w_o)]).sum(0)
    return chained[: step.live_rows], exact


def _end_to_end(
    step: DecodeStep, result: StepResult, chained: Tensor, exact: Tensor
) -> Iterator[Verdict]:
    """``a`` and h_mid of the live rows against both references."""
    live, views = step.live_rows, result.ranks[0]
    h_in = step.inputs.h_in[:live].float()
    yield reported("a", 0, "chained", rel_l2(views.a[:live], chained))
    yield check_alarm("a", 0, views.a[:live], exact)
    if views.h_mid is not None:
        yield check_alarm("h_mid", 0, views.h_mid[:live], exact + h_in)


def _chained_partial(step: DecodeStep, rank: int, w_o: Tensor) -> Tensor:
    rows = [ref.merge(*split_reference(step, rank, row)) for row in range(step.tokens)]
    return _project(step, rows, w_o)


def _exact_partial(step: DecodeStep, rank: int, w_o: Tensor) -> Tensor:
    """fp32 [live rows, hidden]: attention over the same keys, o_proj; nothing rounded between."""
    rows = [
        torch.cat([_exact_head(step, rank, row, head) for head in range(step.shape.kv_heads)])
        for row in range(step.live_rows)
    ]
    return torch.stack(rows) @ w_o.t() * step.weights.s_o


def _exact_head(step: DecodeStep, rank: int, row: int, head: int) -> Tensor:
    """fp32 [heads * 128]: the attention of the query heads that share a kv head."""
    n_ctx = step.selections[rank][row * step.shape.kv_heads + head].n_ctx
    k, k_scale, v, v_scale = selected_kv(step, rank, row, head)
    keys = (e4m3_decode(k) * _column(k_scale))[:n_ctx]
    values = (e4m3_decode(v) * _column(v_scale))[:n_ctx]
    score = rank_q(step, rank, row, head) @ keys.t() * step.model.sm_scale
    return (torch.softmax(score, dim=-1) @ values).flatten()


def _column(scale: Tensor) -> Tensor:
    return scale[:, None] if scale.ndim else scale
