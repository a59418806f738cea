"""Stage 5's inputs in a CTA: the tokens' MXFP8 rows in LDS, and every token's choice of experts.

Each CTA of the narrow form routes for itself, from the copy of the scores that is its own: wave k
routes token k. The choice is integer maxima over routing keys; the record of it is published once.
"""

from dataclasses import dataclass

import flydsl.expr as fx

from m3lab.kernels.device import gfx950, mailbox, mx
from m3lab.kernels.device.context import scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, select, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import WHOLE_WAVE, butterfly, div, largest, mod, pick
from m3lab.kernels.marks import in_stage
from m3lab.kernels.moe.router import EXPERT_BITS
from m3lab.kernels.plan import THREADS
from m3lab.kernels.stages import Point
from m3lab.layout.regions import PAIR_BYTES
from m3lab.model.shapes import MAX_TOKENS, MX_BLOCK

LEAST = -(2**31)
WEIGHT_FLOOR = 1e-20
ROUTE_PITCH = 8  # words of a token's slots in lds.route and lds.route_weight

# ---------------------------------------------------------------------- the normed rows


@in_stage("routing")
@traced
def fetch_rows(ctx):
    """lds.pool := every token's MXFP8 row and scales, all waves at it. The caller syncs."""
    await_rows(ctx)
    store_rows_to_lds(ctx)


@in_stage("routing")
@traced
def await_rows(ctx, token=None):
    """Wave 0 waits on the last word of each router task's slice of ``token``'s row (None: of every
    token's), the others at the barrier: all threads of all CTAs spinning on the whole row held the
    shared expert's rows back 3 us (four tokens, measured upstream)."""
    if const_expr(not ctx.tuning.spin_whole_row):
        if ctx.wave == 0:
            poll_last_words(ctx, token)
        gfx950.barrier()


def poll_last_words(ctx, token):
    plan = ctx.plan
    words, parts = ctx.shape.hidden // 4, plan.router_tasks_per_token
    of = fx.min(div(ctx.lane, parts), plan.tokens - 1) if token is None else token
    last = of * words + (mod(ctx.lane, parts) + 1) * (words // parts) - 1
    mailbox.poll(ctx.tag, [PairRange(scratch_view(ctx, "xn8"), last)])


@in_stage("routing")
def store_rows_to_lds(ctx, token=None, waves_from=0):
    """lds.pool := the row and scales of ``token``, None: every token's, by the waves from
    ``waves_from`` on: poll two pairs at a time, rows' words and then their scales."""
    threads, n = THREADS - waves_from * gfx950.LANES, row_units(ctx)
    rounds = [Round(first, first + threads <= n) for first in range(0, units_of(ctx), threads)]
    thread = ctx.tid - waves_from * gfx950.LANES
    tokens = list(range(ctx.plan.tokens)) if token is None else [token]
    units = [(k, r, thread + r.first) for k in tokens for r in rounds]
    requests = [row_request(ctx, *unit) for unit in units]  # 16 at most
    got = mailbox.poll(ctx.tag, requests, batch=len(requests))
    for unit, words in zip(units, got, strict=True):
        store_unit_to_lds(ctx, *unit, words)


@dataclass(frozen=True)
class Round:
    """A unit a thread from unit ``first`` on; whether all of them are of the row's words."""

    first: int
    in_row: bool


def row_units(ctx):
    """Units of two pairs that a row's words are."""
    return ctx.shape.hidden // 8


def units_of(ctx):
    return row_units(ctx) + ctx.shape.hidden // MX_BLOCK // 2


def row_request(ctx, token, of, unit):
    """Unit ``unit`` of a token: a row's two words, past them two of its scales."""
    n, hidden = row_units(ctx), ctx.shape.hidden
    regions = ctx.spec.regions
    apart = (regions["xsc"].offset - regions["xn8"].offset) // PAIR_BYTES
    at = token * (hidden // 4) + 2 * unit
    if not of.in_row:
        unit = fx.min(unit, units_of(ctx) - 1)
        in_scales = apart + token * (hidden // MX_BLOCK) + 2 * (unit - n)
        at = select(unit < n, at, in_scales)
    return PairRange(scratch_view(ctx, "xn8"), at, 2)


def store_unit_to_lds(ctx, token, of, unit, words):
    if of.in_row:
        store_words_to_lds(ctx, token, unit, words)
    else:
        store_words_or_scales_to_lds(ctx, token, unit, words)


def store_words_to_lds(ctx, token, unit, words):
    pair = fx.Vector.from_elements(words, fx.Int32)
    gfx950.lds_store(ctx.lds.pool, token * ctx.plan.xn8_row + 2 * unit, pair, 2)


@traced
def store_words_or_scales_to_lds(ctx, token, unit, words):
    plan, n = ctx.plan, row_units(ctx)
    if unit < n:
        store_words_to_lds(ctx, token, unit, words)
    if (unit >= n) & (unit < units_of(ctx)):
        at = scales_at(ctx, token) + mx.scale_word(2 * (unit - n), plan.ug_chunks)
        gfx950.lds_store(ctx.lds.pool, at, words[0])
        gfx950.lds_store(ctx.lds.pool, at + mx.scale_pitch(plan.ug_chunks), words[1])


def scales_at(ctx, token):
    """LDS word of a token's scale row, ``mx.scale_word`` within it."""
    plan = ctx.plan
    return plan.tokens * plan.xn8_row + token * plan.xn_scale_row


# ---------------------------------------------------------------------- the choice


@in_stage("routing")
@traced
def route_tokens(ctx):
    """lds.route and lds.route_weight := every token's routed experts and weights, best first, a
    wave a token. The caller syncs."""
    if ctx.wave < ctx.spec.tokens:
        route_token(ctx, ctx.wave)


@in_stage("routing")
def route_token(ctx, token):
    keys, sigmoids = poll_scores(ctx, token)
    stamp(ctx, Point.SCORES_IN)
    experts = best_experts(ctx, keys)
    weights = route_weights(ctx, experts, sigmoids)
    store_route_to_lds(ctx, token, experts, weights)
    publish_record(ctx, token, experts, weights)


def poll_scores(ctx, token):
    """This lane's two experts, ``lane`` and ``lane`` + 64: (their keys, their sigmoids)."""
    experts = ctx.shape.model.experts
    first = (mod(ctx.bid, ctx.tuning.score_copies) * MAX_TOKENS + token) * experts
    box = scratch_view(ctx, "scores")
    at = [(first + ctx.lane + half) * 2 for half in range(0, experts, gfx950.LANES)]
    got = mailbox.poll(ctx.tag, [PairRange(box, index, 2) for index in at])
    return [key for key, _ in got], [gfx950.bitcast_f32(word) for _, word in got]


def best_experts(ctx, keys):
    """The experts of the largest keys, uniform, best first. A key holds its expert, so an id is
    within the table whatever the scores were."""
    experts = []
    for _ in range(ctx.shape.model.top_k):
        best = gfx950.uniform(butterfly(largest(*keys), WHOLE_WAVE, largest))
        keys = [select(key == best, fx.Int32(LEAST), key) for key in keys]
        experts.append(EXPERT_BITS - (best & EXPERT_BITS))
    return experts


def route_weights(ctx, experts, sigmoids):
    """The chosen sigmoids, without bias, as shares of their sum times the route scale; uniform."""
    chosen = []
    for expert in experts:
        low, high = [gfx950.lane_value(x, mod(expert, gfx950.LANES)) for x in sigmoids]
        chosen.append(select(expert < gfx950.LANES, low, high))
    a, b, c, d = chosen
    total = fx.max((a + b) + (c + d), fx.Float32(WEIGHT_FLOOR))
    factor = gfx950.div_rn(fx.Float32(ctx.spec.route_scale), total, gfx950.rcp(total))
    return [x * factor for x in chosen]


@traced
def store_route_to_lds(ctx, token, experts, weights):
    if ctx.lane == 0:
        at = token * ROUTE_PITCH
        gfx950.lds_store(ctx.lds.route, at, fx.Vector.from_elements(experts, fx.Int32), 4)
        both = fx.Vector.from_elements(weights, fx.Float32)
        gfx950.lds_store(ctx.lds.route_weight, at, both, 4, fx.Float32)


@traced
def publish_record(ctx, token, experts, weights):
    """``sel``: the token's expert of every slot, then their weights; by the first down CTA."""
    model, build = ctx.shape.model, ctx.spec
    slots = model.top_k + 1
    if (ctx.bid == build.plan.bases["down"]) & (ctx.lane < slots):
        ids = [*experts, fx.Int32(model.experts)]
        shares = [*weights, fx.Float32(build.shared_weight)]
        at = token * (2 * slots) + ctx.lane
        box = scratch_view(ctx, "sel")
        mailbox.put_words(ctx.tag, box, at, [pick(ids, ctx.lane)])
        mailbox.put(ctx.tag, box, at + slots, pick(shares, ctx.lane))


def routed_expert(ctx, token, slot):
    """The expert of a routed slot, uniform."""
    return gfx950.uniform(gfx950.lds_load(ctx.lds.route, token * ROUTE_PITCH + slot))


def route_weight(ctx, token, slot):
    return gfx950.lds_load(ctx.lds.route_weight, token * ROUTE_PITCH + slot)
