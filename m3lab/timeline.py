"""The kernel's own stamps as tables, a Gantt over CTAs, a trace file, and the critical path.

Stamps are what the kernel writes (int64 [blocks, 32] ticks of 10 ns), whoever's clock they were
taken from. A clock's are *modelled*, a GPU's are *measured*: every table carries the word in its
column names, every picture and trace in its title, and there is no default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor

from m3lab import plots
from m3lab.sweep.results import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from m3lab.interpreter.clock import Hop
    from m3lab.interpreter.part import Part
    from m3lab.placement import Placement
    from m3lab.step import DecodeStep

Kind = Literal["modelled", "measured"]
KINDS = ("modelled", "measured")
TICKS_PER_US = 100

# point -> (stage that ends or is under way there, meaning)
POINTS: dict[int, tuple[str, str]] = {
    0: ("start", "kernel begins"),
    18: ("select", "sort keys made"),
    20: ("select", "keys in LDS, or long candidates sent"),
    19: ("select", "ranks known"),
    17: ("select", "blocks selected"),
    12: ("split", "loads issued, q in LDS"),
    13: ("split", "scores"),
    14: ("split", "probabilities"),
    15: ("split", "PV"),
    1: ("split", "split over"),
    3: ("merge", "partitions or merged scales in"),
    4: ("output", "output projection over"),
    22: ("router", "row in"),
    24: ("router", "sum of squares"),
    25: ("router", "row normed"),
    26: ("router", "row quantized"),
    23: ("router", "logit"),
    5: ("router", "router over"),
    21: ("routing", "logits in"),
    2: ("routing", "routed"),
    6: ("routing", "routing settled"),
    7: ("up / gate", "first weights in flight"),
    9: ("up / gate", "last routed task's MFMAs done"),
    8: ("up / gate", "up / gate over"),
    10: ("down", "mids in"),
    11: ("down", "end"),
    27: ("pre-attention", "sum of squares"),
    28: ("pre-attention", "x8 in LDS"),
    29: ("pre-attention", "GEMV rows out"),
    30: ("pre-attention", "head rows out"),
    31: ("pre-attention", "scores out"),
}
STAGES = tuple(dict.fromkeys(stage for stage, _ in POINTS.values() if stage != "start"))
COLOURS = dict(zip(STAGES, (*plots.PALETTE, plots.INK), strict=False))


def frame(stamps: Tensor | Sequence[Tensor], kind: Kind) -> pd.DataFrame:
    """One row per stamped point: rank, cta, point, stage, meaning, ``<kind>_us``.

    ``stamps``: int64 [blocks, points], one tensor a rank; 0 is a point not stamped. Measured clocks
    of several GPUs share no zero: each rank's first stamp is its 0. Modelled time keeps its zero,
    the launch. Raises ValueError for another kind, or where nothing was stamped.
    """
    if kind not in KINDS:
        raise ValueError(f"stamps are {' or '.join(KINDS)}, got {kind!r}")
    parts = []
    for rank, ticks in enumerate([stamps] if isinstance(stamps, Tensor) else stamps):
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
        parts.append(
            pd.DataFrame(
                {"rank": rank, "cta": cta, "point": point, f"{kind}_us": when / TICKS_PER_US}
            )
        )
    table = pd.concat(parts, ignore_index=True)
    table = table[table["point"].isin(POINTS)]
    table.insert(3, "stage", [POINTS[p][0] for p in table["point"]])
    table.insert(4, "meaning", [POINTS[p][1] for p in table["point"]])
    return table.sort_values(["rank", "cta", f"{kind}_us", "point"], ignore_index=True)


def kind_of(table: pd.DataFrame) -> Kind:
    """Whether a table's times are modelled or measured; ValueError where it says neither or both"""
    found = [k for k in KINDS if any(k in str(c) for c in table.columns)]
    if len(found) != 1:
        raise ValueError(f"a timeline's columns must say modelled or measured, got {found}")
    return "modelled" if found[0] == "modelled" else "measured"


def intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Each CTA's time from one stamp to the next, named after the later one.

    Columns: rank, cta, stage, meaning, ``start_<kind>_us``, ``end_<kind>_us``, ``<kind>_us``.
    A stamp that every CTA makes, task or not, ends an interval of waiting as well as of work.
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
    return out[same].reset_index(drop=True)


def where_time_goes(table: pd.DataFrame) -> pd.DataFrame:
    """Per stage: CTAs with time in it, first start, last end, and the longest and median CTA."""
    kind = kind_of(table)
    spans = intervals(table)
    spans = spans[spans[f"{kind}_us"] > 0.05]  # a stage a CTA only walks past
    per_cta = spans.groupby(["stage", "rank", "cta"])[f"{kind}_us"].sum().reset_index()
    rows = []
    for stage in STAGES:
        mine, each = spans[spans["stage"] == stage], per_cta[per_cta["stage"] == stage]
        if len(mine):
            rows.append(
                {
                    "stage": stage,
                    "CTAs": len(each),
                    f"first start, {kind} us": mine[f"start_{kind}_us"].min(),
                    f"last end, {kind} us": mine[f"end_{kind}_us"].max(),
                    f"median CTA, {kind} us": each[f"{kind}_us"].median(),
                    f"longest CTA, {kind} us": each[f"{kind}_us"].max(),
                }
            )
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
                "polled at": hop.line.split(" < ")[-1],
            }
            for hop in hops
        ]
    )


def what_if(
    step: DecodeStep, stages: Sequence[str] | None = None, part: Part | None = None
) -> pd.DataFrame:
    """What the modelled step would gain were a stage's work free: an upper bound of tuning it.

    ``stages``: kernel files (default: all that the step runs). One run of the step for each.
    """
    from m3lab.interpreter.clock import Clock

    def time(free: Sequence[str]) -> float:
        clock = Clock(part, free=free)
        step.run(clock=clock)
        return clock.modelled().step_modelled_us

    whole = Clock(part)
    names = stages or sorted(step.run(clock=whole).report.counters.by_stage())
    base = whole.modelled().step_modelled_us
    rows = [{"free stage": name, "step, modelled us": time([name])} for name in names]
    out = pd.DataFrame(rows)
    out["gain, modelled us"] = base - out["step, modelled us"]
    return out.sort_values("gain, modelled us", ascending=False, ignore_index=True).round(2)


# ---------------------------------------------------------------------- without any clock


def tasks(place: Placement) -> pd.DataFrame:
    """Tasks of each stage on each CTA: a row a stage in the order in which a CTA goes through
    them, a column a CTA. Of the narrow form (1..4 tokens)."""
    if place.wide:
        raise ValueError(f"tasks are of the narrow form, got a wide step of {place.tokens} tokens")
    rows = {
        "split": _spread(place, "split", place.split_tasks),
        "merge": _spread(place, "merge", place.merge_tasks),
        "output": _spread(place, "o", place.o_tasks),
        "router": _spread(place, "router", place.router_tasks),
        "shared up / gate": _spread(place, "shared", place.shared_tasks),
        "routed up / gate": [place.ug_tasks_of(cta) for cta in range(place.blocks)],
        "down": _spread(place, "down", place.down_tasks),
    }
    if place.shared_after_routing:
        order = [name for name in rows if name != "shared up / gate"]
        order.insert(order.index("down"), "shared up / gate")
        rows = {name: rows[name] for name in order}
    rows = {name: row for name, row in rows.items() if any(row)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="stage", columns="CTA")


def _spread(place: Placement, stage: str, count: int) -> list[int]:
    out = [0] * place.blocks
    for task in range(count):
        out[(place.bases[stage] + task) % place.blocks] += 1
    return out


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


def gantt(table: pd.DataFrame, rank: int = 0, hops: Iterable[Hop] = ()) -> Figure:
    """The stages of each CTA of a rank over time, and the hand-offs of the critical path."""
    kind = kind_of(table)
    spans = intervals(table[table["rank"] == rank])
    end = spans[f"end_{kind}_us"].max()
    fig, axis = plots.figure(f"Rank {rank}, {kind}: {_finding(spans, kind)}", height=5.5)
    with plots.mpl.rc_context(plots.STYLE):
        for stage in STAGES:
            mine = spans[spans["stage"] == stage]
            if len(mine):
                axis.barh(
                    mine["cta"], mine[f"{kind}_us"], left=mine[f"start_{kind}_us"], height=1.0,
                    color=COLOURS[stage], label=stage, linewidth=0,
                )  # fmt: skip
        path = [h for h in hops if rank in (h.writer[0], h.reader[0])]
        for hop in path:
            here = [(t, c[1]) for t, c in ((hop.stored_us, hop.writer), (hop.seen_us, hop.reader))
                    if c[0] == rank]  # fmt: skip
            axis.plot(*zip(*here, strict=True), "o-", color=plots.INK, markersize=3, linewidth=1)
        axis.set(xlabel=f"time, {kind} us", ylabel="CTA", ylim=(-1, spans["cta"].max() + 1))
        axis.set_xlim(0, end * 1.01)
        axis.invert_yaxis()
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), title=f"until ({kind})")
    return fig


def _finding(spans: pd.DataFrame, kind: str) -> str:
    """Where the CTA that ends last spends most, waiting included."""
    end, start = f"end_{kind}_us", f"start_{kind}_us"
    last = spans.loc[spans[end].idxmax(), "cta"]
    mine = spans[spans["cta"] == last].groupby("stage")[f"{kind}_us"].sum().nlargest(2)
    parts = [f"{us:.1f} us until {stage} is over" for stage, us in mine.items()]
    took = spans[end].max() - spans[start].min()
    return f"{took:.1f} us; its last CTA, {last}, spends {', '.join(parts)}"


# ---------------------------------------------------------------------- trace files


def trace(table: pd.DataFrame, hops: Iterable[Hop] = ()) -> dict[str, Any]:
    """A Chrome / Perfetto trace: a process a rank, a track a CTA, flows for ``hops``."""
    kind = kind_of(table)
    spans = intervals(table)
    events: list[dict[str, Any]] = []
    for rank in sorted(table["rank"].unique().tolist()):
        events.append(_meta(rank, 0, "process_name", f"rank {rank} ({kind} time)"))
        for cta in sorted(table.loc[table["rank"] == rank, "cta"].unique().tolist()):
            events.append(_meta(rank, cta, "thread_name", f"CTA {cta}"))
    for row in spans.to_dict("records"):
        events.append(
            {
                "ph": "X", "pid": row["rank"], "tid": row["cta"], "cat": kind,
                "name": f"{row['stage']}: until {row['meaning']}",
                "ts": row[f"start_{kind}_us"], "dur": row[f"{kind}_us"],
            }
        )  # fmt: skip
    for number, hop in enumerate(hops):
        common = {"cat": f"{kind} critical path", "name": hop.stage, "id": number}
        ends: Any = (
            (hop.writer, hop.stored_us, "s", {}),
            (hop.reader, hop.seen_us, "f", {"bp": "e"}),
        )
        for (rank, cta), when, phase, more in ends:
            events.append({**common, "ph": phase, "pid": rank, "tid": cta, "ts": when, **more})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"time": kind, "unit": "microseconds"},
    }


def _meta(rank: int, cta: int, name: str, value: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": cta, "name": name, "args": {"name": value}}


def write_trace(path: Path, table: pd.DataFrame, hops: Iterable[Hop] = ()) -> Path:
    """``trace`` as a JSON file for ui.perfetto.dev or chrome://tracing; the path."""
    content = json.dumps(trace(table, hops))
    write_atomic(path, lambda p: p.write_text(content, encoding="utf-8"))
    return path
