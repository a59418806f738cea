"""Fit the modelled clock's few free constants to published figures, and show the rest beside them.

``make calibrate``. The published times are others' measurements on MI355X; every time computed here
is modelled. Two rows are fitted (K4 at one and at four tokens, W = 4), the others judge the model.
A row that no kernel of this project can show yet says what it needs.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from m3lab.interpreter import Checks
from m3lab.interpreter.clock import Clock
from m3lab.interpreter.part import PARTS, Part, load_part, read_part
from m3lab.step import DecodeStep

CONTEXT = 8192  # keys a request of a modelled step sees
TOLERANCE = 0.05  # relative error of a fitted row that counts as one standard deviation
# how far, in log units, a constant may be believed to lie from its prior
SPREAD = {
    "instructions_per_op": 0.3,
    "hbm_ns": 0.4,
    "visible_ns": 0.5,
    "link_ns": 0.5,
    "poll_service_ns": 0.7,
}
STEP = 0.15  # of a finite difference, in log units
NO_CHECKS = Checks(taint=False, races=False, stale=False, order=False, bank_conflicts=False)
MARKS = ("<!-- calibration: made by make calibrate -->", "<!-- end of calibration -->")


@dataclass(frozen=True)
class Row:
    """One published figure. ``published_us``: a time, or a change where ``change`` is set.
    ``tokens``: the K4 step that shows it, None with ``needs`` saying what is missing."""

    number: str
    case: str
    published_us: float
    tokens: int | None = None
    change: bool = False
    fitted: bool = False
    needs: str = ""


ROWS = (
    Row("1", "K4, S=1", 32.8, 1, fitted=True),
    Row("2", "K4, S=1: down weights requested with the first up / gate", 1.5, change=True,
        needs="a tuning knob: when down weights are requested"),
    Row("3", "K4, S=1: one copy of the scores -> eight", -1.4, change=True,
        needs="a tuning knob: copies of the scores"),
    Row("4", "K4, S=1: every thread polls every partition", 0.4, change=True,
        needs="a tuning knob: who polls"),
    Row("5", "K4, S=4 (a router task per token and 8 experts)", 64.1, 4, fitted=True),
    Row("5b", "K4, S=4: router tasks one token after another", 74.7,
        needs="a tuning knob: router task shape"),
    Row("5c", "K4, S=4, as rows 10, 8 and 1 give it: 54.09 - (43.5 - 32.8)", 43.4, 4),
    Row("6", "K4, S=4: merges inside the o tasks", 14.0, change=True,
        needs="a tuning knob: where merges run"),
    Row("7", "S=4: all CTAs spin on the whole normed row", 3.0, change=True,
        needs="a tuning knob: who polls"),
    Row("8", "layer, S=1, context parallelism", 43.5, needs="K1"),
    Row("9", "layer, S=2", 43.6, needs="K1"),
    Row("10", "layer, S=4: shared expert before -> after the routing", -0.42, change=True,
        needs="K1"),
    Row("11", "layer, S=4: up / gate round robin -> by token", -0.3, change=True, needs="K1"),
    Row("12", "up / gate at S=16: unpadded LDS rows, per task", 3.0, change=True,
        needs="the wide form and a tuning knob: row padding"),
    Row("13", "ranking 61 keys by one serial lane", 1.9,
        needs="a tuning knob: how ranks are counted"),
    Row("14", "MoE alone, M=1, hand-tuned (another kernel)", 15.8, needs="another kernel"),
)  # fmt: skip


@dataclass
class Steps:
    """Prepared K4 steps by token count; each is run once per set of constants."""

    steps: dict[int, DecodeStep] = field(default_factory=dict)

    def modelled_us(self, tokens: int, part: Part) -> float:
        if tokens not in self.steps:
            self.steps[tokens] = DecodeStep(tokens=tokens, context=CONTEXT, until=None).prepare()
        clock = Clock(part)
        self.steps[tokens].run(checks=NO_CHECKS, clock=clock)
        return clock.modelled().step_modelled_us


def fit(
    model: Callable[[int, Part], float],
    part: Part,
    priors: dict[str, float],
    rows: Sequence[Row],
    rounds: int = 2,
) -> dict[str, float]:
    """Constants that bring the fitted rows as close as their priors allow (Gauss-Newton in logs).

    ``model(tokens, part)`` gives a modelled time. Returns the constants' values.
    """
    names = list(priors)
    wanted = [r for r in rows if r.fitted and r.tokens is not None]
    spread = torch.tensor([SPREAD[n] for n in names], dtype=torch.float64)

    def residuals(x: torch.Tensor) -> torch.Tensor:
        values = {n: priors[n] * math.exp(float(v)) for n, v in zip(names, x, strict=True)}
        now = part.with_values(**values)
        off = [math.log(model(r.tokens or 1, now) / r.published_us) for r in wanted]
        return torch.tensor(off, dtype=torch.float64) / TOLERANCE

    x = torch.zeros(len(names), dtype=torch.float64)
    for _ in range(rounds):
        here = residuals(x)
        columns = []
        for i in range(len(names)):
            moved = x.clone()
            moved[i] += STEP
            columns.append((residuals(moved) - here) / STEP)
        slope = torch.stack(columns, 1)
        weight = torch.diag(1 / spread**2)
        towards = slope.T @ here + weight @ x
        x = (x - torch.linalg.solve(slope.T @ slope + weight, towards)).clamp(-1.5, 1.5)
    return {n: priors[n] * math.exp(float(v)) for n, v in zip(names, x, strict=True)}


def table(model: Callable[[int, Part], float], part: Part, rows: Sequence[Row] = ROWS) -> str:
    """All rows as a Markdown table: published (measured by others) beside modelled."""
    lines = [
        "| # | case | published, us | modelled, us | error | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        published = f"{row.published_us:+g}" if row.change else f"{row.published_us:g}"
        if row.tokens is None:
            lines.append(f"| {row.number} | {row.case} | {published} | | | needs {row.needs} |")
            continue
        value = model(row.tokens, part)
        error = value / row.published_us - 1
        note = "fitted" if row.fitted else "not fitted"
        lines.append(
            f"| {row.number} | {row.case} | {published} | {value:.1f} | {error:+.1%} | {note} |"
        )
    return "\n".join(lines)


def write_values(path: Path, values: dict[str, float]) -> None:
    """Put fitted values into a part file, everything else as it stands."""
    text = path.read_text(encoding="utf-8")
    for name, value in values.items():
        pattern = rf"(?<=\n  {name}:\n    value: )\S+"
        text, n = re.subn(pattern, f"{value:.4g}", text)
        if n != 1:
            raise ValueError(f"{path.name} must hold {name} once, found {n} times")
    path.write_text(text, encoding="utf-8")


def write_table(path: Path, text: str) -> None:
    """Put the table between a document's marks."""
    old = path.read_text(encoding="utf-8")
    begin, end = old.index(MARKS[0]) + len(MARKS[0]), old.index(MARKS[1])
    path.write_text(f"{old[:begin]}\n\n{text}\n\n{old[end:]}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m m3lab.calibrate", description=__doc__)
    parser.add_argument("--part", default="mi355x", help="part file to calibrate")
    parser.add_argument("--table-only", action="store_true", help="do not fit")
    parser.add_argument("--docs", type=Path, help="document whose table is replaced")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, steps = load_part(options.part), Steps()
    if not options.table_only:
        constants = read_part(options.part)["constants"]
        priors = {n: float(c["prior"]) for n, c in constants.items() if "prior" in c}
        values = fit(steps.modelled_us, part, priors, ROWS)
        for name, value in values.items():
            print(f"{name:22} {priors[name]:8.4g} -> {value:8.4g} {constants[name]['unit']}")
        write_values(PARTS / f"{options.part}.yaml", values)
        part = load_part(options.part)
    text = table(steps.modelled_us, part)
    print(text)
    if options.docs is not None:
        write_table(options.docs, text)


if __name__ == "__main__":
    main()
