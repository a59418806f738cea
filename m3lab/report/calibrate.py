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
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from m3lab.clock.clock import Clock
from m3lab.clock.device_model import DEVICES, DeviceModel, load_device_model, read_device_model
from m3lab.interpreter import Checks, Memory
from m3lab.kernels.tuning import Tuning
from m3lab.step import DecodeStep, build_for

CONTEXT = 8192  # keys a request of a modelled step sees
# how far, in log units, a constant may be believed to lie from its prior
SPREAD = {
    "instructions_per_op": 0.3,
    "hbm_ns": 0.4,
    "visible_ns": 0.5,
    "link_ns": 0.5,
    "poll_service_ns": 0.3,
}
STEP = 0.15  # of a finite difference, in log units
NO_CHECKS = Checks(uninitialized=False, races=False, stale=False, order=False, bank_conflicts=False)
MARKS = ("<!-- calibration: made by make calibrate -->", "<!-- end of calibration -->")


Model = Callable[[int, Tuning, DeviceModel], float]  # (tokens, knobs, constants) -> modelled us


@dataclass(frozen=True)
class Row:
    """One published figure: a time, or a change where ``before`` is given.

    ``after`` and ``before`` are Tunings of a K4 step of ``tokens``; ``needs`` says what is missing
    where no build shows the row. ``tolerance``: the relative error that counts as one standard
    deviation in the fit; 0: not fitted.
    """

    number: str
    case: str
    published_us: float
    tokens: int = 0
    after: Tuning = Tuning()  # noqa: RUF009  (frozen)
    before: Tuning | None = None
    tolerance: float = 0.0
    needs: str = ""

    def modelled_us(self, model: Model, part: DeviceModel) -> float:
        value = model(self.tokens, self.after, part)
        return value if self.before is None else value - model(self.tokens, self.before, part)


# The published schedule as far as knobs give it: rows, then routing; the shared expert first at one
# token. This project's default, which differs from it, has no published figure.
FOUR = Tuning(rows_before_routing=True)
ONE = replace(FOUR, shared_after_routing=False)
# The published changes at four tokens in the order in which they were made: what the builds of the
# rows had in common. The absolute figures agree with that order: 64.1 (row 5), -14 (row 6), -3 (row
# 7), -0.3 (row 11), -0.42 (row 10) end at 46.4, and rows 10, 8 and 1 together say 43.4 (row 5c).
EARLY = replace(
    FOUR, merge_in_output=True, spin_whole_row=True, ug_by_token=False, shared_after_routing=False
)  # before rows 6, 7, 11 and 10
MERGED = replace(EARLY, merge_in_output=False)  # after row 6
WAITED = replace(MERGED, spin_whole_row=False)  # after row 7
BY_TOKEN = replace(WAITED, ug_by_token=None)  # after row 11
EARLY_ONE = replace(ONE, early_down_weights=True)  # one token, before row 2

ROWS = (
    Row("1", "K4, S=1", 32.8, 1, ONE, tolerance=0.03),
    Row("2", "K4, S=1: down weights requested with the first up / gate", 1.5, 1, EARLY_ONE,
        ONE),
    Row("3", "an earlier K4, S=1: one copy of the scores -> eight", -1.4, 1, EARLY_ONE,
        replace(EARLY_ONE, score_copies=1)),
    Row("4", "K4, S=1: every thread polls every partition", 0.4, 1,
        replace(ONE, poll_all=True), ONE),
    Row("5a", "K4, S=4: router tasks one token after another", 74.7, 4,
        replace(EARLY, router_by_token=True), tolerance=0.03),
    Row("5", "K4, S=4: a router task per token and 8 experts", 64.1, 4, EARLY, tolerance=0.03),
    Row("5b", "K4, S=4: the change of 5a -> 5", -10.6, 4, EARLY,
        replace(EARLY, router_by_token=True)),
    Row("5c", "K4, S=4, from rows 10, 8 and 1: 54.09 - (43.5 - 32.8)", 43.4, 4, FOUR),
    Row("6", "K4, S=4: merges inside the o tasks", 14.0, 4, EARLY, MERGED),
    Row("7", "S=4: all CTAs spin on the whole normed rows", 3.0, 4, MERGED, WAITED),
    Row("8", "layer, S=1, context parallelism", 43.5, needs="K1"),
    Row("9", "layer, S=2", 43.6, needs="K1"),
    Row("10", "layer, S=4: shared expert before -> after the routing (K4)", -0.42, 4, FOUR,
        BY_TOKEN),
    Row("11", "layer, S=4: up / gate round robin -> by token (K4)", -0.3, 4, BY_TOKEN, WAITED),
    Row("12", "up / gate at S=16: unpadded LDS rows, per task", 3.0, needs="the wide form"),
    Row("13", "ranking 61 keys: eight threads -> one serial lane", 1.9, 1,
        replace(ONE, serial_rank=True), ONE),
    Row("14", "MoE alone, M=1, hand-tuned", 15.8, needs="another kernel"),
)  # fmt: skip


@dataclass
class Steps:
    """Prepared K4 steps, one at a time; each is run once per set of constants and knobs."""

    device: str = "cpu"
    memory: Memory = field(default_factory=Memory)
    prepared: dict[tuple[int, Tuning], DecodeStep] = field(default_factory=dict)
    known: dict[tuple[int, Tuning, DeviceModel], float] = field(default_factory=dict)

    def modelled_us(self, tokens: int, tuning: Tuning, part: DeviceModel) -> float:
        key = (tokens, tuning, part)
        if key not in self.known:
            clock = Clock(part)
            self.step(tokens, tuning).run(checks=NO_CHECKS, clock=clock)
            self.known[key] = clock.modelled().step_modelled_us
        return self.known[key]

    def step(self, tokens: int, tuning: Tuning) -> DecodeStep:
        if (tokens, tuning) not in self.prepared:
            self.prepared.clear()
            self.memory.close()
            self.memory = Memory(self.device)
            step = plain_step(tokens, tuning, self.memory)
            self.prepared[tokens, tuning] = step.prepare()
        return self.prepared[tokens, tuning]


def plain_step(tokens: int, tuning: Tuning, memory: Memory | None = None) -> DecodeStep:
    """The step that a row is modelled with: W = 4, four ranks."""
    return DecodeStep(tokens=tokens, context=CONTEXT, until=None, tuning=tuning, memory=memory)


def build_all(rows: Sequence[Row]) -> None:
    """Fill the cache of Programs, so that the table can be made where flydsl is not installed."""
    cases = {(r.tokens, t) for r in rows if not r.needs for t in (r.after, r.before) if t}
    for tokens, tuning in sorted(cases, key=repr):
        build_for(plain_step(tokens, tuning))


def fit(
    model: Model,
    part: DeviceModel,
    priors: dict[str, float],
    rows: Sequence[Row],
    rounds: int = 1,
) -> dict[str, float]:
    """Constants that bring the fitted rows as close as their priors allow (Gauss-Newton in logs).

    ``model(tokens, tuning, part)`` gives a modelled time. Returns the constants' values.
    """
    names = list(priors)
    wanted = [r for r in rows if r.tolerance]
    spread = torch.tensor([SPREAD[n] for n in names], dtype=torch.float64)

    def residuals(points: Sequence[torch.Tensor]) -> torch.Tensor:
        """[points, rows]; a row at a time, so that one step is prepared at a time."""
        out = torch.zeros((len(points), len(wanted)), dtype=torch.float64)
        for j, row in enumerate(wanted):
            for i, x in enumerate(points):
                values = {n: priors[n] * math.exp(float(v)) for n, v in zip(names, x, strict=True)}
                modelled = row.modelled_us(model, part.with_values(**values))
                out[i, j] = math.log(modelled / row.published_us) / row.tolerance
        return out

    x = torch.zeros(len(names), dtype=torch.float64)
    for _ in range(rounds):
        moves = STEP * torch.eye(len(names), dtype=torch.float64)
        here, *moved = residuals([x, *(x + move for move in moves)])
        slope = torch.stack([(m - here) / STEP for m in moved], 1)
        weight = torch.diag(1 / spread**2)
        towards = slope.T @ here + weight @ x
        x = (x - torch.linalg.solve(slope.T @ slope + weight, towards)).clamp(-1.5, 1.5)
    return {n: priors[n] * math.exp(float(v)) for n, v in zip(names, x, strict=True)}


def table(model: Model, part: DeviceModel, rows: Sequence[Row] = ROWS) -> str:
    """All rows as a Markdown table: published (measured by others) beside modelled."""
    lines = [
        "| # | case | published, us | modelled, us | error | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    values = {
        row.number: row.modelled_us(model, part)
        for row in sorted(rows, key=lambda r: (r.tokens, repr(r.after)))
        if not row.needs
    }
    for row in rows:
        change = row.before is not None
        published = f"{row.published_us:+g}" if change else f"{row.published_us:g}"
        if row.needs:
            lines.append(f"| {row.number} | {row.case} | {published} | | | needs {row.needs} |")
            continue
        value = values[row.number]
        if change:
            same = value * row.published_us > 0
            shown, error, note = (
                f"{value:+.2f}",
                f"{value - row.published_us:+.2f} us",
                "sign right",
            )
            if not same:
                note = "sign wrong" if abs(value) > 0.01 else "no change"
        else:
            shown, error = f"{value:.1f}", f"{value / row.published_us - 1:+.1%}"
            note = f"fitted to {row.tolerance:.0%}" if row.tolerance else "not fitted"
        lines.append(f"| {row.number} | {row.case} | {published} | {shown} | {error} | {note} |")
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
    parser = argparse.ArgumentParser(prog="python -m m3lab.report.calibrate", description=__doc__)
    parser.add_argument("--part", default="mi355x", help="part file to calibrate")
    parser.add_argument("--table-only", action="store_true", help="do not fit")
    parser.add_argument("--device", default="cpu", help="the interpreter's device")
    parser.add_argument("--build-only", action="store_true", help="fill the cache of Programs")
    parser.add_argument("--docs", type=Path, help="document whose table is replaced")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.build_only:
        build_all(ROWS)
        return
    part, steps = load_device_model(options.part), Steps(options.device)
    if not options.table_only:
        constants = read_device_model(options.part)["constants"]
        priors = {n: float(c["prior"]) for n, c in constants.items() if "prior" in c}
        values = fit(steps.modelled_us, part, priors, ROWS)
        for name, value in values.items():
            print(f"{name:22} {priors[name]:8.4g} -> {value:8.4g} {constants[name]['unit']}")
        write_values(DEVICES / f"{options.part}.yaml", values)
        part = load_device_model(options.part)
    text = table(steps.modelled_us, part)
    print(text)
    if options.docs is not None:
        write_table(options.docs, text)


if __name__ == "__main__":
    main()
