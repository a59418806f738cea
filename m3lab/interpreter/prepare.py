"""Making a Program ready to run: bind operations to functions, fold what only threads decide.

Values that depend on the thread index and constants alone are the same in every run: they are
computed once, shrunk to the smallest shape (a wave index is [1, waves, 1], a lane [1, 1, 64]) and
their operations leave the code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

import m3lab.interpreter.ops.arith
import m3lab.interpreter.ops.convert
import m3lab.interpreter.ops.crosslane
import m3lab.interpreter.ops.math
import m3lab.interpreter.ops.matrix
import m3lab.interpreter.ops.pointer
import m3lab.interpreter.ops.vector  # noqa: F401
from m3lab.interpreter.ops import CROSS, LANE, MATRIX
from m3lab.interpreter.program import Op, Program, Region, walk

LANES = 64
LANE_STEP, SIMPLE, CONTROL = 0, 1, 2  # how the machine runs a step
MACHINE: dict[str, tuple[int, Callable[..., Any]]] = {}  # operations the machine itself handles

_LOADS = ("llvm.load", "rocdl.raw.ptr.buffer.load")
_DIMS = {"x": 0, "y": 1, "z": 2}


def machine_op(*kinds: str, control: bool = False) -> Callable[..., Any]:
    """Register an operation handled by the machine: fn(machine, op, active)."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        for kind in kinds:
            MACHINE[kind] = (CONTROL if control else SIMPLE, fn)
        return fn

    return add


@dataclass
class Code:
    """A region bound to functions. ``captures``: outer slots its operations read (all levels)."""

    args: tuple[int, ...]
    steps: list[tuple[int, Callable[..., Any], Any]]
    end: Op
    captures: tuple[int, ...]
    pure: bool  # only lane operations: may run on lanes that are off
    histogram: list[tuple[int, str, int]] = field(default_factory=list)


@dataclass
class Prepared:
    """A Program bound to the interpreter's functions, shareable between routines and runs."""

    program: Program
    body: Code
    folded: dict[int, torch.Tensor]
    stages: list[str]
    stage_of: dict[int, int]  # Op.loc -> stage
    loops: dict[int, tuple[int, ...]]  # Op.index -> indices of the loops around it
    _ops: dict[int, Op] = field(default_factory=dict)
    _on: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def by_index(self, index: int) -> Op:
        """The operation at a place in the program."""
        if not self._ops:
            self._ops.update({op.index: op for op in self.program.walk()})
        return self._ops[index]

    def constants(self, device: torch.device) -> dict[int, torch.Tensor]:
        """The folded values on a device."""
        key = str(device)
        if key not in self._on:
            self._on[key] = {s: v.to(device) for s, v in self.folded.items()}
        return self._on[key]


@lru_cache(maxsize=64)
def _prepare_cached(holder: _Held) -> Prepared:
    return _Preparer(holder.program).prepare()


class _Held:
    """A Program as a cache key: by identity."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.program is self.program


def prepare(program: Program) -> Prepared:
    """Bind ``program``; the result is cached for the program object."""
    return _prepare_cached(_Held(program))


class _Preparer:
    def __init__(self, program: Program) -> None:
        self.program = program
        threads = program.block[0] * program.block[1] * program.block[2]
        self.waves = (threads + LANES - 1) // LANES
        self.folded: dict[int, torch.Tensor] = {}
        self.stages: list[str] = []
        self.stage_of: dict[int, int] = {}
        self.loops: dict[int, tuple[int, ...]] = {}
        self.spins: set[int] = set()

    def prepare(self) -> Prepared:
        for loc, name in enumerate(self.program.loc_stages):
            if name not in self.stages:
                self.stages.append(name)
            self.stage_of[loc] = self.stages.index(name)
        for op in self.program.walk():
            if op.kind == "scf.while":
                self.spins |= _spin_loads(op)
        body = self.code(self.program.body, ())
        return Prepared(self.program, body, self.folded, self.stages, self.stage_of, self.loops)

    # ------------------------------------------------------------------ binding

    def code(self, region: Region, loops: tuple[int, ...]) -> Code:
        steps: list[tuple[int, Callable[..., Any], Any]] = []
        defined = set(region.args)
        used: set[int] = set()
        pure = True
        histogram: dict[tuple[int, str], int] = {}
        *ops, end = region.ops
        for op in ops:
            if self.fold(op):
                continue
            self.loops[op.index] = loops
            bound: Any = copy.copy(op)
            bound.last = tuple(s for s in op.last if s not in self.folded)
            bound.stage = self.stage_of[op.loc]
            bound.spin = op.index in self.spins
            inner = (*loops, op.index) if op.kind in ("scf.for", "scf.while") else loops
            bound.codes = tuple(self.code(r, inner) for r in op.regions)
            steps.append((*self.bind(op), bound))
            pure = pure and steps[-1][0] == LANE_STEP
            key = (bound.stage, op_class(op, self.program))
            histogram[key] = histogram.get(key, 0) + 1
            used.update(op.operands)
            for code in bound.codes:
                used.update(code.captures)
            defined.update(op.results)
        used.update(end.operands)
        captures = tuple(sorted(used - defined))
        counts = [(stage, name, n) for (stage, name), n in histogram.items()]
        return Code(region.args, steps, end, captures, pure and len(steps) <= 24, counts)

    def bind(self, op: Op) -> tuple[int, Callable[..., Any]]:
        if op.kind in MACHINE:
            return MACHINE[op.kind]
        if op.kind in LANE:
            return LANE_STEP, LANE[op.kind]
        if op.kind in CROSS:
            fn = CROSS[op.kind]
            return SIMPLE, lambda machine, op, act: machine.cross(fn, op, act)
        if op.kind in MATRIX:
            matrix = MATRIX[op.kind]
            return SIMPLE, lambda machine, op, act: machine.matrix(matrix, op, act)
        return SIMPLE, _unknown

    # ------------------------------------------------------------------ folding

    def fold(self, op: Op) -> bool:
        """Compute ``op`` now if nothing but the thread index decides it."""
        value: Any
        if op.kind == "gpu.thread_id":
            value = self.thread_id(_DIMS[_dimension(op)])
        elif op.kind == "gpu.block_dim":
            value = _scalar(self.program.block[_DIMS[_dimension(op)]], torch.int64)
        elif op.kind == "gpu.grid_dim":
            value = _scalar(self.program.grid[_DIMS[_dimension(op)]], torch.int64)
        elif op.kind == "llvm.mlir.addressof":
            value = _scalar(self.lds_offset(op.attrs["global_name"]), torch.int32)
        elif (
            op.kind in LANE
            and op.kind not in MACHINE
            and not op.regions
            and all(s in self.folded for s in op.operands)
        ):
            value = LANE[op.kind](op, *[self.folded[s] for s in op.operands])
        else:
            return False
        values = value if isinstance(value, tuple) and len(op.results) > 1 else (value,)
        for slot, v in zip(op.results, values, strict=True):
            self.folded[slot] = _shrink(v) if isinstance(v, torch.Tensor) else v
        return True

    def thread_id(self, dim: int) -> torch.Tensor:
        x, y, _ = self.program.block
        index = torch.arange(self.waves * LANES, dtype=torch.int64).view(1, self.waves, LANES)
        return (index % x, index // x % y, index // (x * y))[dim]

    def lds_offset(self, name: str) -> int:
        for g in self.program.lds:
            if g.name == name:
                return g.offset
        raise ValueError(f"{name} is not an LDS array of {self.program.name}")


def _unknown(machine: Any, op: Op, act: Any) -> None:
    from m3lab.interpreter.machine import unknown_operation

    unknown_operation(machine, op)


def _dimension(op: Op) -> str:
    return str(op.attrs["dimension"]).strip("#<>gpu dim")[-1]


def _scalar(value: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((1, 1, 1), value, dtype=dtype)


def _shrink(v: torch.Tensor) -> torch.Tensor:
    """Drop the wave or lane axis of a small value that does not vary along it."""
    if v.shape[2] > 1 and bool((v == v[:, :, :1]).all()):
        v = v[:, :, :1]
    if v.shape[1] > 1 and bool((v == v[:, :1]).all()):
        v = v[:, :1]
    return v.contiguous()


# ---------------------------------------------------------------------- analyses


def _spin_loads(loop: Op) -> set[int]:
    """Loads in a while loop whose values decide whether it goes on."""
    before, after = loop.regions
    need = {before.ops[-1].operands[0]}
    inits = dict(zip(before.args, after.ops[-1].operands, strict=False))
    passed = dict(zip(after.args, before.ops[-1].operands[1:], strict=False))
    inside = list(walk(before)) + list(walk(after))
    found: set[int] = set()
    changed = True
    while changed:
        changed = False
        more: set[int] = set()
        for source in (inits, passed):
            more |= {v for k, v in source.items() if k in need}
        for op in inside:
            if not need & set(op.results):
                continue
            if op.kind in _LOADS:
                found.add(op.index)
            else:
                more |= set(op.operands)
            for region in op.regions:
                more |= set(region.ops[-1].operands)
        if not more <= need:
            need |= more
            changed = True
    return found


_TRANSCENDENTAL = ("exp", "rcp", "rsq", "log", "sqrt", "sin", "cos")
_FREE = ("arith.constant", "arith.bitcast", "vector.", "llvm.extractvalue", "llvm.bitcast",
         "llvm.inttoptr", "llvm.ptrtoint", "arith.index_cast")  # fmt: skip


def op_class(op: Op, program: Program) -> str:
    """The class of work an operation is: mfma, vmem, lds, cross, trans, valu, salu, sync, free."""
    kind = op.kind
    if kind in MATRIX:
        return "mfma"
    if kind in ("llvm.load", "llvm.store"):
        ptr = op.in_types[-1]
        return "lds" if ptr.elem == "ptr<3>" else "vmem"
    if "buffer" in kind and "rsrc" not in kind:
        return "vmem"
    if kind in ("gpu.barrier", "llvm.fence", "rocdl.s.waitcnt", "rocdl.s.sleep"):
        return "sync"
    if kind.startswith("scf."):
        return "branch"
    if kind in CROSS:
        return "cross"
    if kind.startswith(_FREE):
        return "free"
    if any(t in kind for t in _TRANSCENDENTAL) and "expect" not in kind:
        return "trans"
    uniform = program.uniform[op.results[0]] if op.results and program.uniform else "varying"
    return "valu" if uniform == "varying" else "salu"
