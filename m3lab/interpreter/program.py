"""A lowered kernel as plain Python data.

``lower`` makes a ``Program`` from the MLIR module; the machine runs it and a code generator can
read it. No MLIR object inside: a Program is pickled, cached and carried to machines without
flydsl. Values live in numbered slots (single assignment); control flow stays structured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNMARKED = "kernel"  # the stage of operations that were traced in no marked stage
VERSION = 2  # bump when the meaning of a field changes: cached Programs are keyed by it


class Type(NamedTuple):
    """A value's type: element name and vector length (0 for a scalar).

    Element names: i1 i8 i16 i32 i64 index, f16 bf16 f32 f64, ptr<0> (generic), ptr<1> (global),
    ptr<3> (LDS), ptr<8> (buffer resource), none.
    """

    elem: str
    n: int = 0

    def __str__(self) -> str:
        return f"vector<{self.n}x{self.elem}>" if self.n else self.elem


class Frame(NamedTuple):
    """One source position: file name and line."""

    file: str
    line: int


@dataclass
class Region:
    """Operations in order; the last one is the terminator (scf.yield, scf.condition, gpu.return).

    ``captures``: slots used inside (nested regions included) and defined outside.
    """

    args: tuple[int, ...]
    ops: list[Op]
    captures: tuple[int, ...] = ()


@dataclass
class Op:
    """One operation: what it is, where its values come from and go, what it may free."""

    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    in_types: tuple[Type, ...]
    types: tuple[Type, ...]
    attrs: dict[str, Any]
    regions: tuple[Region, ...] = ()
    loc: int = 0  # index into Program.locs
    index: int = 0  # place in program order
    last: tuple[int, ...] = ()  # slots nothing reads after this operation


@dataclass
class LdsGlobal:
    """One LDS array: symbol, byte offset in the CTA's LDS, bytes."""

    name: str
    offset: int
    nbytes: int


@dataclass
class Program:
    """A kernel: arguments, launch shape, LDS, and the body.

    ``locs``: source positions, innermost frame first; ``loc_stages``: the stage that each was
    traced in, "kernel" where none was marked. ``uniform``: per slot "const" (same in the
    whole launch), "cta" (same over a CTA), "wave" (same over a wave) or "varying".
    """

    name: str
    arg_names: tuple[str, ...]
    arg_types: tuple[Type, ...]
    arg_slots: tuple[int, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    lds: list[LdsGlobal]
    lds_bytes: int
    body: Region
    n_slots: int
    slot_types: list[Type]
    locs: list[tuple[Frame, ...]]
    loc_stages: list[str]
    arch: str = "gfx950"
    uniform: list[str] = field(default_factory=list)
    key: str = ""
    version: int = VERSION

    def walk(self) -> Iterator[Op]:
        """Every operation, in program order, nested ones included."""
        return walk(self.body)

    def kinds(self) -> dict[str, int]:
        """How many operations of each kind."""
        counts: dict[str, int] = {}
        for op in self.walk():
            counts[op.kind] = counts.get(op.kind, 0) + 1
        return counts


def walk(region: Region) -> Iterator[Op]:
    for op in region.ops:
        yield op
        for inner in op.regions:
            yield from walk(inner)
