"""Running launches: ranks as cooperating routines, scheduled until all are done.

Ranks that run the same Program go in lockstep as one large grid, which is the fastest. With
``cta_groups``, ``delay`` or different Programs they are split into routines that take turns at
barriers and polls in a seeded random order: schedules a GPU may show and lockstep hides.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import m3lab.interpreter.access
import m3lab.interpreter.control  # noqa: F401
from m3lab.interpreter.counters import Counters
from m3lab.interpreter.errors import Deadlock
from m3lab.interpreter.machine import Checks, Ctas, Machine, Pause, Shared, Wait
from m3lab.interpreter.memory import Memory
from m3lab.interpreter.order import Order
from m3lab.interpreter.prepare import Prepared, prepare
from m3lab.interpreter.program import Program

_INTS = {"i32": (32, torch.int32), "i64": (64, torch.int64), "index": (64, torch.int64)}
_FLOATS = {"f32": torch.float32, "f64": torch.float64}
Delay = Mapping[int | str | tuple[int, str], int]


@dataclass
class Launch:
    """One kernel launch on one rank. ``args``: numbers in the kernel's argument order."""

    program: Program
    args: Sequence[int | float]
    rank: int = 0


@dataclass
class RunReport:
    """What a run did. ``seconds`` is the interpreter's wall time, never a kernel's."""

    counters: Counters
    operations: int
    seconds: float
    turns: int
    routines: int
    same_value_stores: int = 0  # LDS words stored by several waves, all with one value


@dataclass
class _Routine:
    machine: Machine
    ranks: tuple[int, ...]
    steps: Any
    waiting: Wait | None = None
    hold: int = 0
    done: bool = False
    started: bool = False


def run(
    launches: Sequence[Launch],
    memory: Memory,
    *,
    checks: Checks | None = None,
    seed: int | None = None,
    cta_groups: int = 1,
    delay: Delay | None = None,
    clock: Any = None,
) -> RunReport:
    """Run launches (one a rank) to the end.

    ``cta_groups``: split each rank's grid into so many randomly chosen groups. ``seed``: the random
    order of turns and of the groups (None: in order). ``delay``: hold back a rank (its number), a
    stage (its name) or a (rank, stage) for so many turns. ``clock``: a ``clock.Clock`` that gives
    the run modelled times; None costs nothing. Raises an InterpreterError for anything a
    GPU would not forgive (see ``errors``).
    """
    checks = checks or Checks()
    delay = dict(delay or {})
    if cta_groups < 1:
        raise ValueError(f"cta_groups must be at least 1, got {cta_groups}")
    began = time.perf_counter()
    rng = random.Random(seed)
    sizes = [_grid(launch.program) for launch in launches]
    ranks = torch.cat([torch.full((n,), x.rank) for n, x in zip(sizes, launches, strict=True)]).to(
        memory.device
    )
    total = int(sum(sizes))
    if total > 1 << 16:
        raise ValueError(f"the launches have {total} CTAs together; at most {1 << 16} can run")
    waves = max((_threads(launch.program) + 63) // 64 for launch in launches)
    order = Order(memory, ranks, waves) if checks.stale or checks.order else None
    counters = Counters(total, memory.device, checks.bank_conflicts)
    split = cta_groups > 1 or bool(delay)
    shared = Shared(memory, order, counters, checks, clock, interleave=split)
    if clock is not None:
        clock.begin(memory, ranks, waves, split)
    routines = _routines(launches, sizes, shared, rng, cta_groups, split)
    _check_delay(delay, routines)
    for r in routines:
        r.hold = max((n for k, n in delay.items() if k in r.ranks), default=0)
    turns = _schedule(routines, memory, shared, rng if seed is not None else None, delay)
    return RunReport(
        counters,
        sum(r.machine.executed for r in routines),
        time.perf_counter() - began,
        turns,
        len(routines),
        sum(r.machine.lds.same_value_stores for r in routines),
    )


def _check_delay(delay: dict[Any, int], routines: list[_Routine]) -> None:
    """Every key must name a rank or a stage of this run: a misspelt one would test nothing."""
    ranks = {rank for r in routines for rank in r.ranks}
    stages = {s for r in routines for s in r.machine.prepared.stages}
    for key in delay:
        rank, stage = key if isinstance(key, tuple) else (key, key)
        if not (rank in ranks if isinstance(rank, int) else True) or not (
            stage in stages if isinstance(stage, str) else True
        ):
            raise ValueError(
                f"delay {key!r} names neither a rank ({sorted(ranks)}) nor a stage "
                f"({', '.join(sorted(stages))}) of this run"
            )


def _grid(program: Program) -> int:
    x, y, z = program.grid
    return x * y * z


def _threads(program: Program) -> int:
    x, y, z = program.block
    return x * y * z


def _routines(
    launches: Sequence[Launch],
    sizes: list[int],
    shared: Shared,
    rng: random.Random,
    cta_groups: int,
    split: bool,
) -> list[_Routine]:
    """Group the launches' CTAs into routines."""
    first = 0
    parts: list[tuple[Prepared, list[tuple[Launch, torch.Tensor, int]]]] = []
    for launch, n in zip(launches, sizes, strict=True):
        prepared = prepare(launch.program)
        if shared.clock is not None:
            prepared = shared.clock.prepare(prepared)
        blocks = list(range(n))
        groups = [blocks]
        if cta_groups > 1:
            rng.shuffle(blocks)
            groups = [sorted(blocks[i::cta_groups]) for i in range(cta_groups)]
        for group in groups:
            if not group:
                continue
            entry = (launch, torch.tensor(group), first)
            same = next((p for p in parts if p[0] is prepared), None)
            if same is not None and not split:
                same[1].append(entry)
            else:
                parts.append((prepared, [entry]))
        first += n
    return [_routine(prepared, entries, shared) for prepared, entries in parts]


def _routine(
    prepared: Prepared, entries: list[tuple[Launch, torch.Tensor, int]], shared: Shared
) -> _Routine:
    device = shared.memory.device
    ids = torch.cat([blocks + first for _, blocks, first in entries]).to(device)
    blocks = torch.cat([b for _, b, _ in entries]).to(device)
    ranks = torch.cat([torch.full((len(b),), x.rank) for x, b, _ in entries]).to(device)
    program = prepared.program
    args = []
    for i, t in enumerate(program.arg_types):
        per = []
        for launch, group, _ in entries:
            if len(launch.args) != len(program.arg_types):
                raise ValueError(
                    f"{program.name} takes {len(program.arg_types)} arguments, "
                    f"got {len(launch.args)}"
                )
            per.append((_argument(launch.args[i], t.elem, program, i), len(group)))
        values = {v for v, _ in per}
        dtype = _FLOATS.get(t.elem) or _INTS[t.elem][1]
        if len(values) == 1:
            args.append(torch.full((1, 1, 1), per[0][0], dtype=dtype, device=device))
        else:
            rows = [torch.full((n, 1, 1), v, dtype=dtype, device=device) for v, n in per]
            args.append(torch.cat(rows))
    machine = Machine(prepared, args, Ctas(ids, ranks, blocks), shared)
    return _Routine(machine, tuple(sorted({x.rank for x, _, _ in entries})), machine.run())


def _argument(value: int | float, elem: str, program: Program, place: int) -> int | float:
    if elem in _FLOATS:
        return float(value)
    if elem not in _INTS:
        raise ValueError(f"{program.name}: argument {place} has type {elem}, which cannot be given")
    bits = _INTS[elem][0]
    number = int(value)
    if not -(1 << (bits - 1)) <= number < 1 << bits:
        raise ValueError(f"{program.name}: argument {place} ({number}) does not fit {elem}")
    return number - (1 << bits) if number >= 1 << (bits - 1) else number


# ---------------------------------------------------------------------- scheduling


def _schedule(
    routines: list[_Routine],
    memory: Memory,
    shared: Shared,
    rng: random.Random | None,
    delay: dict[Any, int],
) -> int:
    """Give turns until every routine is done."""
    turns = 0
    last = -1
    while True:
        left = [r for r in routines if not r.done]
        if not left:
            break
        ready = [r for r in left if r.waiting is None or memory.stores > r.waiting.version]
        free = [r for r in ready if r.hold <= 0]
        for r in left:
            r.hold -= 1
        if not free:
            if ready:
                continue  # everything that could go is held back: time passes
            if any(r.hold > 0 for r in left):
                continue
            _stuck(left, memory, shared)
            continue
        if rng is not None:
            chosen = rng.choice(free)
        else:
            chosen = next((r for r in free if routines.index(r) > last), free[0])
        last = routines.index(chosen)
        turns += 1
        _turn(chosen, delay)
    if shared.watched:
        raise Deadlock(next(iter(shared.watched.values())))
    return turns


def _turn(r: _Routine, delay: dict[Any, int]) -> None:
    r.waiting = None
    try:
        event = next(r.steps)
    except StopIteration:
        r.done = True
        return
    if isinstance(event, Wait):
        r.waiting = event
        return
    assert isinstance(event, Pause)
    for key in (event.stage, *((rank, event.stage) for rank in r.ranks)):
        if key in delay:
            r.hold = delay.pop(key)


def _stuck(left: list[_Routine], memory: Memory, shared: Shared) -> None:
    """Nobody can go on: deadlock, or a poll that only a later point of the program satisfies.

    The waiting CTAs are given up and the others run to the end; a store to a word somebody gave up
    on is a fault of program order, else it is a deadlock.
    """
    for r in left:
        assert r.waiting is not None
        message = f"{r.waiting.line}: {r.waiting.detail()}"
        for word in r.waiting.words.tolist():
            shared.watched.setdefault(word, message)
        if not shared.watched:
            raise Deadlock(message)
        r.waiting.kill()
        r.waiting = None
