"""The whole kernel under many schedules on any device: the same bits every time, no check fires.

    python benchmarks/schedules.py --tokens 1 4 --device cuda

Four ranks at MiniMax-M3's full shapes, unwritten memory poisoned: random turns of random groups of
CTAs, then each rank held back at the start and in each stage. The tests do this at a small shape.
"""

from __future__ import annotations

import argparse
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--context", type=int, default=2049)
    parser.add_argument("--schedules", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    unequal = sum(shake(tokens, options) for tokens in options.tokens)
    sys.exit(1 if unequal else 0)


def shake(tokens: int, options: argparse.Namespace) -> int:
    """Runs one step under every schedule; returns how many published other bits."""
    from m3lab.interpreter import Memory
    from m3lab.step import DecodeStep
    from m3lab.verify import same_bits

    memory = Memory(options.device, poison=True)
    step = DecodeStep(tokens=tokens, context=options.context, until=None, memory=memory).prepare()
    expected = step.run()
    assert all(verdict.passed for verdict in step.verify(expected))
    stages = [s for s in expected.report.counters.by_stage() if s != "opening"]
    delays: list[dict] = [{rank: 40} for rank in range(4)]
    delays += [{(rank, stage): 40} for rank in range(4) for stage in stages]
    schedules = [{"seed": n, "cta_groups": 1 + n % 4} for n in range(options.schedules)]
    schedules += [{"seed": n, "delay": delay} for n, delay in enumerate(delays)]
    began, unequal = time.perf_counter(), 0
    for i, schedule in enumerate(schedules):
        verdict = same_bits(expected, step.run(**schedule), i)
        if not verdict.passed:
            unequal += 1
            print(tokens, schedule, verdict, flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{tokens} tokens: {len(schedules)} schedules (stages {', '.join(stages)}), "
        f"{unequal} with other bits, {seconds:.0f} s",
        flush=True,
    )
    memory.close()
    return unequal


if __name__ == "__main__":
    main()
