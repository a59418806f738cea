"""Stage 5, narrow form (1..4 tokens): the order in which a CTA goes through the experts.

The shared expert's weights are requested first. Some waves route while the others fetch the normed
rows; the shared tasks run while the first routed weights are on their way (or, by a knob, before
the routing, which they do not need). Then the routed tasks as a software pipeline, and the CTA's
down task. What a task computes is in ``up_gate`` and ``down``.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.context import first_task, stamp
from m3lab.kernels.device.gfx950 import traced
from m3lab.kernels.device.wave import div
from m3lab.kernels.moe import down, routing, up_gate
from m3lab.kernels.moe.down import DownTask
from m3lab.kernels.stages import Point


@dataclass(frozen=True)
class Jobs:
    """What this CTA runs: its shared task, whether it has one, whether it has a routed task, its
    down task. All uniform."""

    shared: Any
    has_shared: Any
    has_routed: Any
    down: DownTask


def experts(ctx):
    plan = ctx.plan
    shared = first_task(ctx, "shared")
    jobs = Jobs(
        shared=shared,
        has_shared=shared < plan.shared_tasks,
        has_routed=up_gate.RoutedTask(ctx, 0).exists,
        down=down.down_task(ctx),
    )
    if ctx.tuning.shared_after_routing:
        tiles = request_late(ctx, jobs)
    else:
        tiles = None
        shared_first(ctx, jobs)
    routed_and_down(ctx, jobs, tiles)


@traced
def shared_first(ctx, jobs):
    if jobs.has_shared:
        tiles = up_gate.request_shared(ctx, jobs.shared)
        routing.fetch_rows(ctx)
        gfx950.barrier()
        up_gate.compute_shared(ctx, jobs.shared, tiles)
        further_shared(ctx, jobs)


def further_shared(ctx, jobs):
    """A CTA's shared tasks after its first, where there are more of them than CTAs."""
    plan = ctx.plan
    for i in range(1, plan.shared_rounds):
        one_more_shared(ctx, jobs.shared + i * plan.blocks)


@traced
def one_more_shared(ctx, task):
    if task < ctx.plan.shared_tasks:
        tiles = up_gate.request_shared(ctx, task)
        gfx950.barrier()  # wave 0 has read the task before's partials
        up_gate.compute_shared(ctx, task, tiles)


def request_late(ctx, jobs):
    """The shared task's weights go out before the waits, on a CTA without one through a buffer
    that holds nothing."""
    task = fx.min(jobs.shared, ctx.plan.shared_tasks - 1)
    return up_gate.request_shared(ctx, task, present=jobs.has_shared)


def has_work(ctx, jobs):
    """Whether anything but a shared task that has run already is this CTA's."""
    work = jobs.has_routed | jobs.down.exists
    return work | jobs.has_shared if ctx.tuning.shared_after_routing else work


@traced
def routed_and_down(ctx, jobs, shared):
    """``shared``: the shared task's tiles where it runs after the routing, else None."""
    if has_work(ctx, jobs):
        rows_and_routing(ctx, jobs)
        stamp(ctx, Point.ROUTED)
        gfx950.barrier()
        stamp(ctx, Point.ROUTING_DONE)
        requested = run_routed(ctx, jobs, shared)
        stamp(ctx, Point.UP_GATE_DONE)
        run_down(ctx, jobs, *requested)


def rows_and_routing(ctx, jobs):
    """The rows that this CTA's tasks are of, into LDS, and every token's experts. Rows are there
    before scores, but fetching them takes as long as the scores do: the waves that do not route
    fetch them while the others wait for scores."""
    needs = needed_rows(ctx, jobs)
    for needed, token in needs:
        await_needed(ctx, needed, token)
    if ctx.tuning.rows_before_routing:
        store_needed_rows(ctx, needs, 0)
        routing.route_tokens(ctx)
    else:
        share_waves(ctx, needs)


@traced
def share_waves(ctx, needs):
    if ctx.wave < ctx.spec.tokens:
        routing.route_token(ctx, ctx.wave)
    else:
        store_needed_rows(ctx, needs, ctx.spec.tokens)


def needed_rows(ctx, jobs):
    """[(whether, a token or None for every one)], at most one of them true: a CTA whose shared task
    is yet to run needs every token's row, another the row that its routed tasks are of. One whose
    shared task has run has all of them."""
    plan = ctx.plan
    share = plan.ug_ctas_per_token
    own = None if share is None else div(ctx.bid, share)
    needs = [(jobs.has_routed & (jobs.shared >= plan.shared_tasks), own)]
    return [(jobs.has_shared, None), *needs] if ctx.tuning.shared_after_routing else needs


@traced
def await_needed(ctx, needed, token):
    if needed:
        routing.await_rows(ctx, token)


def store_needed_rows(ctx, needs, waves_from):
    for needed, token in needs:
        keep_if(ctx, needed, token, waves_from)


@traced
def keep_if(ctx, needed, token, waves_from):
    if needed:
        routing.store_rows_to_lds(ctx, token, waves_from)


def run_routed(ctx, jobs, shared):
    """Every routed task, the next one's weights requested before a task's products; -> the down
    stage's requested tiles: (routed ones by token, the shared expert's).

    The first token's down weights stream under the exchange of the intermediates; requested with
    the first up / gate weights they share the CU's bandwidth and delay them (34.3 -> 32.8 us on
    four ranks, measured upstream). Two tokens' are in flight when the down products start.
    """
    rounds = ctx.plan.ug_rounds
    tasks = [up_gate.RoutedTask(ctx, i) for i in range(rounds)]
    tiles = up_gate.request_routed(ctx, tasks[0])
    routed, shared_tiles = {}, None
    if ctx.tuning.early_down_weights:
        routed, shared_tiles = request_down(ctx, jobs)
    stamp(ctx, Point.WEIGHTS_REQUESTED)
    if shared is not None:
        compute_late(ctx, jobs, shared)
    for i, task in enumerate(tasks):
        next_tiles = up_gate.request_routed(ctx, tasks[i + 1]) if i + 1 < rounds else None
        compute_routed(ctx, task, tiles, i % 2)
        if i == ctx.plan.down_round and not routed:
            routed, shared_tiles = request_down(ctx, jobs)
        if i == rounds - 1 and min(ctx.spec.tokens, ctx.plan.down_in_flight) > 1:
            routed[1] = down.request_routed(ctx, 1, jobs.down)
        tiles = next_tiles
    return routed, shared_tiles


def request_down(ctx, jobs):
    """The first token's tiles by token, and the shared expert's."""
    routed = {0: down.request_routed(ctx, 0, jobs.down)}
    return routed, down.request_shared(ctx, jobs.down)


@traced
def compute_late(ctx, jobs, tiles):
    if jobs.has_shared:
        up_gate.compute_shared(ctx, jobs.shared, tiles)
        further_shared(ctx, jobs)


@traced
def compute_routed(ctx, task, tiles, half):
    if task.exists:
        up_gate.compute_routed(ctx, task, tiles, half)


@traced
def run_down(ctx, jobs, routed, shared):
    if jobs.down.exists:
        down.run(ctx, jobs.down, routed, shared)
        stamp(ctx, Point.END)
