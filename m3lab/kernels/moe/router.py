"""Stage 4: residual and norm of the attention row, its MXFP8, the router's scores.

A task is one token and eight experts, one a wave: every task of a token makes the whole normed row
and publishes its own sixteenth of it. Scores go out as routing keys with their sigmoids, so that a
consumer's routing starts at the integer maxima. The choice itself is ``routing``'s.
"""

import flydsl.expr as fx

from m3lab.kernels.device import gfx950, mailbox, mx
from m3lab.kernels.device.context import first_task, inbox_view, scratch_view, stamp
from m3lab.kernels.device.gfx950 import const_expr, range_constexpr, traced
from m3lab.kernels.device.mailbox import PairRange
from m3lab.kernels.device.wave import WHOLE_WAVE, add, butterfly, div, mod, reduce
from m3lab.kernels.plan import THREADS, WAVES
from m3lab.kernels.stages import Point
from m3lab.layout.regions import ROUTER_EXPERTS, WORD_BYTES
from m3lab.model.shapes import MAX_TOKENS, MX_BLOCK

LOG2E = 1.4426950408889634
MAGNITUDE = 0x7FFFFFFF
EXPERT_BITS = 127  # low bits of a routing key: 127 - expert, so that a tie goes to the lower one
GATE_STEP = gfx950.LANES * 8  # elements of a gate row that a wave reads at once, 16 bytes a lane
LANE_ELEMENTS = 4  # of the normed row that a lane quantizes


@traced
def router(ctx):
    """Every (token, eight experts); the tokens' norms and products run on different CTAs, not one
    after another in each (four tokens: 74.7 -> 64.1 us, measured upstream)."""
    plan = ctx.plan
    first, stride = first_task(ctx, "router"), plan.blocks
    if const_expr(ctx.tuning.router_by_token):
        stride = plan.router_ctas
        first = gfx950.select(first < stride, first, fx.Int32(plan.router_tasks))
    for task in range(first, plan.router_tasks, stride):
        router_task(ctx, fx.Int32(task))


def router_task(ctx, task):
    per_token = ctx.plan.router_tasks_per_token
    token, part = div(task, per_token), mod(task, per_token)
    expert = part * ROUTER_EXPERTS + ctx.wave
    # everything that needs no wait is requested before it
    gate = request_gate(ctx, expert)
    norm = request_row(ctx, ctx.args.g_post, 0)
    residual = request_row(ctx, ctx.args.h_in, token)
    bias = gfx950.bitcast_f32(gfx950.load(gfx950.buffer(ctx.args.bias), expert * WORD_BYTES))
    sums = poll_sums(ctx, token)
    stamp(ctx, Point.ROW_IN)
    row = [a + h for a, h in zip(sums, residual(), strict=True)]
    write_h_mid(ctx, token, part, row)
    norm_row(ctx, row, norm())
    gfx950.barrier()
    stamp(ctx, Point.ROW_NORMED)
    publish_row(ctx, token, part)
    stamp(ctx, Point.ROW_QUANTIZED)
    logit = multiply_gate(ctx, gate)
    stamp(ctx, Point.LOGIT)
    publish_scores(ctx, token, expert, logit, bias)
    gfx950.barrier()


def row_elements(ctx):
    """Consecutive elements of the row that a thread holds, a multiple of 4 (12 of 6144)."""
    return ctx.shape.hidden // THREADS


def request_gate(ctx, expert):
    """The expert's gate row, bf16 pairs, eight elements a lane and step."""
    hidden = ctx.shape.hidden
    table, row = gfx950.buffer(ctx.args.w_gate), expert * (hidden * 2)
    steps = range(hidden // GATE_STEP)
    return [gfx950.load(table, ctx.lane * 16 + i * GATE_STEP * 2, 4, base=row) for i in steps]


def request_row(ctx, address, token):
    """Request this thread's elements of row ``token`` of a bf16 table -> a function of their fp32
    values, called where they are needed."""
    n, row_bytes = row_elements(ctx) // 2, ctx.shape.hidden * 2
    table, at = gfx950.buffer(address), ctx.tid * (n * WORD_BYTES)
    words = []
    for first in range(0, n, 4):
        count = min(4, n - first)
        wide = gfx950.load(table, at + first * WORD_BYTES, count, base=token * row_bytes)
        words += [wide[i] for i in range(count)]
    return lambda: [x for word in words for x in gfx950.bf16_floats(word)]


def poll_sums(ctx, token):
    """This thread's elements of the all-reduced attention row, fp32."""
    hidden, n = ctx.shape.hidden, row_elements(ctx)
    owned = ctx.plan.two_shot
    box = inbox_view(ctx, "a_ag") if owned else scratch_view(ctx, "a")
    at = div(token * hidden + ctx.tid * n, 2)
    got = mailbox.poll(ctx.tag, [PairRange(box, at + i, 2) for i in range(0, n // 2, 2)])
    return [x for pair in got for word in pair for x in gfx950.bf16_floats(word)]


@traced
def write_h_mid(ctx, token, part, row):
    """h_mid = bf16(bf16(sum) + residual) where the output projection did not write it: each task
    its sixteenth of the row."""
    plan = ctx.plan
    if const_expr(plan.tokens == 1 or plan.two_shot):
        if div(ctx.tid, THREADS // plan.router_tasks_per_token) == part:
            words = [gfx950.pack_bf16x2(row[i], row[i + 1]) for i in range(0, len(row), 2)]
            at = token * (ctx.shape.hidden * 2) + ctx.tid * (len(words) * WORD_BYTES)
            table = gfx950.buffer(ctx.args.h_mid)
            for i in range_constexpr(0, len(words), 2):
                pair = fx.Vector.from_elements(words[i : i + 2], fx.Int32)
                gfx950.store(table, at + i * WORD_BYTES, pair)


def sum_of_squares(values):
    """In order, one rounding a term."""
    total = fx.Float32(0.0)
    for x in values:
        total = gfx950.fma(x, x, total)
    return total


@traced
def norm_row(ctx, row, norm):
    """lds.pool := the whole normed row as bf16 pairs: row * rsqrt(mean square + eps) * (1 + w)."""
    squares = butterfly(sum_of_squares(row), WHOLE_WAVE)
    if ctx.lane == 0:
        gfx950.lds_store(ctx.lds.red, ctx.wave, squares)
    gfx950.barrier()
    halves = [gfx950.lds_load(ctx.lds.red, i, 4, fx.Float32) for i in range(0, WAVES, 4)]
    total = reduce([half[i] for half in halves for i in range(4)], add)
    stamp(ctx, Point.SQUARES_SUMMED)
    hidden = fx.Float32(float(ctx.shape.hidden))
    mean = gfx950.div_rn(total, hidden, fx.Float32(1.0 / ctx.shape.hidden))
    inverse = gfx950.rsq(mean + ctx.spec.eps)
    normed = [(x * inverse) * (w + 1.0) for x, w in zip(row, norm, strict=True)]
    at = ctx.tid * (len(row) // 2)
    for i in range_constexpr(0, len(row), 4):
        words = [gfx950.pack_bf16x2(normed[j], normed[j + 1]) for j in (i, i + 2)]
        gfx950.lds_store(ctx.lds.pool, at + i // 2, fx.Vector.from_elements(words, fx.Int32), 2)


@traced
def publish_row(ctx, token, part):
    """This task's sixteenth of the normed row as MXFP8: four elements a lane, eight lanes a
    block."""
    hidden = ctx.shape.hidden
    size = hidden // ctx.plan.router_tasks_per_token
    block_lanes = MX_BLOCK // LANE_ELEMENTS
    if ctx.tid < size // LANE_ELEMENTS:
        words = gfx950.lds_load(ctx.lds.pool, part * (size // 2) + ctx.tid * 2, 2)
        values = [x for i in range(2) for x in gfx950.bf16_floats(words[i])]
        scale, inverse = mx.block_scale(values, (1, 2, 4))
        word = token * (hidden // 4) + part * (size // 4) + ctx.tid
        elements = mx.fp8_elements(values, inverse)
        mailbox.put_words(ctx.tag, scratch_view(ctx, "xn8"), word, [elements])
        if mod(ctx.tid, block_lanes) == 0:
            first = token * (hidden // MX_BLOCK) + part * (size // MX_BLOCK)
            block = first + div(ctx.tid, block_lanes)
            mailbox.put_words(ctx.tag, scratch_view(ctx, "xsc"), block, [scale])


def multiply_gate(ctx, gate):
    """The wave's logit: four chains of bf16 pair products, one per word of a lane's 16 bytes."""
    chains = [fx.Float32(0.0)] * 4
    for i, weights in enumerate(gate):
        row = gfx950.lds_load(ctx.lds.pool, (i * gfx950.LANES + ctx.lane) * 4, 4)
        chains = [gfx950.dot2_bf16(weights[j], row[j], chains[j]) for j in range(4)]
    return butterfly((chains[0] + chains[1]) + (chains[2] + chains[3]), WHOLE_WAVE)


def routing_key(score, expert):
    """``score``'s bits as a signed-orderable integer, its low bits the expert's: one integer
    maximum is a pick."""
    bits = gfx950.bitcast_i32(score)
    bits = gfx950.select(bits < 0, bits ^ fx.Int32(MAGNITUDE), bits)
    return (bits & fx.Int32(~EXPERT_BITS)) | (EXPERT_BITS - expert)


@traced
def publish_scores(ctx, token, expert, logit, bias):
    """(routing key, sigmoid) of this wave's expert to every copy, a lane each."""
    sigmoid = gfx950.rcp(1.0 + gfx950.exp2(gfx950.bf16_round(logit) * -LOG2E))
    key = routing_key(sigmoid + bias, expert)
    if ctx.lane < ctx.tuning.score_copies:
        experts = ctx.shape.model.experts
        at = ((ctx.lane * MAX_TOKENS + token) * experts + expert) * 2
        words = [key, gfx950.bitcast_i32(sigmoid)]
        mailbox.put_words(ctx.tag, scratch_view(ctx, "scores"), at, words)
