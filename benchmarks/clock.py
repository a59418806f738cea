"""What the modelled clock costs a run of the interpreter, and what it must not change.

    python benchmarks/clock.py                    # solo and four ranks, S = 1 and 4, 8k context
    python benchmarks/clock.py --cases ranks:2 --repeat 9

Runs without and with a clock take turns on one prepared step; figures are medians of the process's
CPU seconds (and wall seconds), so other work on the machine falls on both. ``bits``: all that the
ranks published is the same with it on and off; ``time``: the modelled time is the same each time.
All checks are on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", help="solo:S ranks:S",
                        default=["solo:1", "ranks:1", "solo:4", "ranks:4"])  # fmt: skip
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs")
    print(
        "| case | off: CPU s (wall) | on: CPU s (wall) | on / off, CPU | bits | time, modelled us |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for case in options.cases:
        print(row(case, options), flush=True)


def row(case: str, options: argparse.Namespace) -> str:
    """One table row, measured in this process."""
    import torch

    from m3lab.clock.clock import Clock
    from m3lab.step import DecodeStep

    kind, tokens = case.split(":")
    ranks = 1 if kind == "solo" else 4
    step = DecodeStep(tokens=int(tokens), npes=ranks, context=options.context, until=None).prepare()
    step.run()
    step.run(clock=Clock())
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    outputs: dict[bool, Any] = {}
    modelled = set()
    for _ in range(options.repeat):
        for on in (False, True):
            clock = Clock() if on else None
            cpu, wall = time.process_time(), time.perf_counter()
            result = step.run(clock=clock)
            seconds[on].append((time.process_time() - cpu, time.perf_counter() - wall))
            outputs[on] = [t for v in result.ranks for t in vars(v).values() if torch.is_tensor(t)]
            if clock is not None:
                modelled.add(clock.modelled().step_modelled_us)
    same = all(torch.equal(a, b) for a, b in zip(outputs[False], outputs[True], strict=True))
    off, on_ = (
        [statistics.median(s) for s in zip(*seconds[k], strict=True)] for k in (False, True)
    )
    times = "differs: " + str(modelled) if len(modelled) > 1 else f"same, {modelled.pop():.2f}"
    return (
        f"| {case} | {off[0]:.2f} ({off[1]:.2f}) | {on_[0]:.2f} ({on_[1]:.2f}) "
        f"| {on_[0] / off[0]:.2f} | {'same' if same else 'differ'} | {times} |"
    )


if __name__ == "__main__":
    main()
