"""The house style and the figures of a report. Each figure's title states what it found.

Functions take a run's cases (see ``m3lab.report.tables``) and give a matplotlib figure; ``save``
writes it as SVG and PNG. Measured, modelled and interpreter figures never share a style, and an
interpreter's wall time is never called a kernel's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.rcsetup import cycler
from matplotlib.ticker import FuncFormatter

from m3lab.report import tables
from m3lab.sweep.results import Run, write_atomic
from m3lab.verify.verdicts import STAGE_BOUND

# Okabe and Ito's palette: told apart with every common form of colour blindness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, GREY = "#CC79A7", "#56B4E9", "#F0E442", "#7A7A7A"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW, GREY)
INK, FAINT = "#222222", "#D9D9D9"
PANEL_SIZE = 10  # a panel's title: below the figure's
WIDTH = 9.0  # inches: a report column
EXACT_ZERO = 1e-9  # where an error of 0 is drawn on a log axis

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=PALETTE),
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "svg.fonttype": "path",
    "svg.hashsalt": "m3lab",
}


def figure(title: str, columns: int = 1, height: float = 3.6, **options: Any) -> tuple[Any, Any]:
    """(figure, axes) in the house style; ``title`` is the finding."""
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = fig.subplots(1, columns, **options)
        fig.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", wrap=True)
    return fig, axes


def save(fig: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``folder/name.svg`` and ``.png``; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    with mpl.rc_context(STYLE):
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            write_atomic(path, lambda p: fig.savefig(p, metadata=metadata))  # noqa: B023
    return paths


class NothingToDrawError(ValueError):
    """A run's rows lack what a figure shows: one sentence."""


def show(make: Callable[[pd.DataFrame], Figure], run: Run, save_figures: bool = False) -> Any:
    """The figure ``make`` gives for the run's cases, for a notebook cell.

    ``save_figures`` also keeps it in the run's ``figures/``. A run with no finished case, or
    without what the figure shows, gets a sentence instead.
    """
    from IPython.display import Markdown

    if tables.finished(run.cases).empty:
        return Markdown("*No case ran to its end: nothing to draw.*")
    try:
        fig = make(run.cases)
    except NothingToDrawError as nothing:
        return Markdown(f"*{nothing}.*")
    if save_figures:
        save(fig, run.path / "figures", make.__name__)
    return drawn(fig)


def drawn(fig: Figure) -> Any:
    """``fig`` as what a notebook cell displays: SVG."""
    from IPython.display import SVG

    text = StringIO()
    with mpl.rc_context(STYLE):
        fig.savefig(text, format="svg", metadata={"Date": None})
    return SVG(data=text.getvalue())


def accuracy(cases: pd.DataFrame) -> Figure:
    """Relative L2 of every intermediate against the kernel reference, a dot a comparison."""
    every = tables.verdicts(cases)
    every = every[(every["against"] == "stage") & every["name"].isin(tables.INTERMEDIATES)]
    names = [n for n in tables.INTERMEDIATES if n in set(every["name"])]
    fig, axis = figure(_accuracy_title(every), height=0.45 * len(names) + 1.6)
    with mpl.rc_context(STYLE):
        spread = np.random.default_rng(0)
        for y, name in enumerate(names):
            for npes, colour, shift in ((1, BLUE, -0.14), (0, ORANGE, 0.14)):
                rows = every[(every["name"] == name) & ((every["npes"] == 1) == (npes == 1))]
                x = rows["error"].clip(lower=EXACT_ZERO)
                jitter = y + shift + spread.uniform(-0.1, 0.1, len(rows))
                # thousands of dots: as shapes they were a fifth of a report
                axis.scatter(
                    x, jitter, s=12, color=colour, alpha=0.6, linewidths=0, rasterized=True
                )
        axis.axvline(STAGE_BOUND, color=VERMILION, linewidth=1.5)
        axis.text(STAGE_BOUND * 1.15, -0.6, "bound 2e-3", color=VERMILION, va="center")
        axis.set(xscale="log", xlim=(EXACT_ZERO / 2, 2e-2), ylim=(len(names) - 0.4, -0.9))
        axis.set_yticks(range(len(names)), names)
        axis.set_xlabel(
            "relative L2 error against the kernel reference (1e-9 stands for exactly 0)"
        )
        axis.xaxis.grid(True)
        _legend(axis, {"solo": BLUE, "several ranks": ORANGE}, bbox_to_anchor=(1, 1))
    return fig


def _accuracy_title(every: pd.DataFrame) -> str:
    if every.empty:
        return "No case ran to its comparison with the kernel reference"
    failed = int((~every["passed"]).sum())
    worst = every.loc[every["error"].idxmax()]
    if failed:
        return f"{failed} of {len(every)} comparisons exceed their bound, {worst['name']} the most"
    if worst["error"] == 0:
        return "Every intermediate equals the kernel reference bit for bit"
    return (
        f"Every intermediate agrees with the kernel reference; the worst, {worst['name']}, is "
        f"{STAGE_BOUND / worst['error']:.0f} times under the bound"
    )


def bytes_over_floor(cases: pd.DataFrame) -> Figure:
    """Bytes moved beside the floor, by class, against tokens; the longest context of each."""
    data = tables.plain(tables.moved_bytes(cases))
    data = data[data["npes"] == data["npes"].max()]
    data = data[data["context"] == data["context"].max()].drop_duplicates(["tokens", "class"])
    fig, axes = figure(_bytes_title(data), columns=len(tables.CLASSES), height=3.3)
    with mpl.rc_context(STYLE):
        for axis, name in zip(axes, tables.CLASSES, strict=True):
            rows = data[data["class"] == name].sort_values("tokens")
            x = np.arange(len(rows))
            axis.bar(x, rows["moved"] / 1e6, width=0.6, color=SKY, label="moved")
            axis.hlines(rows["floor"] / 1e6, x - 0.38, x + 0.38, color=INK, linewidth=2)
            for i, ratio, top in zip(x, rows["ratio"], rows["moved"] / 1e6, strict=True):
                axis.text(i, top, f"{ratio:.1f}×", ha="center", va="bottom", fontsize=9)
            axis.set_xticks(x, rows["tokens"])
            axis.set_title(name, fontsize=PANEL_SIZE)
            axis.set_xlabel("tokens")
            axis.margins(x=0.25, y=0.15)
            axis.yaxis.grid(True)
        axes[0].set_ylabel("MB per rank and step")
        _legend(axes[-1], {"moved": SKY, "floor": INK}, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def _bytes_title(data: pd.DataFrame) -> str:
    if data.empty:
        return "No bytes counted yet"
    ratio = data.groupby("class")["ratio"].max()
    ranks = tables.RANKS[data["npes"].iloc[0]]
    return (
        f"Weights move {ratio['weights']:.1f} times their floor, the KV cache "
        f"{ratio['KV cache']:.1f}, mailboxes up to {ratio['mailboxes']:.0f} times "
        f"({ranks}, context {data['context'].iloc[0]:,})"
    )


def streams_over_floor(cases: pd.DataFrame) -> Figure:
    """Bytes of each weight table and of the keys beside their floor, a bar a token count."""
    rows = tables.longest(tables.streams(cases))
    names = list(dict.fromkeys(rows["table"]))
    counts = sorted(rows["tokens"].unique())
    fig, axis = figure(_streams_title(rows), height=0.8 * len(names) + 1.4)
    with mpl.rc_context(STYLE):
        height = 0.8 / len(counts)
        for i, tokens in enumerate(counts):
            mine = rows[rows["tokens"] == tokens].set_index("table").loc[names]
            y = np.arange(len(names)) + (i - (len(counts) - 1) / 2) * height
            moved, floor = mine["moved"] / 1e6, mine["floor"] / 1e6
            label = _tokens(tokens)
            axis.barh(y, moved, height=height * 0.9, color=PALETTE[i], label=label)
            axis.vlines(floor, y - height * 0.45, y + height * 0.45, color=INK, linewidth=2)
            for at, end, ratio in zip(y, moved, mine["ratio"], strict=True):
                axis.text(end, at, f" {ratio:.2f}×", va="center", fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.margins(x=0.1)
        axis.xaxis.grid(True)
        axis.set_xlabel("MB per rank and step; black line: floor; number: moved over floor")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def _streams_title(rows: pd.DataFrame) -> str:
    most = rows[rows["tokens"] == rows["tokens"].max()]
    sums = most[["moved", "floor"]].sum()
    expert = most[most["table"].str.startswith("experts")]["moved"].sum()
    tokens = int(most["tokens"].iloc[0])
    text = (
        f"At {_tokens(tokens)} a rank of W = {rows['tp'].iloc[0]} reads "
        f"{sums['moved'] / 1e6:.0f} MB of weights and keys, "
        f"{sums['moved'] / sums['floor']:.1f} times the floor"
    )
    return text + (f"; experts are {expert / sums['moved']:.0%} of it" if expert else "")


def bytes_by_context(cases: pd.DataFrame) -> Figure:
    """Bytes moved and their floor against context, by class."""
    return _bytes_by(cases, "context", "context, keys")


def bytes_by_tp(cases: pd.DataFrame) -> Figure:
    """Bytes moved and their floor against TP width, by class."""
    return _bytes_by(cases, "tp", "TP width")


def _bytes_by(cases: pd.DataFrame, axis_name: str, label: str) -> Figure:
    """MB per rank by class against ``axis_name``: solid moved, dashed floor, a colour a tokens."""
    data = tables.plain(tables.moved_bytes(cases))
    data = data[data["npes"] == 1] if (data["npes"] == 1).any() else data
    total = data.groupby(axis_name)["moved"].sum() / data.groupby(axis_name)["case"].nunique()
    first, last = total.index[0], total.index[-1]
    what = label.split(",")[0]
    title = f"A rank moves {total.iloc[0] / 1e6:.0f} MB at {what} {first:,}"
    if total.max() < 1.01 * total.min():
        title += " as at every other"
    else:
        title += f" and {total.iloc[-1] / 1e6:.0f} MB at {last:,}"
    title += ", the mean over token counts" if data["tokens"].nunique() > 1 else ""
    fig, axes = figure(title, columns=len(tables.CLASSES), height=3.3)
    values = sorted(data[axis_name].unique())
    x = range(len(values))
    with mpl.rc_context(STYLE):
        for axis, name in zip(axes, tables.CLASSES, strict=True):
            rows = data[data["class"] == name]
            for i, (tokens, group) in enumerate(rows.groupby("tokens")):
                mean = group.groupby(axis_name)[["moved", "floor"]].mean().reindex(values) / 1e6
                text = _tokens(tokens)
                axis.plot(x, mean["moved"], "o-", color=PALETTE[i], label=text)
                axis.plot(x, mean["floor"], "_--", color=PALETTE[i])
            axis.set_xticks(x, [f"{v:,}" for v in values], rotation=45 * (len(values) > 3))
            axis.set_title(name, fontsize=PANEL_SIZE)
            axis.set_xlabel(label)
            axis.set_ylim(bottom=0)
            axis.yaxis.grid(True)
        axes[0].set_ylabel("MB per rank and step (dashed: floor)")
        axes[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def work_by_context(cases: pd.DataFrame) -> Figure:
    """Wave operations per stage against context."""
    return _work_by(cases, "context", "context, keys")


def work_by_tp(cases: pd.DataFrame) -> Figure:
    """Wave operations per stage against TP width."""
    return _work_by(cases, "tp", "TP width")


def _work_by(cases: pd.DataFrame, axis_name: str, label: str) -> Figure:
    """Wave operations of one rank per stage against ``axis_name``, the fewest tokens' cases."""
    data = tables.plain(tables.stage_work(cases))
    data = data[data["npes"] == 1] if (data["npes"] == 1).any() else data
    data = data[data["tokens"] == data["tokens"].min()]
    grid = data.pivot_table("wave operations", axis_name, "stage", aggfunc="mean").fillna(0)
    grid = grid[grid.sum().sort_values(ascending=False).index]
    growth = grid.iloc[-1] - grid.iloc[0]
    most = growth.abs().idxmax()
    title = (
        f"From {label.split(',')[0]} {grid.index[0]:,} to {grid.index[-1]:,} the {most} stage "
        f"changes most, by {growth[most] / 1e3:+,.0f} k operations"
    )
    fig, axis = figure(title, height=3.6)
    x = range(len(grid))
    with mpl.rc_context(STYLE):
        for i, name in enumerate(grid.columns):
            axis.plot(x, grid[name], "o-", color=PALETTE[i % len(PALETTE)], label=name)
        axis.set_xticks(x, [f"{v:,}" for v in grid.index])
        axis.set_xlabel(label)
        axis.set_ylabel("wave operations per rank and step")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e3:,.0f} k"))
        axis.set_ylim(bottom=0)
        axis.yaxis.grid(True)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return fig


def isa_mix(cases: pd.DataFrame) -> Figure:
    """Static instructions by class, a bar a build."""
    mix = tables.isa_mix(cases)
    figures = tables.builds(cases).values()
    clean = all(not f.vgpr_spills and not f.scratch_bytes for f in figures)
    title = "No build spills a VGPR or uses scratch" if clean else "Some builds spill to memory"
    most = mix["total"].max()
    fig, axis = figure(f"{title}; the longest has {most:,} instructions", 1, 0.36 * len(mix) + 2.4)
    parts = _largest(mix.drop(columns="total").astype(float), len(PALETTE))
    with mpl.rc_context(STYLE):
        left = np.zeros(len(mix))
        for name, colour in zip(parts.columns, PALETTE, strict=False):
            values = parts[name].to_numpy()
            axis.barh(range(len(mix)), values, left=left, color=colour, label=name, height=0.7)
            left += values
        axis.set_yticks(range(len(mix)), mix.index)
        axis.invert_yaxis()
        axis.xaxis.grid(True)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axis.set_xlabel("instructions in the gfx950 assembly")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    return fig


def _largest(mix: pd.DataFrame, count: int) -> pd.DataFrame:
    """The ``count`` - 1 largest columns, largest first, and the rest summed as "other"."""
    order = mix.sum().sort_values(ascending=False).index
    kept = mix[order[: count - 1]].copy()
    if len(order) >= count:
        kept["other"] = mix[order[count - 1 :]].sum(axis=1)
    return kept


def stage_work(cases: pd.DataFrame) -> Figure:
    """Wave operations per stage against tokens, the longest context of each."""
    data = tables.plain(tables.stage_work(cases))
    data = data[data["npes"] == data["npes"].max()]
    data = data[data["context"] == data["context"].max()]
    data = data.drop_duplicates(["tokens", "stage"])
    grid = data.pivot(index="stage", columns="tokens", values="wave operations").fillna(0)
    grid = grid.loc[grid.sum(axis=1).sort_values(ascending=False).index]
    share = grid.iloc[0].sum() / grid.to_numpy().sum()
    title = f"The {grid.index[0]} stage makes {share:.0%} of the operations executed"
    fig, axis = figure(title, height=0.5 * len(grid) + 1.6)
    with mpl.rc_context(STYLE):
        height = 0.8 / len(grid.columns)
        for i, tokens in enumerate(grid.columns):
            y = np.arange(len(grid)) + (i - (len(grid.columns) - 1) / 2) * height
            label = _tokens(tokens)
            axis.barh(y, grid[tokens], height=height * 0.9, color=PALETTE[i], label=label)
        axis.set_yticks(range(len(grid)), grid.index)
        axis.invert_yaxis()
        axis.xaxis.grid(True)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v / 1e3:,.0f} k"))
        axis.set_xlabel("wave operations per rank and step, at the interpreter's level")
        axis.legend(loc="lower right")
    return fig


# ---------------------------------------------------------------------- modelled time


def time_by_tokens(cases: pd.DataFrame) -> Figure:
    """Modelled time of a step beside its byte floor against tokens, a line a context."""
    return _time_by(cases, "tokens", "tokens", "context")


def time_by_context(cases: pd.DataFrame) -> Figure:
    """Modelled time of a step beside its byte floor against context, a line a token count."""
    return _time_by(cases, "context", "context, keys", "tokens")


def time_by_tp(cases: pd.DataFrame) -> Figure:
    """Modelled time of a step beside its byte floor against TP width, a line a token count."""
    return _time_by(cases, "tp", "TP width", "tokens")


def time_figures(cases: pd.DataFrame) -> list[Callable[[pd.DataFrame], Figure]]:
    """The modelled-time figures of the axes that the cases with a modelled time differ in."""
    rows = tables.plain(tables.times(cases))
    figures = {"tokens": time_by_tokens, "context": time_by_context, "tp": time_by_tp}
    return [make for axis, make in figures.items() if len(rows) and rows[axis].nunique() > 1]


def _time_by(cases: pd.DataFrame, axis_name: str, label: str, series: str) -> Figure:
    """A column of panels for a rank alone, one for all ranks: time above, ratio to floor below.

    Modelled is dashed with hollow marks, here and in every figure; the floor is a plain line.
    """
    rows = tables.plain(tables.times(cases))
    if rows.empty:
        raise NothingToDrawError("No case of this run has a modelled time: nothing to draw")
    third = next(a for a in TIME_AXES if a not in (axis_name, series))
    rows, fixed = _fix(rows, third)
    groups = [(name, group) for name, group in (
        ("solo: one rank, no peer", rows[rows["npes"] == 1]),
        ("all ranks", rows[rows["npes"] > 1]),
    ) if len(group)]  # fmt: skip
    values, kinds = sorted(rows[axis_name].unique()), sorted(rows[series].unique())
    places = values if axis_name == "tokens" else range(len(values))
    with mpl.rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        fig.suptitle(
            _time_title(rows, axis_name), x=0.01, ha="left", fontsize=11, fontweight="bold",
            wrap=True,
        )  # fmt: skip
        axes = fig.subplots(
            2, len(groups), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 1.6)
        )
        for column, (name, group) in enumerate(groups):
            for i, kind in enumerate(kinds):
                mine = group[group[series] == kind].groupby(axis_name).mean(numeric_only=True)
                x = np.array(places) + 0.06 * (i - (len(kinds) - 1) / 2)  # seen side by side
                above, below = axes[:, column]
                _time_lines(above, below, x, mine.reindex(values), PALETTE[i % len(PALETTE)])
            axes[0, column].set_title(f"{name}, {fixed}", fontsize=PANEL_SIZE)
            axes[1, column].set_xticks(places, [f"{v:,}" for v in values])
            axes[1, column].set_xlabel(label)
        for (row, _), axis in np.ndenumerate(axes):
            axis.set_ylim(0, 1.12 * rows["ratio" if row else "modelled us"].max())
            axis.set_xlim(places[0] - 0.4, places[-1] + 0.4)
            axis.yaxis.grid(True)
        axes[0, 0].set_ylabel("K4 step, modelled us\n(launch included)")
        axes[1, 0].set_ylabel("modelled over\nbyte floor")
        _time_legend(axes[0, -1], series, kinds)
    return fig


def _time_lines(above: Axes, below: Axes, x: np.ndarray, rows: pd.DataFrame, colour: str) -> None:
    """One series: time and floor ``above``, their ratio ``below``."""
    above.plot(x, rows["modelled us"], **MODELLED, color=colour)
    above.plot(x, rows["byte floor us"], **FLOOR, color=colour)
    below.plot(x, rows["ratio"], **MODELLED, color=colour)


# The style of every modelled time: dashed, hollow marks.
MODELLED: dict[str, Any] = {
    "linestyle": (0, (4, 2)),
    "marker": "o",
    "markerfacecolor": "white",
    "markersize": 5,
}
# ... and as a bar: hollow, with a dashed edge.
MODELLED_BAR: dict[str, Any] = {
    "facecolor": "#EAF4FB",
    "edgecolor": BLUE,
    "linestyle": (0, (4, 2)),
    "linewidth": 1.1,
}
FLOOR: dict[str, Any] = {"linewidth": 1.2, "marker": "_"}


def _time_legend(axis: Axes, series: str, kinds: Sequence[int]) -> None:
    """What the colours and the two styles of line mean, at the right of ``axis``."""
    marks = [Line2D([], [], color=INK, **MODELLED, label="modelled"),
             Line2D([], [], color=INK, **FLOOR, label="byte floor,\n7.2 TB/s")]  # fmt: skip
    for i, kind in enumerate(kinds):
        style: dict[str, Any] = {"color": PALETTE[i % len(PALETTE)], "marker": "s", "linestyle": ""}
        marks.append(Line2D([], [], **style, label=_value(series, kind)))
    axis.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1))


def _time_title(rows: pd.DataFrame, axis_name: str) -> str:
    """From the first value of the axis to the last, of the most ranks and otherwise one case."""
    rows = rows[(rows["npes"] > 1) == (rows["npes"].max() > 1)]
    fixed = ["solo" if rows["npes"].max() == 1 else "all ranks"]
    for other in TIME_AXES:
        if other != axis_name:
            rows, value = _fix(rows, other)
            fixed.append(value)
    rows = rows.drop_duplicates(axis_name).sort_values(axis_name)
    ends = rows.iloc[[0, -1]] if len(rows) > 1 else rows
    times = [f"{us:.1f} us at {_value(axis_name, at)}"
             for us, at in zip(ends["modelled us"], ends[axis_name], strict=True)]  # fmt: skip
    over = " and ".join(dict.fromkeys(f"{ratio:.1f}" for ratio in ends["ratio"]))
    return f"Modelled: {', '.join(times)}, {over} times the byte floor ({', '.join(fixed)})"


TIME_AXES = ("tp", "tokens", "context")


def _fix(rows: pd.DataFrame, axis_name: str) -> tuple[pd.DataFrame, str]:
    """The rows of one value of an axis, and the value in words: W = 4 or else the widest, the
    fewest tokens, the longest context."""
    there = rows[axis_name]
    choice = there.min() if axis_name == "tokens" else there.max()
    choice = 4 if axis_name == "tp" and (there == 4).any() else choice
    return rows[there == choice], _value(axis_name, choice)


def _value(axis_name: str, value: int) -> str:
    """An axis's value in words, kept on one line: ``4 tokens``, ``context 8,192``, ``W = 4``."""
    words = {"tokens": _tokens(value), "context": f"context {value:,}", "tp": f"W = {value}"}
    return words[axis_name].replace(" ", "\N{NO-BREAK SPACE}")


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def interpreter_wall(cases: pd.DataFrame) -> Figure:
    """What the interpreter took, against context: a figure about this tool, not about the GPU."""
    data = tables.plain(tables.finished(cases), "name")
    worst = data["interpreter_wall_s"].max()
    fig, axes = figure(
        f"Interpreter wall time, not a GPU time: {worst:.0f} s at most", columns=2, sharey=True
    )
    with mpl.rc_context(STYLE):
        for axis, (solo, name) in zip(
            axes, ((True, "solo"), (False, "several ranks")), strict=True
        ):
            rows = data[data["solo"].astype(bool) == solo]
            for i, (tokens, group) in enumerate(rows.groupby("tokens")):
                group = group.sort_values("context")
                x = range(len(group))
                label = _tokens(tokens)
                axis.plot(x, group["interpreter_wall_s"], "o:", color=PALETTE[i], label=label)
                axis.set_xticks(x, [f"{c:,}" for c in group["context"]])
            axis.set_title(name, fontsize=PANEL_SIZE)
            axis.set_xlabel("context, keys")
            axis.yaxis.grid(True)
        axes[0].set_ylabel("interpreter wall time, s")
        axes[0].set_ylim(0, 1.1 * worst)
        axes[1].legend(
            *axes[0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1, 1)
        )
    return fig


def _legend(axis: Axes, entries: dict[str, str], **options: Any) -> None:
    marks = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=label)
        for label, colour in entries.items()
    ]
    axis.legend(handles=marks, **({"loc": "upper left"} | options))
