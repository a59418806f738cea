"""Who waited for whom in a modelled step: the hand-offs through mailboxes, as tables and a picture.

Read off a ``Clock`` after its run: it keeps what every poll asked for and when every word could be
seen. All times are modelled, none is measured. What the kernel's own stamps say is ``timeline``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from m3lab.interpreter.memory import BASE
from m3lab.kernels.stages import hand_off_words
from m3lab.layout.regions import peer_layout, scratch_layout
from m3lab.report import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from m3lab.clock.clock import Clock
    from m3lab.step import DecodeStep

# region -> what is handed over there; a region that is not named here keeps its own name
WORDS = hand_off_words()
HELPERS = ("mailbox.py", "allreduce.py", "gfx950.py", "wave.py", "context.py")
# a shadow entry of the clock: time in sixteenths of a nanosecond, CTA, wave (low bits)
_TICKS_PER_US, _CTA_BITS, _WAVE_BITS = 16_000, 16, 4


def place(line: str, stage: str) -> str:
    """Where a stage polls, short: its innermost line past the hand-off helpers, and where that is
    another file's, the innermost one of the stage's own (``merge.py:122 < o_proj.py:100``).

    ``line``: a call chain ``file:line < file:line``, innermost first; ``stage``: its name.
    """
    frames = [frame.rsplit("/", 1)[-1] for frame in line.split(" < ")]
    outside = [f for f in frames if f.split(":")[0] not in HELPERS] or frames[-1:]
    own = [f for f in outside if f.split(":")[0] == f"{stage}.py"]
    return outside[0] if not own or own[0] == outside[0] else f"{outside[0]} < {own[0]}"


# ---------------------------------------------------------------------- what the clock keeps


def polls(step: DecodeStep, clock: Clock) -> pd.DataFrame:
    """A row per polling operation and CTA of the run that ``clock`` timed.

    Columns: rank, cta, hand-off (see ``WORDS``), stage, polled at, ``asked_modelled_us`` (its first
    wave's), ``seen_modelled_us`` (when the latest word it asked for could be seen). What the host
    wrote before the launch is not waited for and has no row. Raises ValueError for a clock that has
    timed no run.
    """
    if not clock.started:
        raise ValueError("this Clock has timed no run yet: pass it to step.run(clock=clock)")
    regions = _words_of(step, clock)
    ranks, blocks = _names(clock)
    parts = []
    for machine, op, places, entry, asked in clock.polls:
        there = entry > 0
        if not bool(there.any()):
            continue
        cta = (places[there] // clock.n_waves).cpu().numpy()
        stage = machine.prepared.stages[op.stage]
        parts.append(
            pd.DataFrame(
                {
                    "rank": ranks[cta],
                    "cta": blocks[cta],
                    "hand-off": _region(entry[there].cpu(), regions),
                    "stage": stage,
                    "polled at": place(machine.line(op), stage),
                    "asked_modelled_us": (asked[there] / 1000).cpu().numpy(),
                    "seen_modelled_us": _us(entry[there]),
                }
            )
        )
    if not parts:
        none = pd.DataFrame(columns=[*_KEYS, "asked_modelled_us", "seen_modelled_us"])
        return none.astype({"asked_modelled_us": float, "seen_modelled_us": float})
    each = pd.concat(parts, ignore_index=True).groupby(_KEYS, sort=False)
    return each.agg(
        asked_modelled_us=("asked_modelled_us", "min"), seen_modelled_us=("seen_modelled_us", "max")
    ).reset_index()


_KEYS = ["rank", "cta", "hand-off", "stage", "polled at"]


def written(step: DecodeStep, clock: Clock) -> pd.DataFrame:
    """When each writer's last word of a hand-off could be seen by its readers.

    A row per hand-off and writing CTA: hand-off, rank, cta, ``visible_modelled_us``.
    """
    ranks, blocks = _names(clock)
    parts = []
    for name, entries in _words_of(step, clock).items():
        cta = ((entries >> _WAVE_BITS) & ((1 << _CTA_BITS) - 1)).numpy()
        parts.append(
            pd.DataFrame(
                {
                    "hand-off": WORDS.get(name, name),
                    "rank": ranks[cta],
                    "cta": blocks[cta],
                    "visible_modelled_us": _us(entries),
                }
            )
        )
    keys = ["hand-off", "rank", "cta"]
    none = pd.DataFrame(columns=[*keys, "visible_modelled_us"]).astype(
        {"visible_modelled_us": float}
    )
    every = pd.concat(parts, ignore_index=True) if parts else none
    return every.groupby(keys, sort=False, as_index=False).max()


def _words_of(step: DecodeStep, clock: Clock) -> dict[str, Tensor]:
    """Per region the shadow entries of all ranks' words that this run stored: int64 [words]."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(step.npes):
        for addr, layout in (
            (step.mailboxes.scratch[rank].addr, scratch_layout(step.shape)),
            (step.peers.addr(rank), peer_layout(step.shape, step.npes)),
        ):
            for region in layout.values():
                first = (addr - BASE + region.offset) // 4
                entries = clock.shadow[first : first + region.nbytes // 4].cpu()
                found.setdefault(region.name, []).append(entries[entries > 0])
    joined = {name: torch.cat(parts).unique() for name, parts in found.items()}
    return {name: entries for name, entries in joined.items() if len(entries)}


def _region(entries: Tensor, regions: dict[str, Tensor]) -> str:
    """The hand-off whose words these entries are (a poll's are of one region, or two of a row)."""
    counts = {name: int(torch.isin(entries, words).sum()) for name, words in regions.items()}
    best = max(counts, key=lambda name: counts[name], default="")
    return WORDS.get(best, best)


def _names(clock: Clock) -> tuple[np.ndarray, np.ndarray]:
    """Rank and block of each CTA of the run's grid; a rank's CTAs lie together."""
    ranks = clock.ranks.cpu().numpy()
    first = {rank: int(np.flatnonzero(ranks == rank)[0]) for rank in np.unique(ranks)}
    return ranks, np.arange(len(ranks)) - np.array([first[rank] for rank in ranks])


def _us(entries: Tensor) -> np.ndarray:
    ticks = (entries >> (_CTA_BITS + _WAVE_BITS)).cpu().numpy()
    return np.asarray(ticks, dtype=np.float64) / _TICKS_PER_US


# ---------------------------------------------------------------------- tables


def waits(polled: pd.DataFrame) -> pd.DataFrame:
    """The times in which a CTA waited for words that nobody had stored yet, of ``polls``.

    Columns: rank, cta, hand-off, stage, polled at, ``start_modelled_us``, ``end_modelled_us``. A
    CTA's waits do not overlap: time in which two polls wait is the earlier one's. The load that
    finds the word, and its queue, are no waiting. Waves count as one: others may work meanwhile.
    """
    late = polled[polled["seen_modelled_us"] > polled["asked_modelled_us"]]
    late = late.sort_values(["rank", "cta", "asked_modelled_us", "seen_modelled_us"])
    late = late.rename(
        columns={"asked_modelled_us": "start_modelled_us", "seen_modelled_us": "end_modelled_us"}
    )
    by_cta = late.groupby(["rank", "cta"])["end_modelled_us"]
    before = by_cta.cummax().groupby([late["rank"], late["cta"]]).shift()
    late["start_modelled_us"] = late["start_modelled_us"].where(
        before.isna() | (late["start_modelled_us"] >= before), before
    )
    return late[late["end_modelled_us"] > late["start_modelled_us"]].reset_index(drop=True)


def skew(polled: pd.DataFrame, stored: pd.DataFrame) -> pd.DataFrame:
    """Per hand-off, in order: how far apart its writers were, and what its readers waited.

    ``polled``, ``stored``: of ``polls`` and ``written``. A writer counts by its last word. Slack:
    how long before a reader asked the last word it needs was there.
    """
    rows = {}
    for name, theirs in stored.groupby("hand-off", sort=False):
        mine = polled[polled["hand-off"] == name]
        if mine.empty:
            continue
        when = theirs["visible_modelled_us"]
        last = theirs.loc[when.idxmax()]
        by_cta = mine.groupby(["rank", "cta"])
        asked = by_cta["asked_modelled_us"].min()
        wait = by_cta["seen_modelled_us"].max() - asked
        rows[name] = {
            "writers": len(theirs),
            "first visible, modelled us": when.min(),
            "last visible, modelled us": when.max(),
            "spread, modelled us": when.max() - when.min(),
            "last writer": f"rank {last['rank']} CTA {last['cta']}",
            "readers": len(wait),
            "of them waiting": int((wait > 0).sum()),
            "first asked, modelled us": asked.min(),
            "last asked, modelled us": asked.max(),
            "longest wait, modelled us": wait.clip(lower=0).max(),
            "longest slack, modelled us": (-wait).clip(lower=0).max(),
        }
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("hand-off")
    return table.sort_values("last visible, modelled us").round(2) if rows else table


def waited_for(waiting: pd.DataFrame) -> pd.DataFrame:
    """Per hand-off: CTAs that waited for it, and the median, longest and summed wait."""
    took = waiting["end_modelled_us"] - waiting["start_modelled_us"]
    each = took.groupby([waiting["hand-off"], waiting["rank"], waiting["cta"]]).sum()
    by_name = each.groupby("hand-off")
    table = pd.DataFrame(
        {
            "CTAs": by_name.size(),
            "median wait, modelled us": by_name.median(),
            "longest wait, modelled us": by_name.max(),
            "all CTAs together, modelled ms": by_name.sum() / 1000,
        }
    )
    return table.sort_values("all CTAs together, modelled ms", ascending=False).round(2)


# ---------------------------------------------------------------------- a picture


def skew_chart(table: pd.DataFrame) -> Figure:
    """``skew`` as a picture: per hand-off when its writers were done and when its readers asked."""
    worst = table["spread, modelled us"].idxmax()
    spread = table.loc[worst, "spread, modelled us"]
    most = table["longest wait, modelled us"].idxmax()
    title = (
        f"Modelled: the writers of the {worst} are {spread:.1f} us apart, the most of "
        f"{len(table)} hand-offs; the longest wait, "
        f"{table.loc[most, 'longest wait, modelled us']:.1f} us, is for the {most}"
    )
    fig, axis = plots.figure(title, height=0.5 * len(table) + 1.5)
    y = np.arange(len(table))
    with plots.mpl.rc_context(plots.STYLE):
        for columns, colour, shift, label in (
            (("first visible", "last visible"), plots.BLUE, -0.17, "writers done, first to last"),
            (("first asked", "last asked"), plots.ORANGE, 0.17, "readers ask, first to last"),
        ):
            low, high = (table[f"{c}, modelled us"].to_numpy() for c in columns)
            axis.barh(y + shift, high - low, left=low, height=0.3, color=colour, label=label)
            axis.plot(low, y + shift, "|", color=colour, markersize=9, markeredgewidth=2)
            axis.plot(high, y + shift, "|", color=colour, markersize=9, markeredgewidth=2)
        for at, (_, row) in zip(y, table.iterrows(), strict=True):
            end = max(row["last visible, modelled us"], row["last asked, modelled us"])
            text = (
                f"   spread {row['spread, modelled us']:.1f}, "
                f"longest wait {row['longest wait, modelled us']:.1f}"
            )
            axis.text(end, at, text, va="center", fontsize=8)
        axis.set_yticks(y, table.index)
        axis.invert_yaxis()
        axis.set_xlim(0, 1.3 * axis.dataLim.x1)
        axis.xaxis.grid(True)
        axis.set_xlabel("time, modelled us")
        axis.legend(loc="lower left", title="modelled", frameon=True, framealpha=1)
    return fig
