"""The stages of a launch: one record each, from which everything that lists stages is derived.

A record says what a stage is called, where its tasks run, what it reads and writes, where it stamps
the timeline, the least bytes it must move, and which verdicts prove it. ``until``, attribution,
floors, hand-off names, verdict order, tables and the Gantt's legend come from here. What a stage
computes is in its own module. Plain Python: no flydsl, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from types import MappingProxyType
from typing import Any

from m3lab.kernels import floors
from m3lab.kernels.floors import Floor, StepBytes
from m3lab.kernels.plan import Plan

KERNEL = "kernel"  # what belongs to no stage: the launch's opening and its stamps


class Point(IntEnum):
    """Timeline slots by name: ``stamp(ctx, Point.BLOCKS_SELECTED)``. A CTA writes a slot once."""

    BEGIN = 0
    SPLIT_DONE = 1
    ROUTED = 2
    PARTITIONS_IN = 3
    O_PROJ_DONE = 4
    ROUTER_DONE = 5
    ROUTING_DONE = 6
    WEIGHTS_REQUESTED = 7
    UP_GATE_DONE = 8
    ROUTED_MULTIPLIED = 9
    INTERMEDIATES_IN = 10
    END = 11
    LOADS_ISSUED = 12
    SCORED = 13
    WEIGHED = 14
    VALUES_SUMMED = 15
    BLOCKS_SELECTED = 17
    KEYS_MADE = 18
    RANKED = 19
    KEYS_SHARED = 20
    SCORES_IN = 21
    ROW_IN = 22
    LOGIT = 23
    SQUARES_SUMMED = 24
    ROW_NORMED = 25
    ROW_QUANTIZED = 26


@dataclass(frozen=True)
class Tasks:
    """One kind of task of a stage. ``per_cta(plan)``: how many of them each CTA runs."""

    name: str
    per_cta: Callable[[Plan], list[int]]


@dataclass(frozen=True)
class Stage:
    """One stage of a launch.

    ``name``: as reports print it, and the mark of its operations. ``entry``: "module:function",
    called by the launch with the trace context; None where another stage's entry runs it.
    ``done``: stamped by the launch after the entry. ``tasks``: what runs on which CTA.
    ``reads``, ``writes``: mailbox regions and argument buffers. ``hand_offs``: region -> what is
    handed over there, in words, for the regions that this stage writes and somebody polls.
    ``points``: where the timeline is stamped -> meaning, in the order of a CTA. ``floor``: the
    least bytes it moves. ``verdicts``: what proves it, in order. ``ends_builds``: a truncated build
    may stop after it (``until``).
    """

    name: str
    floor: Callable[[StepBytes], Floor]
    verdicts: tuple[str, ...]
    entry: str | None = None
    done: Point | None = None
    tasks: tuple[Tasks, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    hand_offs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    points: Mapping[Point, str] = field(default_factory=lambda: MappingProxyType({}))
    ends_builds: bool = False

    def load(self) -> Callable[[Any], None] | None:
        """The function that the launch calls; imports the stage's module, and so flydsl."""
        if self.entry is None:
            return None
        module, function = self.entry.split(":")
        return getattr(import_module(module), function)


def spread(base: str, count: Callable[[Plan], int]) -> Callable[[Plan], list[int]]:
    """``Tasks.per_cta`` of ``count(plan)`` tasks, one after another from the stage's first CTA."""

    def per_cta(plan: Plan) -> list[int]:
        out = [0] * plan.blocks
        for task in range(count(plan)):
            out[(plan.bases[base] + task) % plan.blocks] += 1
        return out

    return per_cta


SELECT = Stage(
    name="select",
    entry="m3lab.kernels.attention.select_long:select_long",
    reads=("seq_lens", "block_table", "iscore", "sel_long"),
    writes=("sparse_table", "sel_long"),
    hand_offs={"iscore": "indexer scores", "sel_long": "long selection"},
    points={
        Point.KEYS_MADE: "sort keys made",
        Point.KEYS_SHARED: "keys in LDS, or long candidates sent",
        Point.RANKED: "ranks known",
        Point.BLOCKS_SELECTED: "blocks selected",
    },
    floor=floors.select,
    verdicts=("sparse_table",),
)
SPLIT = Stage(
    name="split",
    entry="m3lab.kernels.attention.split:split",
    done=Point.SPLIT_DONE,
    tasks=(Tasks("split", spread("split", lambda plan: plan.split_tasks)),),
    reads=("q", "k_cache", "v_cache", "k_scale", "v_scale"),
    writes=("sp_o", "sp_m", "sp_l"),
    hand_offs={"sp_o": "split outputs", "sp_m": "split maxima", "sp_l": "split sums"},
    points={
        Point.LOADS_ISSUED: "loads issued, q in LDS",
        Point.SCORED: "scores",
        Point.WEIGHED: "probabilities",
        Point.VALUES_SUMMED: "PV",
        Point.SPLIT_DONE: "split over",
    },
    floor=floors.split,
    verdicts=("sp_o", "sp_m", "sp_l"),
)
MERGE = Stage(
    name="merge",
    entry="m3lab.kernels.attention.merge:merge",
    tasks=(Tasks("merge", spread("merge", lambda plan: plan.merge_tasks)),),
    reads=("sp_o", "sp_m", "sp_l"),
    writes=("attnq", "attnq_s"),
    # the row is plain words, its scale's pair is their flag
    hand_offs={"attnq": "merged row", "attnq_s": "merged row"},
    points={Point.PARTITIONS_IN: "partitions or merged scales in"},
    floor=floors.merge,
    verdicts=("attnq",),
)
O_PROJ = Stage(
    name="o_proj",
    entry="m3lab.kernels.attention.o_proj:project",
    done=Point.O_PROJ_DONE,
    tasks=(Tasks("o_proj", spread("o_proj", lambda plan: plan.o_tasks)),),
    reads=("w_o", "s_o", "h_in", "attnq", "attnq_s", "peers", "attn"),
    writes=("attn", "a", "a_ag", "h_mid"),
    hand_offs={
        "attn": "attention partials of the ranks",
        "a_ag": "attention sums of the owner",
        "a": "attention sums",
    },
    points={Point.O_PROJ_DONE: "output projection over"},
    floor=floors.o_proj,
    verdicts=("partial", "a", "a_sum", "h_mid"),
    ends_builds=True,
)
ROUTER = Stage(
    name="router",
    entry="m3lab.kernels.moe.router:router",
    done=Point.ROUTER_DONE,
    tasks=(Tasks("router", spread("router", lambda plan: plan.router_tasks)),),
    reads=("w_gate", "bias", "g_post", "h_in", "a", "a_ag"),
    writes=("xn8", "xsc", "scores", "h_mid"),
    hand_offs={"xn8": "normed row", "xsc": "normed row's scales", "scores": "router scores"},
    points={
        Point.ROW_IN: "row in",
        Point.SQUARES_SUMMED: "sum of squares",
        Point.ROW_NORMED: "row normed",
        Point.ROW_QUANTIZED: "row quantized",
        Point.LOGIT: "logit",
        Point.ROUTER_DONE: "router over",
    },
    floor=floors.router,
    verdicts=("xn8", "xsc", "sigmoid", "keys", "copies"),
    ends_builds=True,
)
ROUTING = Stage(
    name="routing",
    entry="m3lab.kernels.moe.per_token:experts",
    reads=("xn8", "xsc", "scores"),
    writes=("sel",),
    hand_offs={"sel": "selected experts"},
    points={
        Point.SCORES_IN: "scores in",
        Point.ROUTED: "routed",
        Point.ROUTING_DONE: "routing settled",
    },
    floor=floors.routing,
    verdicts=("sel", "picks", "weights"),
)
UP_GATE = Stage(
    name="up_gate",
    tasks=(
        Tasks("routed up_gate", lambda plan: [plan.ug_tasks_of(c) for c in range(plan.blocks)]),
        Tasks("shared up_gate", spread("shared", lambda plan: plan.shared_tasks)),
    ),
    reads=("w13", "s13", "sh_args", "shared_w13", "shared_s13"),
    writes=("mid",),
    hand_offs={"mid": "intermediates"},
    points={
        Point.WEIGHTS_REQUESTED: "first weights in flight",
        Point.ROUTED_MULTIPLIED: "last routed task's MFMAs done",
        Point.UP_GATE_DONE: "up / gate over",
    },
    floor=floors.up_gate,
    verdicts=("mid",),
)
DOWN = Stage(
    name="down",
    tasks=(Tasks("down", spread("down", lambda plan: plan.down_tasks)),),
    reads=("w2", "s2", "sh_args", "shared_w2", "shared_s2", "mid", "peers", "ffn"),
    writes=("ffn", "ffn_ag", "ar_out"),
    hand_offs={"ffn": "MLP partials of the ranks", "ffn_ag": "MLP sums of the owner"},
    points={Point.INTERMEDIATES_IN: "intermediates in", Point.END: "end"},
    floor=floors.down,
    verdicts=("ffn", "ffn_sum", "ar_out"),
)

# In program order, which is a topological order of the hand-offs.
POST_ATTN = (SELECT, SPLIT, MERGE, O_PROJ, ROUTER, ROUTING, UP_GATE, DOWN)
# What the launch itself touches.
KERNEL_READS, KERNEL_WRITES = ("step",), ("tl",)


def until_names(stages: tuple[Stage, ...] | None = None) -> tuple[str, ...]:
    """The stages that a truncated build may stop after."""
    stages = POST_ATTN if stages is None else stages
    return tuple(stage.name for stage in stages if stage.ends_builds)


def stages_until(until: str | None, stages: tuple[Stage, ...] | None = None) -> tuple[Stage, ...]:
    """The stages of a build: up to and with ``until``; None builds them all.

    ValueError, in one sentence, for another name.
    """
    stages = POST_ATTN if stages is None else stages
    if until is None:
        return stages
    names = until_names(stages)
    if until not in names:
        raise ValueError(f"until must be one of {', '.join(names)} or None, got {until!r}")
    last = next(i for i, stage in enumerate(stages) if stage.name == until)
    return stages[: last + 1]


def stage_of_point(stages: tuple[Stage, ...] = POST_ATTN) -> dict[Point, tuple[str, str]]:
    """Point -> (stage, meaning), in the order of a CTA."""
    return {p: (s.name, meaning) for s in stages for p, meaning in s.points.items()}


def hand_off_words(stages: tuple[Stage, ...] = POST_ATTN) -> dict[str, str]:
    """Region -> what is handed over there, in words."""
    return {region: words for s in stages for region, words in s.hand_offs.items()}


def undeclared(
    touched: Mapping[str, Mapping[str, set[str]]], stages: tuple[Stage, ...] = POST_ATTN
) -> list[str]:
    """A sentence for each region or buffer that a stage touched and does not declare.

    ``touched``: stage -> "read" or "write" -> names, as the interpreter saw them.
    """
    declared = {s.name: {"read": {*s.reads}, "write": {*s.writes}} for s in stages}
    declared[KERNEL] = {"read": {*KERNEL_READS}, "write": {*KERNEL_WRITES}}
    found = []
    for stage, by_kind in sorted(touched.items()):
        for kind, names in by_kind.items():
            known = declared[stage][kind] if stage in declared else set()
            found += [
                f"{stage} {kind}s {name}, which it does not declare"
                for name in sorted(names - known)
            ]
    return found
