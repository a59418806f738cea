"""What every stage of the post-attention kernel is handed: the build, and the CTA's own values.

A ``TraceContext`` is made once, in ``post_attn``, at the start of a trace; the stages are functions
over it. The helpers here are those that belong to no stage: a region's address, a stage's first
task, a timeline stamp.
"""

from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.gfx950 import const_expr, traced
from m3lab.kernels.device.mailbox import MailboxView
from m3lab.kernels.plan import TL_POINTS, Plan
from m3lab.kernels.stages import Stage
from m3lab.kernels.tuning import Tuning
from m3lab.layout.regions import Region, peer_layout, scratch_layout
from m3lab.model.shapes import CacheLayout, RankShape


@dataclass(frozen=True)
class KernelSpec:
    """The constants of one build: everything that is not a kernel argument."""

    plan: Plan
    cache: CacheLayout
    sm_scale: float
    eps: float
    route_scale: float
    shared_weight: float
    swiglu_limit: float
    init_blocks: int
    local_blocks: int
    timeline: bool
    shared_fp8: bool
    stages: tuple[Stage, ...]

    @property
    def shape(self) -> RankShape:
        return self.plan.shape

    @property
    def tokens(self) -> int:
        return self.plan.tokens

    @property
    def npes(self) -> int:
        return self.plan.npes

    @property
    def tuning(self) -> Tuning:
        return self.plan.tuning

    @cached_property
    def regions(self) -> dict[str, Region]:
        return scratch_layout(self.shape)

    @cached_property
    def peer_regions(self) -> dict[str, Region]:
        return peer_layout(self.shape, self.npes)


@dataclass(frozen=True)
class TraceContext:
    """A trace of the kernel: traced values of this thread, wave and CTA.

    ``args`` holds the kernel arguments by name, ``lds`` the LDS arrays. ``wave`` is uniform;
    ``group`` and ``row`` are a lane's place in a matrix operand (lane = 16 group + row).
    """

    spec: KernelSpec
    args: SimpleNamespace
    lds: SimpleNamespace
    tid: Any
    bid: Any
    lane: Any
    wave: Any
    group: Any
    row: Any
    scratch: Any
    inbox: Any
    tag: Any

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def shape(self) -> RankShape:
        return self.spec.shape

    @property
    def tuning(self) -> Tuning:
        return self.spec.tuning


def scratch_view(ctx: TraceContext, name: str) -> MailboxView:
    """A region of this rank's scratch."""
    return MailboxView(ctx.scratch, ctx.spec.regions[name].offset, gfx950.DEVICE)


def inbox_view(ctx: TraceContext, name: str) -> MailboxView:
    """A region of this rank's own peer buffer, which the peers write."""
    return MailboxView(ctx.inbox, ctx.spec.peer_regions[name].offset, gfx950.SYSTEM)


def first_task(ctx: TraceContext, stage: str) -> Any:
    """This CTA's first task of ``stage``; the next ones are ``blocks`` apart."""
    plan = ctx.plan
    base = plan.bases[stage]
    if base == 0:
        return ctx.bid
    # one conditional wrap: a remainder by a CTA count that is no power of two is a division
    shifted = ctx.bid - base
    return gfx950.select(shifted < 0, shifted + plan.blocks, shifted)


@traced
def stamp(ctx, point):
    """Timeline: the clock at which this CTA passes ``point``.

    Kept in LDS until the kernel ends: a global store per stamp would put its write latency on
    every later wait for loads.
    """
    if const_expr(ctx.spec.timeline):
        # a compile-time and a traced condition cannot share one ``and``
        if ctx.tid == 0:
            gfx950.lds_store(ctx.lds.stamps, int(point), gfx950.clock())


@traced
def clear_stamps(ctx):
    """Unstamped points read 0. The stamping wave clears them itself: no barrier is needed."""
    if const_expr(ctx.spec.timeline):
        if ctx.tid < TL_POINTS:
            gfx950.lds_store(ctx.lds.stamps, ctx.tid, gfx950.i64(0))


@traced
def flush_stamps(ctx):
    """The CTA's stamps to ``tl``, int64 [blocks][points]."""
    if const_expr(ctx.spec.timeline):
        if ctx.tid < TL_POINTS:
            at = gfx950.i64(ctx.bid * TL_POINTS + ctx.tid) * 8
            gfx950.store_i64(ctx.args.tl + at, gfx950.lds_load(ctx.lds.stamps, ctx.tid))
