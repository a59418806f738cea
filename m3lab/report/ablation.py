"""What a schedule knob costs: a sweep's cases with turned knobs beside the same case without them.

Plain pandas over finished rows; nothing is run here. Times are modelled here; the published changes
beside them are others' measurements of their own builds (``m3lab.report.calibrate.ROWS``), and are
never called anything else. What a knob does is ``m3lab.kernels.tuning``'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from m3lab.kernels.tuning import Tuning
from m3lab.report import plots, tables
from m3lab.report.calibrate import FOUR, ONE, ROWS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# what makes two rows the same case but for their knobs, as far as a row holds it
SAME = (
    *("tokens", "context", "tp", "solo", "npes", "q_len", "pad_rows", "page_stride"),
    *("static_scale", "backend", "until", "seed", "layers", "checks", "model", "timeline"),
)
PUBLISHED_RANKS = 4  # the published builds ran on four GPUs
NO_CHANGE = 0.01  # modelled us: what a turned knob that changes nothing may show

# (knob, value) -> the build in words; None stands for any value
WORDS: dict[tuple[str, Any], str] = {
    ("score_copies", 1): "one copy of the router scores",
    ("score_copies", None): "{value} copies of the router scores",
    ("early_down_weights", True): "down weights requested with the first up / gate task's",
    ("poll_all", True): "every thread polls every partition",
    ("router_by_token", True): "router tasks one token after another",
    ("merge_in_output", True): "merges inside the output tasks",
    ("spin_whole_row", True): "every thread spins on the whole normed row",
    ("rows_before_routing", True): "the normed rows fetched before the routing",
    ("serial_rank", True): "one serial lane ranks a block",
    ("rank_up_to", None): "up to {value} blocks ranked by counting",
    ("shared_after_routing", True): "shared expert after the routing",
    ("shared_after_routing", False): "shared expert before the routing",
    ("ug_by_token", True): "up / gate tasks by token",
    ("ug_by_token", False): "up / gate tasks round robin",
    ("pad_rows", False): "LDS rows without padding",
    ("down_in_flight", None): "down weights of {value} tokens in flight",
    ("grouped_from", None): "wide form from {value} tokens",
    ("two_shot_from", None): "all-reduces through an owner from {value} tokens",
}


def words(knobs: Mapping[str, Any]) -> str:
    """Turned knobs in words: what this build does that the default one does not."""
    parts = []
    for name, value in knobs.items():
        text = WORDS.get((name, value), WORDS.get((name, None), f"{name} = {value}"))
        parts.append(text.format(value=value).replace("of 1 tokens", "of one token"))
    return ", ".join(parts)


# ---------------------------------------------------------------------- published changes


def published(tokens: int, knobs: Mapping[str, Any]) -> tuple[float, Row] | None:
    """The published change in us of turning ``knobs`` from their defaults, and the row it is of.

    A row of ``calibrate.ROWS`` whose two builds differ in just these knobs: from the defaults to
    these values its change counts as it stands, the other way round with its sign turned. What else
    those builds had (see ``of_the_latest``) may differ from the default. None where nobody
    published one.
    """
    forth = {name: (getattr(Tuning(), name), value) for name, value in knobs.items()}
    back = {name: (value, default) for name, (default, value) in forth.items()}
    found = []
    for row in ROWS:
        if row.tokens == tokens and row.before is not None:
            changed = _differences(row.before, row.after)
            if changed in (forth, back):
                found.append((row.published_us * (1 if changed == forth else -1), row))
    return max(found, key=lambda pair: of_the_latest(pair[1]), default=None)


def of_the_latest(row: Row) -> bool:
    """Whether one of a published change's two builds is the latest published schedule."""
    return not {ONE, FOUR}.isdisjoint((row.before, row.after))


def _differences(before: Tuning, after: Tuning) -> dict[str, tuple[Any, Any]]:
    pairs = {f.name: (getattr(before, f.name), getattr(after, f.name)) for f in fields(Tuning)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# ---------------------------------------------------------------------- pairs of cases


def _identity(case: Mapping[Hashable, Any]) -> tuple[Any, ...]:
    """The case but for its knobs; a column that a run does not have counts as absent everywhere."""
    return tuple(None if _absent(value := case.get(name)) else value for name in SAME)


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def _modelled(cases: pd.DataFrame) -> tuple[list[dict[Hashable, Any]], list[dict[Hashable, Any]]]:
    """(cases with turned knobs, those of them that have a modelled time of their own)."""
    turned = [case for case in cases.to_dict("records") if tables.knobs(case)]
    return turned, [case for case in turned if not _absent(case.get("modelled_us"))]


def _bases(cases: pd.DataFrame) -> dict[tuple[Any, ...], float]:
    """Modelled us of the cases with every knob at its default, by identity."""
    return {
        _identity(case): case["modelled_us"]
        for case in cases.to_dict("records")
        if not tables.knobs(case) and not _absent(case.get("modelled_us"))
    }


def table(cases: pd.DataFrame) -> pd.DataFrame:
    """A row per case with turned knobs and a case to compare it with, in the order of the run.

    Columns: case, tokens, ranks, context, knob (name = value), in words, base modelled us, modelled
    us, change modelled us, change modelled %, published change us (others' builds, measured; NaN
    where there is none), published row, published of (which of their builds), signs: "agree",
    "differ", "no change modelled", or "" where nothing is published.
    """
    bases = _bases(cases)
    rows = []
    for case in _modelled(cases)[1]:
        base = bases.get(_identity(case))
        if base is None:
            continue
        knobs = tables.knobs(case)
        change = case["modelled_us"] - base
        known = published(case["tokens"], knobs) if case["npes"] == PUBLISHED_RANKS else None
        rows.append(
            {
                "case": case["name"],
                "tokens": case["tokens"],
                "ranks": case["npes"],
                "context": case["context"],
                "knob": ", ".join(f"{name} = {value}" for name, value in knobs.items()),
                "in words": words(knobs),
                "base, modelled us": base,
                "modelled us": case["modelled_us"],
                "change, modelled us": change,
                "change, modelled %": 100 * change / base,
                "published change, us": known[0] if known else float("nan"),
                "published row": known[1].number if known else "",
                "published of": "" if not known else BUILDS[of_the_latest(known[1])],
                "signs": _signs(change, known[0]) if known else "",
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = [
    *("case", "tokens", "ranks", "context", "knob", "in words", "base, modelled us"),
    *("modelled us", "change, modelled us", "change, modelled %"),
    *("published change, us", "published row", "published of", "signs"),
]
BUILDS = {True: "the latest published schedule", False: "an earlier build"}


def _signs(change: float, known: float) -> str:
    if abs(change) < NO_CHANGE:
        return "no change modelled"
    return "agree" if change * known > 0 else "differ"


def left_out(cases: pd.DataFrame) -> str:
    """One sentence on the cases with turned knobs that ``table`` has no row for; "" where none."""
    turned, timed = _modelled(cases)
    if not turned:
        return "No case of this run turns a knob: there is nothing to compare."
    names = {case["name"] for case in timed}
    bases = _bases(cases)
    reasons = {
        "without a modelled time": [c["name"] for c in turned if c["name"] not in names],
        "without a modelled case of the same form at the default knobs": [
            c["name"] for c in timed if _identity(c) not in bases
        ],
    }
    parts = [f"{why}: {', '.join(found)}" for why, found in reasons.items() if found]
    return f"Left out, {'; and '.join(parts)}." if parts else ""


def readings(compared: pd.DataFrame) -> list[str]:
    """A sentence a row of ``table``: what the knob does to the modelled step, what is published."""
    return [_reading(row) for row in compared.to_dict("records")]


def _reading(row: Mapping[Hashable, Any]) -> str:
    change, known = row["change, modelled us"], row["published change, us"]
    text = f"{row['in words']} ({_tokens(row['tokens'])}, {tables.RANKS[row['ranks']]}): "
    if abs(change) < NO_CHANGE:
        text += "no change modelled"
    else:
        text += f"{change:+.2f} us modelled ({row['change, modelled %']:+.1f} %)"
    if not _absent(known):
        text += f"; published, measured by others on {row['published of']}: {known:+g} us"
        if row["signs"] == "agree":
            size = abs(change / known)
            text += f", the same sign, {size:.1f} times the size"
        elif row["signs"] == "differ":
            text += ", the other sign: do not trust the model on this knob"
    return text + "."


# ---------------------------------------------------------------------- a picture


def chart(cases: pd.DataFrame) -> Figure:
    """Modelled change of each turned knob as bars, the largest cost on top, a panel per step;
    published changes as marks of their own. ValueError where ``table`` has no row."""
    compared = table(cases)
    if compared.empty:
        raise ValueError(left_out(cases))
    context = ["context"] if compared["context"].nunique() > 1 else []
    panels = list(compared.groupby(["tokens", "ranks", *context]))
    height = 0.3 * len(compared) + 0.75 * len(panels) + 1.3
    fig, whole = plots.figure(_title(compared), height=height)
    fig.delaxes(whole)
    with plots.mpl.rc_context(plots.STYLE):
        rows_of = [len(rows) + 0.6 for _, rows in panels]
        axes = fig.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows_of}
        )[:, 0]
        for axis, (key, rows) in zip(axes, panels, strict=True):
            _panel(axis, rows.sort_values("change, modelled us"))
            title = f"{_tokens(key[0])}, {tables.RANKS[key[1]]}"
            title += f", {key[2]:,} keys" if context else ""
            axis.set_title(title, fontsize=plots.PANEL_SIZE, pad=6)
        ends = [*compared["change, modelled us"], *compared["published change, us"].dropna(), 0.0]
        span = max(ends) - min(ends) or 1.0
        axes[-1].set_xlim(min(ends) - 0.04 * span, max(ends) + 0.6 * span)
        axes[-1].set_xlabel("change of the step when the knob is turned, us")
        fig.legend(handles=_marks(), loc="outside lower right", ncols=2)
    return fig


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    """One step's knobs, sorted: bars modelled here, marks published."""
    y = np.arange(len(rows))
    change = rows["change, modelled us"].to_numpy()
    known = rows["published change, us"].to_numpy(dtype=float)
    axis.barh(y, change, height=0.62, **plots.MODELLED_BAR)
    axis.plot(known, y, "D", color=plots.VERMILION, markersize=6)
    axis.axvline(0, color=plots.INK, linewidth=1)
    axis.set_yticks(y, rows["in words"], fontsize=9)
    axis.set_ylim(-0.6, len(rows) - 0.4)
    axis.xaxis.grid(True)
    right = np.fmax(np.fmax(change, known), 0.0)
    for at, us, mark, end, signs in zip(y, change, known, right, rows["signs"], strict=True):
        text = f"modelled {us:+.2f}" if abs(us) >= NO_CHANGE else "modelled: no change"
        text += "" if np.isnan(mark) else f", published {mark:+g}"
        text += ": signs differ" if signs == "differ" else ""
        axis.annotate(text, (end, at), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _marks() -> list[Any]:
    return [
        Patch(**plots.MODELLED_BAR, label="modelled here"),
        Line2D(
            [], [], color=plots.VERMILION, marker="D", linestyle="",
            label="published, others' builds, measured",
        ),
    ]  # fmt: skip


def _title(compared: pd.DataFrame) -> str:
    change = compared["change, modelled us"]
    most = compared.loc[change.idxmax()]
    if change.max() < NO_CHANGE:
        text = "Modelled: no turned knob makes the step slower than the default build"
    else:
        text = (
            f"Modelled: turning a knob costs up to {change.max():.1f} us "
            f"({most['in words']}, {_tokens(most['tokens'])})"
        )
    faster = int((change < -NO_CHANGE).sum())
    text += f"; {faster} of {len(compared)} make the step faster" if faster else ""
    known = compared[compared["signs"] != ""]
    if len(known):
        agree = int((known["signs"] == "agree").sum())
        text += f"; {agree} of {len(known)} signs agree with published changes"
    return text


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
