"""Tables of a run: rows of ``cases.parquet`` turned into what a report prints and plots.

Plain pandas over finished rows; nothing is run or built here. Bytes are bytes of one rank.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from io import StringIO
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from m3lab.clock.clock import Hop
from m3lab.compile import isa as isa_figures
from m3lab.kernels.plan import TL_POINTS
from m3lab.kernels.tuning import Tuning
from m3lab.report.floors import HBM_SEEN
from m3lab.verify.verdicts import EXACT_ALARM, STAGE_BOUND

INTERMEDIATES = (
    *("sp_o", "sp_m", "sp_l", "attnq", "partial", "a", "h_mid"),
    *("xn8", "sigmoid", "weights", "mid", "ffn", "ar_out"),
)
RANKS = {1: "solo", 2: "two ranks", 4: "four ranks", 8: "eight ranks"}
# What a buffer holds, by allocation name: the classes that floors are stated in.
BUFFER_CLASS = {
    **dict.fromkeys(
        ("w_o", "s_o", "g_post", "w_gate", "bias", "w13", "s13", "w2", "s2"), "weights"
    ),
    "k_cache": "KV cache",
    "v_cache": "KV cache",
    "k_scale": "KV cache",
    "v_scale": "KV cache",
    "scratch": "mailboxes",
    "peer": "mailboxes",
}
FLOOR_CLASS = {
    "weights": "weights",
    "cache": "KV cache",
    "inputs": "inputs and tables",
    "mailbox": "mailboxes",
}
CLASSES = ("weights", "KV cache", "inputs and tables", "mailboxes")


def finished(cases: pd.DataFrame) -> pd.DataFrame:
    """The cases that ran to their verdicts."""
    return cases[cases["verdicts"].notna()] if "verdicts" in cases else cases.iloc[:0]


def verdict_line(cases: pd.DataFrame) -> str:
    """One sentence: cases, checks passed, checks failed."""
    done = finished(cases)
    passed = int((cases["status"] == "passed").sum())
    checks = int(done["checks_passed"].sum()) if len(done) else 0
    failed = int(done["checks_failed"].sum()) if len(done) else 0
    broken = len(cases) - len(done)
    line = f"{passed} of {len(cases)} cases passed; {checks} checks passed, {failed} failed"
    return line + (f"; {broken} cases did not finish" if broken else "")


def summary(cases: pd.DataFrame) -> pd.DataFrame:
    """One row a case: status, checks, worst stage errors, unequal page ids, the modelled time (with
    a clock), the interpreter's wall time.

    An empty error: the build does not publish that intermediate (see ``m3lab.step``).
    """
    shown = {
        "tokens": cases["tokens"],
        "context": cases["context"],
        "ranks": cases["npes"],
        "status": cases["status"],
    }
    if "verdicts" in cases:
        made = cases["checks_passed"] + cases["checks_failed"]
        shown["checks"] = [
            "" if n != n else f"{p:.0f}/{n:.0f}"
            for p, n in zip(cases["checks_passed"], made, strict=True)
        ]
        for column, label in SUMMARY_ERRORS.items():
            values = cases.get(column, pd.Series(float("nan"), cases.index))
            shown[label] = ["" if v != v else f"{v:.1e}" for v in values.astype(float)]
        unequal = cases["stage_sparse_table"].astype(float)
        shown["unequal page ids"] = ["" if v != v else f"{v:.0f}" for v in unequal]
        if "modelled_us" in cases:
            us = cases["modelled_us"].astype(float)
            shown["modelled us"] = ["" if v != v else f"{v:.1f}" for v in us]
        wall = cases["interpreter_wall_s"].astype(float)
        shown["interpreter wall s"] = ["" if v != v else f"{v:.1f}" for v in wall]
    errors = cases["error"].fillna("") if "error" in cases else pd.Series("", cases.index)
    if errors.any():
        shown["error"] = errors.str.slice(0, 200)
    return pd.DataFrame(shown).set_index(cases["name"].rename("case"))


SUMMARY_ERRORS = {
    "stage_sp_o": "sp_o",
    "stage_attnq": "attnq",
    "stage_a": "a",
    "stage_h_mid": "h_mid",
    "stage_mid": "mid",
    "stage_ar_out": "ar_out",
    "exact_a": "a, exact",
    "exact_ar_out": "ar_out, exact",
}


def stamps(case: Mapping[Hashable, Any]) -> list[Tensor]:
    """A row's modelled timeline: int64 [blocks, points] ticks of 10 ns, a tensor a rank.

    ``m3lab.report.timeline.frame(stamps(row), "modelled")`` makes a table of it. Empty where
    the case's build stamped nothing.
    """
    text = case.get("stamps")
    if not isinstance(text, str):
        return []
    ticks = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i4")
    ranks = ticks.reshape(int(case["npes"]), -1, TL_POINTS).astype(np.int64)
    return list(torch.from_numpy(ranks))


def waits(case: Mapping[Hashable, Any]) -> pd.DataFrame | None:
    """When each CTA of a row with a timeline waited for another one's words, modelled: the table of
    ``m3lab.report.handoffs.waits``; None where the row does not hold it."""
    text = case.get("waits")
    if not isinstance(text, str):
        return None
    content = zlib.decompress(base64.b64decode(text)).decode()
    return pd.read_csv(StringIO(content), float_precision="round_trip")


def hops(case: Mapping[Hashable, Any]) -> list[Hop]:
    """A row's modelled critical path, first hand-off to last; empty where no clock ran."""
    text = case.get("modelled")
    if not isinstance(text, str):
        return []
    ends = ("writer", "reader")
    return [
        Hop(**(hop | {end: tuple(hop[end]) for end in ends}))
        for hop in json.loads(text)["critical_path"]
    ]


def knobs(case: Mapping[Hashable, Any]) -> dict[str, Any]:
    """A row's changed knobs; none of a row made before there were any."""
    text = case.get("tuning")
    return json.loads(text) if isinstance(text, str) else {}


def verdicts(cases: pd.DataFrame) -> pd.DataFrame:
    """Every verdict of every finished case, one row each, with the case's name, tokens, npes."""
    rows: list[dict[str, Any]] = []
    for case in finished(cases).to_dict("records"):
        shared = {name: case[name] for name in ("tokens", "context", "tp", "npes")}
        shared["case"] = case["name"]
        # "name" of a verdict is the intermediate it compares
        rows += [{**shared, **verdict} for verdict in json.loads(case["verdicts"])]
    return pd.DataFrame(rows)


def accuracy(cases: pd.DataFrame) -> pd.DataFrame:
    """Worst relative L2 per intermediate: against the kernel reference and the exact one."""
    every = verdicts(cases)
    if every.empty:
        return pd.DataFrame()
    rows = []
    for against, bound in (("stage", STAGE_BOUND), ("chained", None), ("exact", EXACT_ALARM)):
        for name in INTERMEDIATES:
            found = every[(every["against"] == against) & (every["name"] == name)]
            if len(found):
                worst = found.loc[found["error"].idxmax()]
                rows.append(
                    {
                        "intermediate": name,
                        "against": AGAINST[against],
                        "comparisons": len(found),
                        "median rel. L2": found["error"].median(),
                        "worst rel. L2": worst["error"],
                        "worst in": worst["case"],
                        "bound": bound,
                        "passed": bool(found["passed"].all()),
                    }
                )
    return pd.DataFrame(rows).set_index(["against", "intermediate"])


AGAINST = {
    "stage": "kernel reference, stage by stage",
    "chained": "kernel reference, chained",
    "exact": "exact reference",
}


def accuracy_by(cases: pd.DataFrame, axis: str) -> pd.DataFrame:
    """The worst stage error of every intermediate, a column a value of ``axis`` (as "tp")."""
    every = verdicts(cases)
    if every.empty:
        return pd.DataFrame()
    stage = every[(every["against"] == "stage") & every["name"].isin(INTERMEDIATES)]
    table = stage.pivot_table("error", "name", axis, aggfunc="max")
    return table.loc[[name for name in INTERMEDIATES if name in table.index]]


def bytes_by(cases: pd.DataFrame, axis: str) -> pd.DataFrame:
    """MB per rank and step by class, moved and floor, a row a value of ``axis`` and ranks."""
    moved = moved_bytes(cases)
    if moved.empty:
        return pd.DataFrame()
    return moved.pivot_table(["moved", "floor"], [axis, "npes"], "class", aggfunc="mean") / 1e6


def equalities(cases: pd.DataFrame) -> pd.DataFrame:
    """What must be equal bit for bit: comparisons made and unequal values found."""
    every = verdicts(cases)
    if every.empty:
        return pd.DataFrame()
    exact = every[every["name"].isin(EQUAL) & (every["against"] == "stage")]
    table = exact.groupby("name").agg(comparisons=("error", "size"), unequal=("error", "sum"))
    table["unequal"] = table["unequal"].astype(int)
    table.index = pd.Index([EQUAL[name] for name in table.index], name="must be equal")
    return table


EQUAL = {
    "sparse_table": "selected page ids and sparse context length",
    "a_sum": "rank-ordered sum of the published partials",
    "xsc": "E8M0 bytes of the normed row (but at the edge of a power)",
    "keys": "routing keys of the published sigmoids",
    "copies": "the copies of the scores",
    "sel": "experts that the published keys name",
    "picks": "experts that the reference's scores name (but within a rounding)",
    "ffn_sum": "rank-ordered sum of the published MLP partials",
    "ranks": "what every rank computes for itself",
    "nan": "NaNs in live rows (none may be)",
    "repeat": "every published bit under another schedule",
}


def builds(cases: pd.DataFrame) -> dict[str, isa_figures.IsaFigures]:
    """ISA figures per distinct build, labelled by tokens and ranks (and what else differs)."""
    out: dict[str, isa_figures.IsaFigures] = {}
    done = finished(cases)
    if done.empty:
        return out
    for case in done.sort_values(["npes", "tokens"], kind="stable").to_dict("records"):
        label = f"{case['tokens']} tokens, {RANKS[case['npes']]}"
        label += f", W={case['tp']}" if case["npes"] == 1 and case["tp"] != 4 else ""
        label = label.replace("1 tokens", "1 token")
        label += ", stride 16" if case["page_stride"] == 16 else ""
        label += ", static scale" if case["static_scale"] else ""
        label += "".join(f", {name} {value}" for name, value in knobs(case).items())
        label += ", timeline" if case.get("timeline") is True else ""
        out.setdefault(label, isa_figures.IsaFigures(**json.loads(case["isa"])))
    return out


def isa(cases: pd.DataFrame) -> pd.DataFrame:
    """Registers, spills, LDS, code size and instructions, a row a build."""
    found = builds(cases)
    return isa_figures.table(list(found.values()), list(found)) if found else pd.DataFrame()


def isa_mix(cases: pd.DataFrame) -> pd.DataFrame:
    """Instructions by class, a row a build."""
    found = builds(cases)
    return isa_figures.mix_table(list(found.values()), list(found)) if found else pd.DataFrame()


def isa_changes(cases: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Each build's figures minus the same build's in run ``before``; empty when none is shared."""
    new, old = isa(cases), isa(before)
    if new.empty or old.empty:
        return pd.DataFrame()
    shared = [label for label in new.index if label in old.index]
    return new.loc[shared] - old.loc[shared]


def compared(
    make: Callable[[pd.DataFrame], pd.DataFrame],
    cases: pd.DataFrame,
    before: pd.DataFrame,
    columns: Sequence[str],
    keys: Sequence[str] = (),
) -> pd.DataFrame:
    """``columns`` of table ``make`` of two runs, before, now and the change, of shared rows.

    ``keys``: the columns that name a row (default: the table's index). Empty when none is shared.
    """
    new, old = make(cases), make(before)
    if new.empty or old.empty:
        return pd.DataFrame()
    if keys:
        new, old = (t.drop_duplicates([*keys]).set_index([*keys]) for t in (new, old))
    rows = new.index[new.index.isin(old.index)]
    sides = {"before": old.loc[rows], "now": new.loc[rows]}
    sides["change"] = sides["now"][[*columns]] - sides["before"][[*columns]]
    return pd.DataFrame(
        {(name, side): table[name] for name in columns for side, table in sides.items()}
    )


# ---------------------------------------------------------------------- modelled time

HBM_FIELDS = ("weights", "cache", "inputs")  # of a floor: mailboxes need not come from memory


def timed(cases: pd.DataFrame) -> pd.DataFrame:
    """The finished cases that have a modelled time; none of a run without a clock."""
    done = finished(cases)
    return done[done["modelled_us"].notna()] if "modelled_us" in done else done.iloc[:0]


def stamped(cases: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """The finished rows whose build stamped its timeline, in order."""
    return [case for case in timed(cases).to_dict("records") if stamps(case)]


def times(cases: pd.DataFrame) -> pd.DataFrame:
    """The modelled time of a step beside its byte floor, a row a case.

    ``modelled us``: the launch of the kernel included, until the last rank ends. ``byte floor us``:
    the weights, keys and tables of one rank at the bandwidth seen on the part (7.2 TB/s), which is
    no time that anything ran. ``ratio``: modelled over floor.
    """
    rows = []
    for case in timed(cases).to_dict("records"):
        stages = json.loads(case["floors"]).values()
        floor = sum(stage[field] for stage in stages for field in HBM_FIELDS) / HBM_SEEN * 1e6
        rows.append(
            {
                "case": case["name"],
                **{key: case[key] for key in ("tokens", "context", "tp", "npes")},
                "modelled us": case["modelled_us"],
                "byte floor us": floor,
                "ratio": case["modelled_us"] / floor,
            }
        )
    return pd.DataFrame(rows)


def times_by(cases: pd.DataFrame) -> pd.DataFrame:
    """``times`` of the plain cases for printing: a row a width, ranks and context, by tokens."""
    rows = plain(times(cases))
    if rows.empty:
        return rows
    rows = rows.assign(ranks=rows["npes"].map(RANKS)).rename(columns={"tp": "W"})
    values = ["modelled us", "byte floor us", "ratio"]
    grid = rows.pivot_table(values, ["W", "ranks", "context"], "tokens", sort=False)
    grid = grid.reorder_levels([1, 0], axis=1).sort_index()
    grid = grid[[(t, v) for t in sorted(rows["tokens"].unique()) for v in values]]
    grid.columns = grid.columns.set_levels(
        [f"{t} token{'' if t == 1 else 's'}" for t in grid.columns.levels[0]], level=0
    )
    return grid


def clocks(cases: pd.DataFrame) -> set[tuple[str, str]]:
    """(part, digest of the clock) of the modelled times in ``cases``: compare equal ones only."""
    nested = [json.loads(text) for text in timed(cases).get("modelled", [])]
    return {(times["part"], times["clock"]) for times in nested}


def moved_bytes(cases: pd.DataFrame) -> pd.DataFrame:
    """Bytes moved per rank by class beside the floor, a row a case and class."""
    rows = []
    for case in finished(cases).to_dict("records"):
        moved = dict.fromkeys(CLASSES, 0)
        for entry in json.loads(case["counters"])["bytes"]:
            if entry["space"] != "lds":
                moved[BUFFER_CLASS.get(entry["buffer"], "inputs and tables")] += entry["bytes"]
        floor = dict.fromkeys(CLASSES, 0)
        for stage in json.loads(case["floors"]).values():
            for field, name in FLOOR_CLASS.items():
                floor[name] += stage[field]
        for name in CLASSES:
            per_rank = moved[name] / case["npes"]
            rows.append(
                {
                    "case": case["name"],
                    "tokens": case["tokens"],
                    "context": case["context"],
                    "tp": case["tp"],
                    "npes": case["npes"],
                    "class": name,
                    "moved": per_rank,
                    "floor": floor[name],
                    "ratio": per_rank / floor[name] if floor[name] else float("nan"),
                }
            )
    return pd.DataFrame(rows)


def stage_bytes(cases: pd.DataFrame) -> pd.DataFrame:
    """Bytes moved per rank beside the floor, a row a case and stage."""
    rows = []
    for case in finished(cases).to_dict("records"):
        floors = json.loads(case["floors"])
        moved = dict.fromkeys(floors, 0)
        for entry in json.loads(case["counters"])["bytes"]:
            if entry["space"] != "lds" and entry["stage"] in moved:
                moved[entry["stage"]] += entry["bytes"]
        for stage, fields in floors.items():
            floor = sum(fields[field] for field in FLOOR_CLASS)
            rows.append(_over_floor(case, {"stage": stage}, moved[stage], floor))
    return pd.DataFrame(rows)


# What a rank streams from memory, by the buffers that hold it: the floor's (stage, field).
STREAMS = {
    "keys, values, scales": (("k_cache", "v_cache", "k_scale", "v_scale"), "split", "cache"),
    "output projection": (("w_o", "s_o"), "o_proj", "weights"),
    "gate and norm": (("w_gate", "bias", "g_post"), "router", "weights"),
    "experts, up / gate": (("w13", "s13"), "up_gate", "weights"),
    "experts, down": (("w2", "s2"), "down", "weights"),
}


def streams(cases: pd.DataFrame) -> pd.DataFrame:
    """Bytes of weights and keys per rank beside the floor, a row a case and table."""
    rows = []
    for case in finished(cases).to_dict("records"):
        read: dict[str, int] = {}
        for entry in json.loads(case["counters"])["bytes"]:
            read[entry["buffer"]] = read.get(entry["buffer"], 0) + entry["bytes"]
        floors = json.loads(case["floors"])
        for name, (buffers, stage, field) in STREAMS.items():
            if stage in floors:
                moved = sum(read.get(buffer, 0) for buffer in buffers)
                floor = floors[stage][field]
                rows.append(_over_floor(case, {"table": name}, moved, floor))
    return pd.DataFrame(rows)


def _over_floor(
    case: dict[str, Any], what: dict[str, Any], moved: int, floor: int
) -> dict[str, Any]:
    """A row: a case's bytes of all ranks as one rank's, the floor, and their ratio."""
    per_rank = moved / case["npes"]
    return {
        "case": case["name"],
        **{key: case[key] for key in ("tokens", "context", "tp", "npes")},
        **what,
        "moved": per_rank,
        "floor": floor,
        "ratio": per_rank / floor if floor else float("nan"),
    }


# What a case's name tells when it is not plain: an unusual batch, layout or build.
UNUSUAL = "|".join((r"q\d", "pad", "stride", "static", "timeline", *Tuning.__dataclass_fields__))


def plain(table: pd.DataFrame, name: str = "case") -> pd.DataFrame:
    """The rows of plain cases, whose names (column ``name``) tell no unusual layout, batch, knob
    or timeline; all, if none is."""
    if table.empty:
        return table
    kept = table[~table[name].str.contains(f"_(?:{UNUSUAL})", regex=True)]
    return kept if len(kept) else table


def longest(table: pd.DataFrame) -> pd.DataFrame:
    """The plain rows of the most ranks (alone: of W = 4, where it is there, else the widest) and,
    of those, of the longest context that the most token counts have: one case a token count."""
    table = plain(table)
    if table.empty:
        return table
    table = table[table["npes"] == table["npes"].max()]
    table = table[table["tp"] == (4 if (table["tp"] == 4).any() else table["tp"].max())]
    counts = table.groupby("context")["tokens"].nunique()
    table = table[table["context"] == counts[counts == counts.max()].index.max()]
    return table[table["case"].isin(table.drop_duplicates("tokens")["case"])]


def over_floor(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """``stage_bytes`` or ``streams`` for printing: MB moved, MB of floor, ratio, by tokens."""
    rows = longest(table)
    if rows.empty:
        return rows
    rows = rows.assign(moved=rows["moved"] / 1e6, floor=rows["floor"] / 1e6)
    rows = rows.rename(columns={"moved": "moved, MB", "floor": "floor, MB"})
    values = ["moved, MB", "floor, MB", "ratio"]
    grid = rows.pivot_table(values, name, "tokens", sort=False)
    grid = grid.reorder_levels([1, 0], axis=1)
    return grid[[(t, v) for t in sorted(rows["tokens"].unique()) for v in values]]


def lds_conflicts(cases: pd.DataFrame) -> pd.DataFrame:
    """LDS cycles over the cycles without bank conflicts, a row a stage, a column a token count."""
    rows = longest(stage_work(cases))
    if rows.empty:
        return rows
    grid = rows.pivot_table("LDS cycles / conflict-free", "stage", "tokens")
    grid.columns = pd.Index([f"{t} token{'' if t == 1 else 's'}" for t in grid.columns])
    return grid


def peer(cases: pd.DataFrame) -> pd.DataFrame:
    """Our builds in the peer's form beside the public peer's (see ``isa_figures.peer_table``).

    That form: four ranks at W = 4, one KV scale a cache, the whole kernel. Index: (tokens, whose);
    empty where the run has no such build.
    """
    done = finished(cases)
    if done.empty:
        return pd.DataFrame()
    same = (done["npes"] == 4) & done["static_scale"].astype(bool) & (done["page_stride"] == 8)
    same &= done["until"].isna() & (done["model"] == "{}")
    theirs = isa_figures.peer_table().xs(False, level="fused")
    rows = {}
    for case in done[same].sort_values("tokens").to_dict("records"):
        tokens = case["tokens"]
        if tokens in theirs.index:
            figures = isa_figures.IsaFigures(**json.loads(case["isa"]))
            ours = isa_figures.table([figures]).iloc[0][theirs.columns].astype("Float64")
            rows[tokens, "this build"] = ours
            rows[tokens, "public peer"] = theirs.loc[tokens].astype("Float64")
            rows[tokens, "change, %"] = (ours / rows[tokens, "public peer"] - 1) * 100
    table = pd.DataFrame.from_dict(rows, orient="index")
    if len(table):
        table.index = pd.MultiIndex.from_tuples(rows, names=["tokens", ""])
    return table


def stage_work(cases: pd.DataFrame) -> pd.DataFrame:
    """Wave operations, MFMAs, bytes, polls, barriers and LDS cycles per stage, a row each."""
    rows = []
    for case in finished(cases).to_dict("records"):
        c, npes = json.loads(case["counters"]), case["npes"]
        moved: dict[str, int] = {}
        for entry in c["bytes"]:
            if entry["space"] != "lds":
                moved[entry["stage"]] = moved.get(entry["stage"], 0) + entry["bytes"]
        matrix: dict[str, int] = {}
        for key, count in c["matrix"].items():
            stage = key.split(":")[0]
            matrix[stage] = matrix.get(stage, 0) + count
        for stage, work in c["work"].items():
            ideal = c["lds_ideal"].get(stage, 0)
            rows.append(
                {
                    "case": case["name"],
                    "tokens": case["tokens"],
                    "context": case["context"],
                    "tp": case["tp"],
                    "npes": npes,
                    "stage": stage,
                    "wave operations": sum(work.values()) // npes,
                    "MFMA": matrix.get(stage, 0) // npes,
                    "bytes": moved.get(stage, 0) // npes,
                    "barriers": c["barriers"].get(stage, 0) // npes,
                    "polls": c["polls"].get(stage, 0),
                    "poll tries": c["poll_tries"].get(stage, 0),
                    "LDS cycles / conflict-free": (
                        round(c["lds_cycles"][stage] / ideal, 2) if ideal else float("nan")
                    ),
                }
            )
    return pd.DataFrame(rows)
