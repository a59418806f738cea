"""Seconds of the interpreter on one decode step, at MiniMax-M3's full shapes.

    python benchmarks/interpreter.py                      # solo and four ranks, S = 1, 8k context
    python benchmarks/interpreter.py --cases solo:1 ranks:1 ranks:4 --device cuda

``cold``: tracing, lowering and the first run, with an empty cache. ``cached``: loading the Program
from the cache and the first run. ``run``: the median of later runs (wall), with the process's CPU
seconds beside it: on a loaded machine the two part. All checks are on unless ``--no-checks``. These
are an interpreter's seconds, never a GPU's kernel time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="*", default=["solo:1", "ranks:1"], help="solo:S ranks:S")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--until", default="all", help="stage to stop after; 'all' for the whole")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's default)")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--cold", action="store_true", help="time building too (needs flydsl)")
    parser.add_argument("--profile", action="store_true", help="print the costliest functions")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, device {options.device}")
    print("| case | operations | cold s | cached s | run s | run CPU s | peak GB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in options.cases:
        print(row(case, options), flush=True)


def row(case: str, options: argparse.Namespace) -> str:
    """One table row, measured in this process."""
    import torch

    from m3lab.interpreter import Checks, Memory
    from m3lab.step import DecodeStep

    if options.threads:
        torch.set_num_threads(options.threads)
    kind, tokens = case.split(":")
    off = {"taint": False, "races": False, "stale": False, "order": False}
    checks = Checks(**off) if options.no_checks else Checks()

    def step() -> DecodeStep:
        return DecodeStep(
            tokens=int(tokens),
            npes=1 if kind == "solo" else 4,
            context=options.context,
            until=None if options.until == "all" else options.until,
            memory=Memory(options.device),
        )

    def timed(job: object) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        job()  # type: ignore[operator]
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu

    cold = "-"
    if options.cold:
        with tempfile.TemporaryDirectory() as folder:
            kept = os.environ.get("M3LAB_CACHE")
            os.environ["M3LAB_CACHE"] = folder
            fresh = step()
            fresh.prepare()
            seconds = sum(fresh.build.seconds.values()) + timed(lambda: fresh.run(checks=checks))[0]
            cold = f"{seconds:.2f}"
            os.environ.pop("M3LAB_CACHE")
            if kept is not None:
                os.environ["M3LAB_CACHE"] = kept
    step().prepare()  # fills the cache
    ready = step().prepare()
    first = sum(ready.build.seconds.values()) + timed(lambda: ready.run(checks=checks))[0]
    runs = [timed(lambda: ready.run(checks=checks)) for _ in range(options.repeat)]
    if options.profile:
        profile(lambda: ready.run(checks=checks))
    operations = ready.run(checks=checks).report.operations
    if any(not v.passed for v in ready.verify(ready.run(checks=checks))):
        sys.exit(f"{case}: a verdict failed")
    wall = statistics.median(r[0] for r in runs)
    cpu = statistics.median(r[1] for r in runs)
    if options.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    else:
        peak = torch.cuda.max_memory_allocated() / 2**30
    return f"| {case} | {operations} | {cold} | {first:.2f} | {wall:.2f} | {cpu:.2f} | {peak:.1f} |"


def profile(job: object) -> None:
    import cProfile
    import pstats

    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(job)  # type: ignore[arg-type]
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
