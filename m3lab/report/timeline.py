"""The kernel's own stamps as tables, a Gantt over CTAs, a trace file, and the critical path.

Stamps are what the kernel writes (int64 [blocks, 32] ticks of 10 ns), whoever's clock they were
taken from. A clock's are *modelled*, a GPU's are *measured*: every table carries the word in its
column names, every picture and trace in its title, and there is no default. What stamps cannot
tell, waiting from working, comes from a modelled clock's polls (``m3lab.report.handoffs``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MultipleLocator
from torch import Tensor

from m3lab.kernels.stages import POST_ATTN, UP_GATE, Point, stage_of_point
from m3lab.report import plots
from m3lab.report.handoffs import place as poll_place
from m3lab.report.trace_check import KINDS, check_trace
from m3lab.sweep.results import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from m3lab.clock.clock import Hop
    from m3lab.clock.device_model import DeviceModel
    from m3lab.kernels.plan import Plan
    from m3lab.step import DecodeStep

__all__ = ["check_trace"]  # beside what is defined here

Kind = Literal["modelled", "measured"]
TICKS_PER_US = 100

# point -> (stage that ends or is under way there, meaning)
POINTS: dict[int, tuple[str, str]] = {
    Point.BEGIN: ("start", "kernel begins"),
    **{int(point): words for point, words in stage_of_point().items()},
}
END, UNSTAMPED = 32, "unstamped"  # a CTA's end, which the kernel does not stamp
STAGES = tuple(dict.fromkeys([s for s, _ in POINTS.values() if s != "start"] + [UNSTAMPED]))
COLOURS = dict(zip(STAGES, (*plots.PALETTE, plots.INK), strict=True))
ROUTED, SHARED = (tasks.name for tasks in UP_GATE.tasks)
FLUSH_US = 1.0  # after its last stamp a CTA still writes its stamps to memory
WALK_US = 0.2  # a stage that a CTA only walks past takes less


def frame(
    stamps: Tensor | Sequence[Tensor], kind: Kind, ends: Tensor | None = None
) -> pd.DataFrame:
    """One row per stamped point: rank, cta, point, stage, meaning, ``<kind>_us``.

    ``stamps``: int64 [blocks, points], one tensor a rank; 0 is a point not stamped. Measured clocks
    of several GPUs share no zero: each rank's first stamp is its 0. Modelled time keeps its zero,
    the launch. ``ends``: when each CTA ended, modelled us, all ranks' in a row (a clock's
    ``modelled().cta_modelled_us``): a point more for CTAs that go on after their last stamp.
    Raises ValueError for another kind, or where nothing was stamped.
    """
    if kind not in KINDS:
        raise ValueError(f"stamps are {' or '.join(KINDS)}, got {kind!r}")
    ranks = [stamps] if isinstance(stamps, Tensor) else stamps
    parts = []
    for rank, ticks in enumerate(ranks):
        values = ticks.cpu().numpy()
        cta, point = np.nonzero(values)
        if not len(cta):
            raise ValueError(
                f"rank {rank} has no stamp: build with timeline=True, and in the interpreter run "
                "with a clock"
            )
        when = values[cta, point].astype(np.int64)
        if kind == "measured":
            when = when - when.min()
        us = when / TICKS_PER_US
        if ends is not None:
            mine = ends.view(len(ranks), -1)[rank].numpy()
            on = np.flatnonzero(mine > values.max(1) / TICKS_PER_US + FLUSH_US)
            cta, point = np.append(cta, on), np.append(point, np.full(len(on), END))
            us = np.append(us, mine[on])
        parts.append(pd.DataFrame({"rank": rank, "cta": cta, "point": point, f"{kind}_us": us}))
    table = pd.concat(parts, ignore_index=True)
    names = POINTS | {END: (UNSTAMPED, "CTA ends")}
    table = table[table["point"].isin(names)]
    table.insert(3, "stage", [names[p][0] for p in table["point"]])
    table.insert(4, "meaning", [names[p][1] for p in table["point"]])
    return table.sort_values(["rank", "cta", f"{kind}_us", "point"], ignore_index=True)


def kind_of(table: pd.DataFrame) -> Kind:
    """Whether a table's times are modelled or measured; ValueError where it says neither or both"""
    found = [k for k in KINDS if any(k in str(c) for c in table.columns)]
    if len(found) != 1:
        raise ValueError(f"a timeline's columns must say modelled or measured, got {found}")
    return "modelled" if found[0] == "modelled" else "measured"


def intervals(table: pd.DataFrame, waits: pd.DataFrame | None = None) -> pd.DataFrame:
    """Each CTA's time from one stamp to the next, named after the later one.

    Columns: rank, cta, stage, meaning, ``start_<kind>_us``, ``end_<kind>_us``, ``<kind>_us``. A
    stamp that every CTA makes, task or not, ends an interval of waiting as well as of work:
    ``waits`` (of ``handoffs.waits``) tells them apart in ``waiting_<kind>_us``.
    """
    kind = kind_of(table)
    time = table[f"{kind}_us"]
    same = (table["cta"] == table["cta"].shift()) & (table["rank"] == table["rank"].shift())
    out = pd.DataFrame(
        {
            "rank": table["rank"],
            "cta": table["cta"],
            "stage": table["stage"],
            "meaning": table["meaning"],
            f"start_{kind}_us": time.shift(),
            f"end_{kind}_us": time,
            f"{kind}_us": time - time.shift(),
        }
    )
    out = out[same].reset_index(drop=True)
    if waits is not None:
        out[f"waiting_{kind}_us"] = _overlaps(out, waits, kind)
    return out


def _overlaps(spans: pd.DataFrame, waits: pd.DataFrame, kind: Kind) -> pd.Series:
    """How much of each span its CTA waits; a CTA's waits do not overlap each other."""
    if kind_of(waits) != kind:
        raise ValueError(f"waits and stamps must be of one clock, got {kind_of(waits)} and {kind}")
    start, end = f"start_{kind}_us", f"end_{kind}_us"
    known = {key: rows.sort_values(start) for key, rows in waits.groupby(["rank", "cta"])}
    out = pd.Series(0.0, spans.index)
    for key, mine in spans.groupby(["rank", "cta"]):
        if key in known:
            theirs = known[key]
            edges = theirs[[start, end]].to_numpy()
            waited = np.repeat(np.cumsum(edges[:, 1] - edges[:, 0]), 2)
            waited[::2] -= edges[:, 1] - edges[:, 0]
            until = [np.interp(mine[when], edges.ravel(), waited) for when in (start, end)]
            out[mine.index] = until[1] - until[0]
    return out


def where_time_goes(table: pd.DataFrame, waits: pd.DataFrame | None = None) -> pd.DataFrame:
    """Per stage: CTAs with time in it, first start, last end, and the longest and median CTA.

    With ``waits`` also what of a median CTA's time is waiting for other CTAs, what is work (issue,
    memory, barriers), and how much of all CTAs' time in the stage is waiting.
    """
    kind = kind_of(table)
    time, wait = f"{kind}_us", f"waiting_{kind}_us"
    spans = intervals(table, waits)
    sums = {"start": (f"start_{time}", "min"), "end": (f"end_{time}", "max"), "took": (time, "sum")}
    sums |= {} if waits is None else {"waits": (wait, "sum")}
    per_cta = spans.groupby(["stage", "rank", "cta"]).agg(**sums).reset_index()
    per_cta = per_cta[per_cta["took"] > WALK_US]
    rows = []
    for stage in STAGES:
        each = per_cta[per_cta["stage"] == stage]
        if each.empty:
            continue
        row = {
            "stage": stage,
            "CTAs": len(each),
            f"first start, {kind} us": each["start"].min(),
            f"last end, {kind} us": each["end"].max(),
            f"median CTA, {kind} us": each["took"].median(),
            f"longest CTA, {kind} us": each["took"].max(),
        }
        if waits is not None:
            row |= {
                f"waiting, median CTA, {kind} us": each["waits"].median(),
                f"working, median CTA, {kind} us": (each["took"] - each["waits"]).median(),
                f"waiting, % of {kind} time": 100 * each["waits"].sum() / each["took"].sum(),
            }
        rows.append(row)
    return pd.DataFrame(rows).set_index("stage").round(2)


# ---------------------------------------------------------------------- the critical path


def critical_path(hops: Iterable[Hop]) -> pd.DataFrame:
    """The hand-offs a modelled step's end waited for, first to last, a row each."""
    return pd.DataFrame(
        [
            {
                "stage": hop.stage,
                "from": f"rank {hop.writer[0]} CTA {hop.writer[1]}",
                "to": f"rank {hop.reader[0]} CTA {hop.reader[1]}",
                "asked, modelled us": round(hop.asked_us, 2),
                "stored, modelled us": round(hop.stored_us, 2),
                "seen, modelled us": round(hop.seen_us, 2),
                "polled at": poll_place(hop.line, hop.stage),
            }
            for hop in hops
        ]
    )


def what_if(
    step: DecodeStep, stages: Sequence[str] | None = None, part: DeviceModel | None = None
) -> pd.DataFrame:
    """What the modelled step would gain were a stage's work free: an upper bound of tuning it.

    ``stages``: their names (default: all that the step runs). One run of the step for each, and
    one more, without the interpreter's checks. A stage that is free still waits for the others.
    """
    from m3lab.clock.clock import Clock
    from m3lab.report.calibrate import NO_CHECKS

    def time(free: Sequence[str]) -> float:
        clock = Clock(part, free=free)
        step.run(checks=NO_CHECKS, clock=clock)
        return clock.modelled().step_modelled_us

    whole = Clock(part)
    ran = step.run(checks=NO_CHECKS, clock=whole).report.counters.by_stage()
    base = whole.modelled().step_modelled_us
    names = stages or sorted(ran)
    rows = [{"free stage": name, "step, modelled us": time([name])} for name in names]
    out = pd.DataFrame(rows)
    out["gain, modelled us"] = base - out["step, modelled us"]
    return out.sort_values("gain, modelled us", ascending=False, ignore_index=True).round(2)


def what_if_chart(table: pd.DataFrame) -> Figure:
    """``what_if`` as a picture: what is left of the step, and what it gains, by the free stage."""
    gain, left = table["gain, modelled us"], table["step, modelled us"]
    base = float(gain.iloc[0] + left.iloc[0])
    title = (
        f"With the {table['free stage'].iloc[0]} stage free the modelled step would gain at most "
        f"{gain.iloc[0]:.1f} of {base:.1f} us"
    )
    fig, axis = plots.figure(title, height=0.42 * len(table) + 1.5)
    with plots.mpl.rc_context(plots.STYLE):
        y = np.arange(len(table))
        axis.barh(y, left, height=0.62, color=plots.FAINT, label="step with the stage free")
        axis.barh(y, gain, left=left, height=0.62, label="gain, at most", **plots.MODELLED_BAR)
        for at, us in zip(y, gain, strict=True):
            axis.text(base, at, f"  {us:.1f} us, {us / base:.0%}", va="center", fontsize=9)
        axis.set_yticks(y, [f"{name} free" for name in table["free stage"]])
        axis.invert_yaxis()
        axis.set_xlim(0, base * 1.22)
        axis.xaxis.grid(True)
        axis.set_xlabel("step, modelled us")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), title="modelled")
    return fig


# ---------------------------------------------------------------------- without any clock


def tasks(place: Plan) -> pd.DataFrame:
    """Tasks of each stage on each CTA: a row a stage in the order in which a CTA goes through
    them, a column a CTA. Of the narrow form (1..4 tokens)."""
    if place.grouped:
        raise ValueError(f"tasks are of the narrow form, got a wide step of {place.tokens} tokens")
    rows = {each.name: each.per_cta(place) for stage in POST_ATTN for each in stage.tasks}
    if not place.tuning.shared_after_routing:
        order = [name for name in rows if name != SHARED]
        order.insert(order.index(ROUTED), SHARED)
        rows = {name: rows[name] for name in order}
    rows = {name: row for name, row in rows.items() if any(row)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="stage", columns="CTA")


def occupancy(table: pd.DataFrame) -> Figure:
    """``tasks`` as a picture: how many tasks of each stage a CTA has."""
    loads, spread = table.sum(), (table > 0).sum(axis=1)
    title = (
        f"A CTA has {loads.min()} to {loads.max()} tasks; the {spread.idxmin()} stage is on the "
        f"fewest CTAs, {spread.min()} of {table.shape[1]}"
    )
    fig, axis = plots.figure(title, height=0.38 * len(table) + 1.5)
    with plots.mpl.rc_context(plots.STYLE):
        colours = plots.mpl.colors.ListedColormap(["white", *plots.mpl.colormaps["Blues"](
            np.linspace(0.35, 1.0, int(table.to_numpy().max()))
        )])  # fmt: skip
        levels = np.arange(table.to_numpy().max() + 2) - 0.5
        norm = plots.mpl.colors.BoundaryNorm(levels, colours.N)
        mesh = axis.pcolormesh(
            np.arange(table.shape[1] + 1), np.arange(len(table) + 1), table, cmap=colours, norm=norm
        )
        axis.set_yticks(np.arange(len(table)) + 0.5, table.index)
        axis.hlines(range(1, len(table)), 0, table.shape[1], color=plots.FAINT, linewidth=0.7)
        axis.set_xlabel("CTA")
        axis.invert_yaxis()
        fig.colorbar(mesh, ax=axis, ticks=range(len(levels) - 1), label="tasks")
    return fig


# ---------------------------------------------------------------------- pictures


def gantt(
    table: pd.DataFrame,
    rank: int = 0,
    hops: Iterable[Hop] = (),
    waits: pd.DataFrame | None = None,
) -> Figure:
    """The stages of each CTA of a rank over time, pale where it waits (``handoffs.waits``).

    ``hops``: the critical path as a line from CTA to CTA; what of it lies on another rank is drawn
    dotted, on the CTAs of the same number.
    """
    kind = kind_of(table)
    spans = intervals(table[table["rank"] == rank], waits)
    start, end = f"start_{kind}_us", f"end_{kind}_us"
    first, last = spans[start].min(), spans[end].max()
    launched = kind == "modelled" and first > WALK_US
    title = f"Rank {rank}, {kind}: " + (f"launch {first:.1f} us, then " if launched else "")
    fig, axis = plots.figure(title + _finding(spans, kind), height=5.2)
    with plots.mpl.rc_context(plots.STYLE):
        marks: list[Any] = []
        if launched:
            launch: dict[str, Any] = {
                "facecolor": "white",
                "edgecolor": plots.FAINT,
                "hatch": "///",
            }
            axis.axvspan(0, first, linewidth=0, **launch)
            marks.append(Patch(label="launch", linewidth=0, **launch))
        for stage in STAGES:
            mine = spans[spans["stage"] == stage]
            if len(mine):
                axis.add_collection(_bars(mine, start, end, color=COLOURS[stage]))
                marks.append(Patch(color=COLOURS[stage], label=stage))
        if waits is not None:
            mine = waits[waits["rank"] == rank]
            axis.add_collection(_bars(mine, start, end, color="white", alpha=PALE))
            marks.append(Patch(color="#E8E8E8", label="pale: waiting"))
        marks += _draw_path(axis, list(hops), rank)
        axis.set(xlabel=f"time, {kind} us", ylabel="CTA", xlim=(0, last * 1.01))
        axis.set_ylim(table["cta"].max() + 1.5, -0.5)
        axis.yaxis.set_major_locator(MultipleLocator(32))
        axis.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1), title=f"until ({kind})")
    return fig


PALE = 0.68  # of the white laid over a CTA that waits


def _bars(spans: pd.DataFrame, start: str, end: str, **style: Any) -> Any:
    """A rectangle a span, a CTA high; pixels in an SVG, which would hold thousands of shapes."""
    left, right, cta = (spans[c].to_numpy(dtype=float) for c in (start, end, "cta"))
    x = np.stack([left, right, right, left], 1)
    y = cta[:, None] + np.array([-0.5, -0.5, 0.5, 0.5])
    return PolyCollection(
        list(np.stack([x, y], 2)), linewidths=0, antialiased=False, rasterized=True, **style
    )


def _draw_path(axis: Any, hops: list[Hop], rank: int) -> list[Any]:
    """The critical path over the CTAs; its legend entries."""
    pieces = []  # (time, CTA) to (time, CTA), and whether all of it is on this rank
    for hop in hops:
        ends = [(hop.stored_us, hop.writer[1]), (hop.seen_us, hop.reader[1])]
        pieces.append((ends, hop.writer[0] == hop.reader[0] == rank))
    for hop, after in pairwise(hops):
        stay = [(hop.seen_us, hop.reader[1]), (after.stored_us, hop.reader[1])]
        pieces.append((stay, hop.reader[0] == rank))
    outline = [withStroke(linewidth=3.2, foreground="white")]
    for ends, here in pieces:
        axis.plot(
            *zip(*ends, strict=True), "-" if here else ":", color=plots.INK, linewidth=1.4,
            path_effects=outline, solid_capstyle="round",
        )  # fmt: skip
    for hop in hops:
        for (r, cta), when in ((hop.writer, hop.stored_us), (hop.reader, hop.seen_us)):
            fill = plots.INK if r == rank else "white"
            axis.plot(when, cta, "o", color=plots.INK, markerfacecolor=fill, markersize=4)
    names = {"-": "critical path", ":": "critical path,\nanother rank"}
    styles = {"-" if here else ":" for _, here in pieces}
    return [
        Line2D([], [], color=plots.INK, linestyle=s, label=name)
        for s, name in names.items()
        if s in styles
    ]


def _finding(spans: pd.DataFrame, kind: str) -> str:
    """How long a rank takes, and what its last CTA does in that time."""
    end, start = f"end_{kind}_us", f"start_{kind}_us"
    last = spans.loc[spans[end].idxmax(), "cta"]
    took = spans[end].max() - spans[start].min()
    mine = spans[spans["cta"] == last]
    text = f"{took:.1f} us; its last CTA, {last}, "
    if f"waiting_{kind}_us" not in spans:
        longest = mine.groupby("stage")[f"{kind}_us"].sum().nlargest(2)
        return f"{text}spends " + ", ".join(
            f"{us:.1f} us until {stage} is over" for stage, us in longest.items()
        )
    waiting = mine[f"waiting_{kind}_us"]
    work = (mine[f"{kind}_us"] - waiting).groupby(mine["stage"]).sum()
    return (
        f"{text}waits {waiting.sum():.1f} us and works longest on {work.idxmax()}, {work.max():.1f}"
    )


# ---------------------------------------------------------------------- trace files


def trace(
    table: pd.DataFrame, hops: Iterable[Hop] = (), waits: pd.DataFrame | None = None
) -> dict[str, Any]:
    """A Chrome / Perfetto trace: a process a rank, a track a CTA with a slice an interval, inside
    it a slice a wait (``handoffs.waits``), and a flow for each of ``hops``. Processes and tracks
    are numbered from 1: viewers take number 0 for the idle task."""
    kind = kind_of(table)
    spans = intervals(table)
    events: list[dict[str, Any]] = []
    for rank in sorted(table["rank"].unique().tolist()):
        events.append(_meta(rank, 0, "process_name", f"rank {rank} ({kind} time)"))
        for cta in sorted(table.loc[table["rank"] == rank, "cta"].unique().tolist()):
            events.append(_meta(rank, cta, "thread_name", f"CTA {cta}"))
    for row in spans.to_dict("records"):
        name = f"{row['stage']}: until {row['meaning']}"
        events.append(_slice(row, name, kind, row[f"start_{kind}_us"], row[f"end_{kind}_us"]))
    if waits is not None:
        events += _waiting_slices(spans, waits, kind)
    edges = spans.groupby(["rank", "cta"]).agg(
        first=(f"start_{kind}_us", "min"), last=(f"end_{kind}_us", "max")
    )

    def on_track(cta: tuple[int, int], when: float) -> float:
        """A store may be seen after its CTA's last stamp: a flow's ends stay on their tracks."""
        return round(float(np.clip(when, edges["first"][cta], edges["last"][cta])), 3)

    for number, hop in enumerate(hops):
        seen = on_track(hop.reader, hop.seen_us)
        stored = on_track(hop.writer, min(hop.stored_us, seen))
        common = {"cat": f"{kind} critical path", "name": hop.stage, "id": number}
        events.append({**common, "ph": "s", **_track(*hop.writer), "ts": stored})
        events.append({**common, "ph": "f", **_track(*hop.reader), "ts": seen, "bp": "e"})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"time": kind, "unit": "microseconds"},
    }


def _slice(row: dict[Any, Any], name: str, kind: str, start: float, end: float) -> dict[str, Any]:
    """A complete event; times to a nanosecond, so that neighbours meet exactly."""
    start, end = round(start, 3), round(end, 3)
    return {
        "ph": "X", **_track(row["rank"], row["cta"]), "cat": kind, "name": name,
        "ts": start, "dur": round(end - start, 3),
    }  # fmt: skip


def _waiting_slices(spans: pd.DataFrame, waits: pd.DataFrame, kind: Kind) -> list[dict[str, Any]]:
    """A slice for each wait, cut at the stamps that it crosses."""
    if kind_of(waits) != kind:
        raise ValueError(f"waits and stamps must be of one clock, got {kind_of(waits)} and {kind}")
    start, end = f"start_{kind}_us", f"end_{kind}_us"
    both = spans[["rank", "cta", start, end]].merge(
        waits[["rank", "cta", "hand-off", start, end]], on=["rank", "cta"], suffixes=("", "_wait")
    )
    both["from"] = both[[start, f"{start}_wait"]].max(axis=1)
    both["to"] = both[[end, f"{end}_wait"]].min(axis=1)
    both = both[both["to"] - both["from"] > 1e-3]  # a nanosecond
    return [
        _slice(row, f"waiting for the {row['hand-off']}", kind, row["from"], row["to"])
        for row in both.to_dict("records")
    ]


def _meta(rank: int, cta: int, name: str, value: str) -> dict[str, Any]:
    return {"ph": "M", **_track(rank, cta), "name": name, "args": {"name": value}}


def _track(rank: int, cta: int) -> dict[str, int]:
    return {"pid": rank + 1, "tid": cta + 1}


def write_trace(
    path: Path,
    table: pd.DataFrame,
    hops: Iterable[Hop] = (),
    waits: pd.DataFrame | None = None,
) -> Path:
    """``trace`` as a JSON file for ui.perfetto.dev or chrome://tracing; the path."""
    content = json.dumps(trace(table, hops, waits))
    write_atomic(path, lambda p: p.write_text(content, encoding="utf-8"))
    return path
