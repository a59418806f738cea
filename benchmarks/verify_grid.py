"""The whole kernel against both references over a grid of cases, in one process, on any device.

    python benchmarks/verify_grid.py --tp 4 8 --tokens 1 2 3 4 --device cuda --out grid.csv

One line a case: verdicts passed, the worst relative L2 of every published intermediate against the
kernel reference fed with the kernel's own inputs, and the end against the exact reference. Weights
are drawn once; unrouted experts are poisoned. ``--build-only`` fills the cache of Programs (needs
flydsl), so that the grid can run where flydsl is not installed.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from typing import Any

CONTEXTS = [1, 100, 2048, 2049, 8192, 65536]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", type=int, nargs="*", default=[4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS)
    parser.add_argument("--solo", choices=["no", "yes", "both"], default="both")
    parser.add_argument("--until", default="all", help="stage to stop after; 'all' for the whole")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", help="CSV file for the rows")
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    rows = [row for case in cases(options) if (row := run_case(case, options)) is not None]
    if options.out and rows:
        with open(options.out, "w", newline="") as file:
            names = list(dict.fromkeys(name for row in rows for name in row))
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    failed = [row for row in rows if row["failed"]]
    print(f"{len(rows)} cases, {len(failed)} with a failed verdict")
    sys.exit(1 if failed else 0)


def cases(options: argparse.Namespace) -> list[dict[str, int]]:
    """Every (tp, solo, tokens, context) asked for; one context each to build only."""
    solos = {"no": [0], "yes": [1], "both": [1, 0]}[options.solo]
    contexts = options.contexts[:1] if options.build_only else options.contexts
    return [
        {"tp": tp, "solo": solo, "tokens": tokens, "context": context}
        for tp in options.tp
        for solo in (solos if tp > 1 else [1])
        for tokens in options.tokens
        for context in contexts
    ]


def run_case(case: dict[str, int], options: argparse.Namespace) -> dict[str, Any] | None:
    """Prepare, run and verify one case; prints its line."""
    from m3lab.interpreter import Memory
    from m3lab.model.shapes import ModelShape, RankShape
    from m3lab.step import DecodeStep, build_for

    memory = None if options.build_only else Memory(options.device)
    step = DecodeStep(
        RankShape(ModelShape(), case["tp"]),
        case["tokens"],
        context=case["context"],
        npes=1 if case["solo"] else case["tp"],
        until=None if options.until == "all" else options.until,
        memory=memory,
    )
    if options.build_only:
        build_for(step)
        print(case, "built", flush=True)
        return None
    began = time.perf_counter()
    step.prepare()
    prepared = time.perf_counter()
    result = step.run()
    ran = time.perf_counter()
    verdicts = step.verify(result)
    row: dict[str, Any] = dict(case)
    row["passed"] = sum(v.passed for v in verdicts)
    row["failed"] = sum(not v.passed for v in verdicts)
    for v in verdicts:
        name = v.name if v.against == "stage" else f"{v.name} ({v.against})"
        row[name] = max(row.get(name, 0.0), v.error)
    row["prepare_s"] = round(prepared - began, 2)
    row["run_s"] = round(ran - prepared, 2)
    row["verify_s"] = round(time.perf_counter() - ran, 2)
    worst = {v.name: v for v in verdicts if not v.passed}
    print(
        case, f"{row['passed']} passed, {row['failed']} failed", f"run {row['run_s']} s", flush=True
    )
    for v in worst.values():
        print("   ", v, flush=True)
    step.close()
    if memory is not None:
        memory.close()
    return row


if __name__ == "__main__":
    main()
