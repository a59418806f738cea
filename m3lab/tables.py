"""Tables of a run: rows of ``cases.parquet`` turned into what a report prints and plots.

Plain pandas over finished rows; nothing is run or built here. Bytes are bytes of one rank.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from m3lab import isa_report
from m3lab.verify import EXACT_ALARM, STAGE_BOUND

INTERMEDIATES = ("sp_o", "sp_m", "sp_l", "attnq", "partial", "a", "h_mid")
CASE_COLUMNS = ("tokens", "context", "npes", "q_len", "pad_rows", "page_stride", "static_scale")
# What a buffer holds, by allocation name: the classes that floors are stated in.
BUFFER_CLASS = {
    "w_o": "weights",
    "s_o": "weights",
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
    """One row a case: what it was, its status, its checks, its interpreter wall time."""
    columns = ["name", *CASE_COLUMNS, "status", "checks_passed", "checks_failed"]
    table = cases.reindex(columns=[*columns, "interpreter_wall_s", "error"]).copy()
    table["interpreter_wall_s"] = table["interpreter_wall_s"].astype(float).round(1)
    table["error"] = table["error"].fillna("").str.slice(0, 200)
    if not table["error"].any():
        table = table.drop(columns="error")
    return table.rename(columns={"interpreter_wall_s": "interpreter wall s"}).set_index("name")


def verdicts(cases: pd.DataFrame) -> pd.DataFrame:
    """Every verdict of every finished case, one row each, with the case's name, tokens, npes."""
    rows: list[dict[str, Any]] = []
    for case in finished(cases).to_dict("records"):
        shared = {"case": case["name"], "tokens": case["tokens"], "npes": case["npes"]}
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
    "repeat": "every published bit under another schedule",
}


def builds(cases: pd.DataFrame) -> dict[str, isa_report.IsaFigures]:
    """ISA figures per distinct build, labelled by tokens and ranks (and what else differs)."""
    out: dict[str, isa_report.IsaFigures] = {}
    for case in finished(cases).sort_values(["npes", "tokens"], kind="stable").to_dict("records"):
        label = f"{case['tokens']} tokens, " + ("solo" if case["npes"] == 1 else "four ranks")
        label = label.replace("1 tokens", "1 token")
        label += ", stride 16" if case["page_stride"] == 16 else ""
        label += ", static scale" if case["static_scale"] else ""
        out.setdefault(label, isa_report.IsaFigures(**json.loads(case["isa"])))
    return out


def isa(cases: pd.DataFrame) -> pd.DataFrame:
    """Registers, spills, LDS, code size and instructions, a row a build."""
    found = builds(cases)
    return isa_report.table(list(found.values()), list(found)) if found else pd.DataFrame()


def isa_mix(cases: pd.DataFrame) -> pd.DataFrame:
    """Instructions by class, a row a build."""
    found = builds(cases)
    return isa_report.mix_table(list(found.values()), list(found)) if found else pd.DataFrame()


def isa_changes(cases: pd.DataFrame, before: pd.DataFrame) -> pd.DataFrame:
    """Each build's figures minus the same build's in run ``before``; empty when none is shared."""
    new, old = isa(cases), isa(before)
    if new.empty or old.empty:
        return pd.DataFrame()
    shared = [label for label in new.index if label in old.index]
    return new.loc[shared] - old.loc[shared]


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
                    "npes": case["npes"],
                    "class": name,
                    "moved": per_rank,
                    "floor": floor[name],
                    "ratio": per_rank / floor[name] if floor[name] else float("nan"),
                }
            )
    return pd.DataFrame(rows)


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
