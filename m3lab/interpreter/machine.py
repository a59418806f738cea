"""Executing a Program: every operation acts on all lanes of all active waves at once.

A value is a torch tensor [ctas | 1, waves | 1, 64 | 1] (a vector has one more axis), kept at the
smallest shape that broadcasts. An ``if`` or a loop that only some CTAs or waves enter runs on those
alone (compaction): values captured by the region are cut to the active CTAs and waves on entry.
A routine (a set of CTAs running one Program) is a Python generator; it yields where it must wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch

from m3lab.interpreter import uninitialized
from m3lab.interpreter.counters import Counters
from m3lab.interpreter.errors import (
    InterpreterError,
    NaNMade,
    PartialMask,
    UninitializedRead,
    UnknownOperation,
)
from m3lab.interpreter.lds import Lds
from m3lab.interpreter.memory import Memory
from m3lab.interpreter.ops.values import common_shape
from m3lab.interpreter.order import Order
from m3lab.interpreter.prepare import CONTROL, LANE_STEP, Code, Prepared

LANES = 64
Value = Any  # a tensor, or a tuple of tensors (buffer resources, struct results)


@dataclass
class Checks:
    """Which checks run. Out-of-bounds and unknown operations are always errors."""

    uninitialized: bool = True
    races: bool = True
    stale: bool = True
    order: bool = True
    nan: bool = False
    bank_conflicts: bool = True


# operations that hand a loaded word on, for telling what a poll compares it with
_WORD_MOVES = (
    "vector.extract", "arith.bitcast", "arith.minsi", "arith.maxsi", "arith.minui", "arith.maxui",
    "arith.select", "arith.trunci",
)  # fmt: skip


class Active:
    """The CTAs and waves a region runs on, and which of their lanes are active.

    ``rows``: indices into the routine's CTAs [c]; ``waves``: wave indices [w]; ``mask``: bool
    [c | 1, w | 1, 64 | 1], None when every lane is active.
    """

    __slots__ = ("mask", "rows", "waves")

    def __init__(self, rows: torch.Tensor, waves: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.rows = rows
        self.waves = waves
        self.mask = mask

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.rows), len(self.waves), LANES


@dataclass
class Wait:
    """What a routine yields when a loop cannot leave yet."""

    op_index: int
    line: str
    detail: Callable[[], str]
    version: int
    kill: Callable[[], None]
    words: torch.Tensor  # arena word numbers polled


@dataclass
class Pause:
    """A point where another routine may be given its turn (barriers, in random schedules)."""

    stage: str


@dataclass
class Ctas:
    """Identity of a routine's CTAs: global number, rank, block index (1-D each)."""

    ids: torch.Tensor
    ranks: torch.Tensor
    blocks: torch.Tensor


@dataclass
class Shared:
    """What the routines of one run share."""

    memory: Memory
    order: Order | None
    counters: Counters
    checks: Checks
    clock: Any = None
    interleave: bool = False
    watched: dict[int, str] = field(default_factory=dict)  # word -> the poll that gave up on it


class Machine:
    """One routine: a Program on a set of CTAs."""

    def __init__(
        self, prepared: Prepared, args: list[torch.Tensor], ctas: Ctas, shared: Shared
    ) -> None:
        self.prepared = prepared
        self.program = prepared.program
        self.shared = shared
        self.memory = shared.memory
        self.checks = shared.checks
        self.counters = shared.counters
        self.ctas = ctas
        self.device = shared.memory.device
        threads = 1
        for d in self.program.block:
            threads *= d
        self.n_waves = (threads + LANES - 1) // LANES
        self.vals: list[Value] = [None] * self.program.n_slots
        self.taints: dict[int, Value] = {}
        for slot, value in prepared.constants(self.device).items():
            self.vals[slot] = value
        for slot, value in zip(self.program.arg_slots, args, strict=True):
            self.vals[slot] = value
        self.lds = Lds(len(ctas.ids), self.program.lds_bytes, self.n_waves, self.device)
        mask = None
        if threads % LANES:
            index = torch.arange(self.n_waves * LANES, device=self.device)
            mask = (index < threads).view(1, self.n_waves, LANES)
        self.full_mask = mask
        self.act = Active(
            torch.arange(len(ctas.ids), device=self.device),
            torch.arange(self.n_waves, device=self.device),
            mask,
        )
        self.stack: list[Active] = []
        self.op: Any = None
        self.polls: list[Any] = []  # this round's (load, arena offsets, words found, mask)
        self.poll_act: Any = None
        self.executed = 0
        self.dead = False  # some CTAs were given up (deadlock diagnosis)

    # ------------------------------------------------------------------ running

    def run(self) -> Generator[Any, None, None]:
        """Execute the whole kernel; yields Wait and Pause."""
        yield from self.region(self.prepared.body, self.act)

    def region(self, code: Code, act: Active) -> Generator[Any, None, list[Value]]:
        """Run a region on ``act``; returns the terminator's operands."""
        self.stack.append(act)
        self.counters.region(code, act, self)
        vals, taints = self.vals, self.taints
        try:
            for kind, fn, op in code.steps:
                self.op = op
                if kind == LANE_STEP:
                    operands = [vals[s] for s in op.operands]
                    result = fn(op, *operands)
                    if taints:
                        self.lane_taint(op, operands, result)
                    if self.checks.nan:
                        self.forbid_new_nan(op, act, operands, result)
                    if len(op.results) == 1:
                        vals[op.results[0]] = result
                    else:
                        for s, v in zip(op.results, result, strict=True):
                            vals[s] = v
                elif kind == CONTROL:
                    self.act = act
                    yield from fn(self, op, act)
                    self.op = op
                else:
                    self.act = act
                    fn(self, op, act)
                self.executed += 1
                if op.last:
                    for s in op.last:
                        vals[s] = None
                        if taints:
                            taints.pop(s, None)
            return [vals[s] for s in code.end.operands]
        except InterpreterError:
            raise
        except GeneratorExit:
            raise
        except Exception as exc:
            raise InterpreterError(
                f"{self.op.kind} at {self.line(self.op)} could not be executed: "
                f"{type(exc).__name__}: {exc}"
            ) from exc
        finally:
            self.stack.pop()

    def line(self, op: Any) -> str:
        """The operation's source line, innermost frame first."""
        frames = self.program.locs[op.loc]
        if not frames:
            return f"operation {op.index} ({op.kind})"
        return " < ".join(f"{f.file}:{f.line}" for f in frames)

    def where(self, index: tuple[int, int, int]) -> str:
        """CTA, wave and lane of a position in the active tensors, in words."""
        c, w, lane = index
        row = int(self.act.rows[c])
        rank, block = int(self.ctas.ranks[row]), int(self.ctas.blocks[row])
        return f"rank {rank} CTA {block} wave {int(self.act.waves[w])} lane {lane}"

    def first(self, bad: torch.Tensor) -> tuple[int, int, int]:
        """Position of the first set element of a [c | 1, w | 1, 64 | 1] bool tensor."""
        c, w, lane = (int(i) for i in bad.nonzero()[0][:3])
        return c, w, lane

    # ------------------------------------------------------------------ values

    def set(self, slot: int, value: Value, unknown: Value = None) -> None:
        self.vals[slot] = value
        if unknown is not None:
            self.taints[slot] = unknown

    def lane_taint(self, op: Any, operands: list[Value], result: Value) -> None:
        unknown = [self.taints.get(s) for s in op.operands]
        if all(u is None for u in unknown):
            return
        t = uninitialized.of(op, operands, unknown, result)
        if t is None:
            return
        if len(op.results) == 1:
            self.taints[op.results[0]] = t
        else:
            for s, part in zip(op.results, t, strict=True):
                if part is not None:
                    self.taints[s] = part

    def forbid_new_nan(self, op: Any, act: Active, operands: list[Value], result: Value) -> None:
        """Raise NaNMade when an active lane's result is NaN and none of its operands is."""
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return
        if op.kind in ("arith.bitcast", "vector.bitcast", "arith.constant", "arith.select"):
            return  # moves: a bit pattern of integers may be a NaN's
        bad = result.isnan()
        if not bool(bad.any()):
            return
        for value, t in zip(operands, op.in_types, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                was = value.isnan()
                if bool(t.n) and not op.types[0].n:
                    was = was.any(-1)
                elif not t.n and op.types[0].n:
                    was = was.unsqueeze(-1)
                bad = bad & ~was
        lanes = bad.any(-1) if op.types[0].n else bad
        lanes = self.active(act, lanes)
        if bool(lanes.any()):
            self.act = act
            raise NaNMade(
                f"{self.line(op)}: {op.kind} made a NaN from operands that hold none "
                f"({self.where(self.first(lanes.expand(act.shape)))})"
            )

    def active(self, act: Active, t: torch.Tensor) -> torch.Tensor:
        """``t`` (bool, lanes) restricted to active lanes."""
        return t if act.mask is None else t & act.mask

    def forbid_taint(self, slot: int, act: Active, what: str, only: Any = None) -> None:
        """UninitializedRead when an active lane's value in ``slot`` has a bit nothing wrote."""
        t = self.taints.get(slot)
        if t is None:
            return
        vector = self.program.slot_types[slot].n > 0
        parts = t if isinstance(t, tuple) else (t,)
        for part in parts:
            if part is None:
                continue
            bad = self.active(act, uninitialized.lanes(part, vector))
            if only is not None:
                bad = bad & only
            if bool(bad.any()):
                raise UninitializedRead(
                    f"{self.line(self.op)}: {what} depends on memory that nothing wrote "
                    f"({self.where(self.first(bad.expand(act.shape)))})"
                )

    # ------------------------------------------------------------------ lane groups

    def cross(self, fn: Any, op: Any, act: Active) -> None:
        """A move between lanes: results from inactive lanes are unknown bits."""
        operands = [self.vals[s] for s in op.operands]
        result, source = fn(op, *operands, mask=act.mask)
        unknown: Value = None
        if self.taints:
            marks = [self.taints.get(s) for s in op.operands]
            if any(m is not None for m in marks):
                unknown = uninitialized.moved(fn, op, operands, marks, act.mask, result)
        if self.checks.uninitialized and source is not None and act.mask is not None:
            mask = act.mask.expand(*act.mask.shape[:2], LANES)
            lanes = source.expand(*common_shape(source.shape, mask.shape))
            mask = mask.expand(lanes.shape)
            off = ~torch.gather(mask, 2, lanes.clamp(0, LANES - 1).to(torch.int64)) & mask
            if bool(off.any()):
                unknown = self._inactive(result, off, unknown)
        several = isinstance(result, tuple) and len(op.results) > 1
        results = result if several else (result,)
        unknowns = unknown if several and unknown is not None else (unknown,) * len(results)
        for s, v, u in zip(op.results, results, unknowns, strict=True):
            self.set(s, v, u)

    def _inactive(self, result: Value, off: torch.Tensor, unknown: Value) -> Value:
        if isinstance(result, tuple):
            old = unknown if isinstance(unknown, tuple) else (None,) * len(result)
            return tuple(self._inactive(r, off, u) for r, u in zip(result, old, strict=True))
        if result.dtype == torch.bool:
            return unknown
        wide = off.unsqueeze(-1) if result.dim() > 3 else off
        full = uninitialized.full_like(result)
        marked = torch.where(wide, full, torch.zeros_like(full))
        return marked if unknown is None else marked | unknown

    def matrix(self, fn: Any, op: Any, act: Active) -> None:
        """A wave-wide operation: every lane of each participating wave must be active."""
        if act.mask is not None:
            some = act.mask.expand(act.mask.shape[0], act.mask.shape[1], LANES)
            partial = some.any(-1) & ~some.all(-1)
            if bool(partial.any()):
                c, w = (int(i) for i in partial.nonzero()[0])
                raise PartialMask(
                    f"{self.line(op)}: {op.kind} runs with a part of the wave's lanes off "
                    f"({self.where((c, w, 0))})"
                )
        operands = [self.vals[s] for s in op.operands]
        result = fn(op, *operands)
        self.set(op.results[0], result)
        self.counters.matrix(op, act, self)
        if self.taints and any(s in self.taints for s in op.operands):
            self._matrix_taint(op, operands, result)

    def _matrix_taint(self, op: Any, operands: list[Value], result: torch.Tensor) -> None:
        """Row r of A, column r of B (16 x 16 forms: lane 16 g + r) make result (4 g + e, r)."""
        hit: torch.Tensor | None = None
        for place, slot in enumerate(op.operands):
            t = self.taints.get(slot)
            if t is None:
                continue
            m = uninitialized.lanes(t, op.in_types[place].n > 0)
            if "16x16" not in op.kind:
                part = m.any(-1, keepdim=True).unsqueeze(-1).expand(*m.shape, result.shape[-1])
            elif place == 2:
                part = t != 0
            else:
                by_row = m.expand(*m.shape[:2], LANES).view(*m.shape[:2], 4, 16).any(2)
                if place in (0, 3):  # A or its scale: rows
                    part = by_row.view(*m.shape[:2], 4, 1, 4).expand(-1, -1, -1, 16, -1)
                    part = part.reshape(*m.shape[:2], LANES, 4)
                else:  # B or its scale: columns
                    part = by_row.repeat(1, 1, 4).unsqueeze(-1)
            hit = part if hit is None else hit | part
        if hit is not None and bool(hit.any()):
            full = uninitialized.full_like(result)
            self.taints[op.results[0]] = torch.where(hit, full, torch.zeros_like(full))

    def barrier(self, op: Any, act: Active) -> None:
        """All waves of each participating CTA must arrive with their full lanes."""
        mask = act.mask
        rows = act.rows
        short = len(act.waves) != self.n_waves
        if not short and mask is not None and mask is not self.full_mask:
            m = mask.expand(act.shape)
            need = m if self.full_mask is None else m | ~self.full_mask
            some, every = m.flatten(1).any(1), need.flatten(1).all(1)
            if bool((some & ~every).any()):
                short = True
                rows = rows[some & ~every]
            else:
                rows = rows[some]
        if short:
            row = int(rows[0])
            raise PartialMask(
                f"{self.line(op)}: barrier reached by a part of the CTA's lanes or waves only "
                f"(rank {int(self.ctas.ranks[row])} CTA {int(self.ctas.blocks[row])})"
            )
        self.lds.barrier(rows)
        if self.shared.order is not None:
            self.shared.order.barrier(self.ctas.ids[rows])
        self.counters.barrier(op, rows, self)

    def op_line(self, index: int) -> str:
        """Source line of the operation at a place in the program."""
        return self.line(self.prepared.by_index(index))

    def share_loop(self, a: int, b: int) -> bool:
        """Both operations lie in one loop: which came first is then not told by their places."""
        loops = self.prepared.loops
        return bool(set(loops.get(a, ())) & set(loops.get(b, ())))

    def unsatisfied(self, loop: Any) -> list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Polling loads of the last round with lanes whose last word is none of those compared
        with: (load, arena offsets, words found, those lanes)."""
        wanted = {int(v) for t in self._compared(loop) for v in t.unique().tolist()}
        out = []
        for load, offsets, raw, mask in self.polls:
            missing = torch.ones(raw.shape[:3], dtype=torch.bool, device=self.device)
            for value in wanted:
                missing &= raw[..., -1] != value
            if mask is not None:
                missing = missing & mask
            if bool(missing.any()):
                out.append((load, offsets.expand(missing.shape), raw, missing))
        return out

    def poll_words(self, loop: Any) -> torch.Tensor:
        """Arena words a stuck polling loop still waits for."""
        words = [offsets[missing] // 4 for _, offsets, _, missing in self.unsatisfied(loop)]
        if not words:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        return torch.cat(words).unique()

    def poll_detail(self, loop: Any, act: Active) -> str:
        """What a stuck poll reads: region, words found, tag wanted."""
        stuck = self.unsatisfied(loop)
        if not stuck:
            return "a loop whose condition no load decides"
        _, offsets, raw, missing = stuck[0]
        self.act = self.poll_act
        index = self.first(missing)
        found = raw.expand(*missing.shape, raw.shape[-1])[index].tolist()
        wanted = sorted({int(v) for t in self._compared(loop) for v in t.unique().tolist()})
        more = int(sum(int(m.sum()) for *_, m in stuck)) - 1
        return (
            f"{self.where(index)} (and {more} more lanes) polls "
            f"{self.memory.describe(int(offsets[index]))}: found words {found}, wants one of "
            f"{wanted[:4]}"
        )

    def _compared(self, loop: Any) -> list[torch.Tensor]:
        """Values from outside the loop that its integer comparisons use (the tags wanted)."""
        outside = set(loop.codes[0].captures) | set(loop.codes[1].captures)
        outside |= set(self.prepared.folded)
        data: set[int] = set()  # words loaded, and minima and maxima of them
        found = []
        for _, _, o in loop.inner_steps:
            if getattr(o, "spin", False) or (o.kind in _WORD_MOVES and data & set(o.operands)):
                data.update(o.results)
            elif o.kind == "arith.cmpi" and data & set(o.operands):
                for s in set(o.operands) & outside:
                    if isinstance(self.vals[s], torch.Tensor):
                        found.append(self.vals[s])
        return found

    def give_up(self, rows: torch.Tensor) -> None:
        """Take CTAs out of the run: every active mask on the stack loses them."""
        self.dead = True
        gone = torch.zeros(len(self.ctas.ids), dtype=torch.bool, device=self.device)
        gone[rows] = True
        for act in self.stack:
            keep = ~gone[act.rows].view(-1, 1, 1)
            act.mask = keep if act.mask is None else act.mask & keep


def unknown_operation(machine: Machine, op: Any) -> None:
    raise UnknownOperation(
        f"{machine.line(op)}: the interpreter does not know {op.kind} "
        f"({', '.join(map(str, op.in_types))} -> {', '.join(map(str, op.types))}); add it to "
        "m3lab/interpreter/ops (a lane, cross-lane or matrix function) or as a machine operation"
    )
