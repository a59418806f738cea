"""Where a Program spends modelled time: its Code with the clock's events woven in.

A straight run of operations between two events has one cost, known before the run; an event stands
before a memory access, a barrier, a branch, a clock read and before the first use of a loaded value
(as the compiler's s_waitcnt). What an event costs is ``clock``'s matter. A Prepared without events
stays as it is: with no clock a run executes none of this.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from m3lab.clock.device_model import DeviceModel
from m3lab.interpreter.prepare import SIMPLE, Code, Prepared, op_class

_LOADS = ("llvm.load", "rocdl.raw.ptr.buffer.load")
_STORES = ("llvm.store", "rocdl.raw.ptr.buffer.store")
_RELEASES = (5, 6, 7)  # llvm::AtomicOrdering: release, acq_rel, seq_cst
# operations a lane function stands for more than one instruction of
_EXPANSIONS = {
    "arith.divf": 10, "arith.divsi": 30, "arith.divui": 30, "arith.remsi": 30, "arith.remui": 30,
    "arith.floordivsi": 34, "arith.ceildivsi": 34,
}  # fmt: skip
_FREE = ("llvm.call_intrinsic:llvm.expect", "gpu.block_id")
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)")


class Event:
    """A step of the clock's own: what was spent since the last one, and what is waited for.

    ``work``: {(stage, class): amount} since the last event of this Code; ``waits``: slots whose
    loads must have returned; ``what``: "barrier", "waitcnt", "spin" (a polling loop is entered),
    "round" (a round of one begins) or None; ``forward``: (loaded slots, slot they are handed to).
    """

    kind = "clock"
    operands = results = last = codes = types = in_types = ()
    spin = False

    def __init__(
        self, number: int, op: Any, work: dict[Any, float], what: str | None = None
    ) -> None:
        self.number = number
        self.loc, self.index, self.stage = op.loc, op.index, getattr(op, "stage", 0)
        self.work = dict(work)
        self.what = what
        self.polling: int | None = None  # the polling loop it is in, by its place in the program
        self.waits: tuple[int, ...] = ()
        self.forward: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass
class Timed:
    """A Prepared with events, and the events by number."""

    prepared: Prepared
    events: list[Event] = field(default_factory=list)


_CACHE: dict[int, tuple[Prepared, Timed]] = {}


def weave(prepared: Prepared) -> Timed:
    """``prepared`` with events; made once."""
    known = _CACHE.get(id(prepared))
    if known is None or known[0] is not prepared:
        if len(_CACHE) > 32:
            _CACHE.clear()
        known = _CACHE[id(prepared)] = (prepared, _Weaver(prepared).weave())
    return known[1]


def run_event(machine: Any, event: Any, act: Any) -> None:
    """The machine's step function of an event."""
    machine.executed -= 1  # not an operation of the program
    machine.shared.clock.event(machine, event, act)


# ---------------------------------------------------------------------- classes of work


def work_of(op: Any, prepared: Prepared) -> tuple[str, float]:
    """(class, amount) of an operation: its class of issue, or matrix core time in multiply-adds."""
    kind = op.kind
    if kind in _FREE:
        return "free", 0
    name = op_class(op, prepared.program)
    if name == "mfma":
        sizes = _SIZES.search(kind)
        if sizes is None:
            return "valu", 1  # a dot product of vector lanes
        m, n, k = (int(x) for x in sizes.groups())
        return _matrix_class(op), m * n * k
    return name, _EXPANSIONS.get(kind, 1)


def _matrix_class(op: Any) -> str:
    if "scale" not in op.kind:
        return "mfma"
    formats = [str(op.attrs[name]) for name in ("cbsz", "blgp")]
    narrow = all(f in ("2", "3", "4") or "fp4" in f or "fp6" in f for f in formats)
    return "mfma_fp4" if narrow else "mfma_scaled"


def class_cost(name: str, part: DeviceModel) -> tuple[float, float]:
    """Clocks one unit of a class costs: (of the SIMD, which its waves share; of the wave)."""
    if name == "valu":
        return part.issue_valu_clk * part.instructions_per_op, 0.0
    if name == "salu":
        return 0.0, part.issue_salu_clk * part.instructions_per_op
    shared = {
        "trans": part.issue_trans_clk,
        "cross": part.issue_cross_clk,
        "mfma": 1 / part.mfma_macs_per_clk,
        "mfma_scaled": 1 / part.mfma_scaled_macs_per_clk,
        "mfma_fp4": 1 / part.mfma_fp4_macs_per_clk,
    }
    if name in shared:
        return shared[name], 0.0
    own = {
        "vmem": part.issue_memory_clk,
        "lds": part.issue_memory_clk,
        "sync": part.issue_memory_clk,
        "branch": part.branch_clk,
    }
    return 0.0, own.get(name, 0.0)


# ---------------------------------------------------------------------- weaving


class _Weaver:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.program = prepared.program
        self.events: list[Event] = []
        self.polling: int | None = None
        self.pending: dict[int, tuple[int, ...]] = {}  # slot -> loads its value comes from
        self.in_order: dict[int, int] = {}  # vector memory loads: slot -> issue number

    def weave(self) -> Timed:
        body = self.region(self.prepared.body, set())
        return Timed(replace(self.prepared, body=body), self.events)

    def event(self, op: Any, work: dict[Any, float], what: str | None = None) -> Event:
        event = Event(len(self.events), op, work, what)
        event.polling = self.polling
        self.events.append(event)
        work.clear()
        return event

    def region(self, code: Code, done: set[int], round_of: Any = None, targets: Any = ()) -> Code:
        """A Code with its events. ``done``: loads that are known to have returned. ``round_of``:
        the polling loop that this is a round of. ``targets``: per operand of the terminator the
        slots it is handed to."""
        steps: list[Any] = []
        work: dict[Any, float] = defaultdict(float)
        if round_of is not None:
            steps.append((SIMPLE, run_event, self.event(round_of, work, "round")))
        for kind, fn, op in code.steps:
            waits = self.waits(op, done)
            what = self.action(op)
            if waits or what:
                event = self.event(op, work, None if what == "flush" else what)
                event.waits = waits
                steps.append((SIMPLE, run_event, event))
                if op.codes:
                    event.forward = self.inits(op, done)
            steps.append((kind, fn, self.control(op, done) if op.codes else op))
            name, amount = work_of(op, self.prepared)
            if name != "free":
                work[op.stage, name] += amount
            self.define(op, done)
        forward = []
        for slot, into in zip(code.end.operands, targets, strict=False):
            roots = self.roots(slot, done)
            for target in into:
                if roots:
                    forward.append((roots, target))
                    self.pending[target] = (target,)
                    done.discard(target)
        if work or forward:
            event = self.event(code.steps[-1][2] if code.steps else code.end, work)
            event.forward = tuple(forward)
            steps.append((SIMPLE, run_event, event))
        # a pure branch would run on all lanes or on some, as the CTAs that go together happen to be
        return replace(code, steps=steps, pure=False)

    # ------------------------------------------------------------------ what is waited for

    def roots(self, slot: int, done: set[int]) -> tuple[int, ...]:
        return tuple(r for r in self.pending.get(slot, ()) if r not in done)

    def waits(self, op: Any, done: set[int]) -> tuple[int, ...]:
        """Loads whose first use this operation is; marks them returned."""
        if work_of(op, self.prepared)[0] == "free":
            return ()
        found: list[int] = []
        for slot in op.operands[: 3 if op.kind == "scf.for" else None]:
            if op.kind != "scf.while":
                found += [r for r in self.roots(slot, done) if r not in found]
        if not found:
            return ()
        ordered = [r for r in found if r in self.in_order]
        if ordered:  # vector memory loads return in order: the last one stands for all
            last = max(ordered, key=lambda r: self.in_order[r])
            limit = self.in_order[last]
            done.update(r for r, n in self.in_order.items() if n <= limit)
            found = [r for r in found if r not in self.in_order or r == last]
        done.update(found)
        return tuple(found)

    def action(self, op: Any) -> str | None:
        """Why an event must stand before ``op``."""
        if op.kind in ("gpu.barrier", "rocdl.s.barrier"):
            return "barrier"
        if op.kind == "rocdl.s.waitcnt":
            return "waitcnt"
        if op.kind == "llvm.fence":
            ordering = int(op.attrs.get("ordering", 0) or 0)
            scope = str(op.attrs.get("syncscope", ""))
            wide = scope in ("", "agent", "agent-one-as", "one-as")
            return "waitcnt" if wide and ordering in _RELEASES else None
        if op.kind == "scf.while":
            return "spin" if self.spins(op) else "flush"
        if op.codes or op.kind in _LOADS or op.kind in _STORES or "memrealtime" in op.kind:
            return "flush"
        return None

    def spins(self, op: Any) -> bool:
        todo = list(op.codes)
        while todo:
            code = todo.pop()
            if any(getattr(o, "spin", False) for _, _, o in code.steps):
                return True
            todo += [c for _, _, o in code.steps for c in o.codes]
        return False

    def define(self, op: Any, done: set[int]) -> None:
        """What the results of ``op`` still wait for."""
        if op.kind in _LOADS:
            (slot,) = op.results
            self.pending[slot] = (slot,)
            done.discard(slot)
            if work_of(op, self.prepared)[0] == "vmem" and not scalar_load(op, self.program):
                self.in_order[slot] = len(self.in_order)
        elif not op.codes and work_of(op, self.prepared)[0] == "free":
            roots = tuple(dict.fromkeys(r for s in op.operands for r in self.roots(s, done)))
            for slot in op.results:
                self.pending[slot] = roots

    # ------------------------------------------------------------------ control flow

    def inits(self, op: Any, done: set[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Loaded values handed to a loop's arguments (and results, if it does not run)."""
        pairs: list[tuple[int, tuple[int, ...]]]
        if op.kind == "scf.for":
            pairs = [
                (s, (arg, result))
                for s, arg, result in zip(
                    op.operands[3:], op.codes[0].args[1:], op.results, strict=True
                )
            ]
        elif op.kind == "scf.while":
            pairs = [(s, (a,)) for s, a in zip(op.operands, op.codes[0].args, strict=True)]
        else:
            return ()
        out = []
        for slot, into in pairs:
            roots = self.roots(slot, done)
            for target in into:
                # the loop's own yield may hand a load to it as well
                self.pending[target] = (target,)
                done.discard(target)
                if roots:
                    out.append((roots, target))
        return tuple(out)

    def control(self, op: Any, done: set[int]) -> Any:
        """A copy of a control operation with timed regions."""
        new = copy.copy(op)
        if op.kind == "scf.for":
            into = list(zip(op.codes[0].args[1:], op.results, strict=True))
            new.codes = (self.region(op.codes[0], set(done), targets=into),)
        elif op.kind == "scf.while":
            before, after = op.codes
            inside = set(done)
            leave = [(), *zip(after.args, op.results, strict=True)]
            outer = self.polling
            if self.spins(op):
                self.polling = op.index
            one = self.region(before, inside, op if self.spins(op) else None, leave)
            two = self.region(after, inside, targets=[(a,) for a in before.args])
            self.polling = outer
            new.codes = (one, two)
        else:
            new.codes = tuple(
                self.region(code, set(done), targets=[(r,) for r in op.results])
                for code in op.codes
            )
        return new


def scalar_load(op: Any, program: Any) -> bool:
    """A load the compiler gives to the scalar cache: a plain one at a uniform address."""
    if op.kind != "llvm.load" or int(op.attrs.get("ordering", 0) or 0) or not program.uniform:
        return False
    return program.uniform[op.operands[0]] != "varying"
