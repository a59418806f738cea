"""Loads, stores and fences of global memory, through pointers and buffer resources.

Cache policy: an ``aux`` of a buffer access has SC0 = 1, NT = 2, SC1 = 16 (gfx940 and later); SC1 is
device scope, SC0 | SC1 system scope. An LLVM atomic access has its ``syncscope``.
"""

from __future__ import annotations

from typing import Any

import torch

from m3lab.interpreter import lds_access, uninitialized
from m3lab.interpreter.errors import Misaligned, NonUniform, OutOfBounds, ProgramOrder, StaleRead
from m3lab.interpreter.machine import LANES, Active, Machine
from m3lab.interpreter.memory import BASE, Allocation, _Miss
from m3lab.interpreter.ops import LANE
from m3lab.interpreter.ops.pointer import type_bytes
from m3lab.interpreter.ops.values import common_shape
from m3lab.interpreter.order import DEVICE, NONE, SYSTEM, Violation
from m3lab.interpreter.prepare import machine_op
from m3lab.interpreter.words import ELEMENTS, alignment, as_type, as_words, gather, mark_as, unit_of

_SC0, _SC1 = 1, 16
_NO_LIMIT = 0xFFFFFFFF
_SCOPES = {"": SYSTEM, "agent": DEVICE, "agent-one-as": DEVICE, "one-as": SYSTEM}
_ACQUIRE, _RELEASE, _ACQ_REL = 4, 5, 6  # llvm::AtomicOrdering


# ---------------------------------------------------------------------- global memory


def _check_access(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, nbytes: int, live: Any
) -> tuple[torch.Tensor, list[Allocation]]:
    """Arena offsets safe to use (lanes off read byte 0) and the allocations they lie in."""
    lane_off = offset
    if live is not None:
        if not bool(live.any()):
            return torch.zeros((1, 1, 1), dtype=torch.int64, device=offset.device), []
        some = live.expand(common_shape(live.shape, offset.shape))
        wide = offset.expand(some.shape)
        fill = wide[some][0]
        lane_off = torch.where(some, wide, fill)
    lo, hi = int(lane_off.min()), int(lane_off.max()) + nbytes
    memory = machine.memory
    one = memory.check_span(lo, hi) if lo >= 0 else None
    if one is not None:
        found = [one]
    else:
        found = _locate(machine, op, act, lane_off, nbytes)
    natural = min(nbytes & -nbytes, 4) if op.kind.startswith("rocdl") else alignment(op, nbytes)
    if natural > 1 and bool((lane_off % natural).any()):
        bad = (lane_off % natural) != 0
        at = machine.first(bad.expand(*bad.shape[:2], bad.shape[2]))
        raise Misaligned(
            f"{machine.line(op)}: a {nbytes}-byte access must be aligned to {natural} bytes; "
            f"{machine.where(at)} uses {memory.describe(int(lane_off[at]))}"
        )
    return lane_off, found


def _locate(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, nbytes: int
) -> list[Allocation]:
    """Allocations of accesses that span several: first by wave, then lane by lane."""
    memory = machine.memory
    flat = offset.flatten(2) if offset.dim() > 3 else offset
    lo, hi = flat.amin(2).flatten(), flat.amax(2).flatten() + nbytes
    try:
        return memory.locate_all(lo, hi)
    except _Miss:
        pass
    lanes = flat.flatten()
    try:
        return memory.locate_all(lanes, lanes + nbytes)
    except _Miss as miss:
        c, w, lane = (int(i) for i in torch.unravel_index(torch.tensor(miss.index), flat.shape))
        at = int(flat[c, w, lane])
        where = memory.describe(at)
        if memory.at(at) is not None:
            where += ", and runs past its end"
        raise OutOfBounds(
            f"{machine.line(op)}: a {nbytes}-byte {op.kind} is out of bounds: "
            f"{machine.where((c, w, lane))} touches {where}"
        ) from None


def _load(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, live: Any, scope: int, zero: Any
) -> None:
    """Load ``op``'s result from arena offsets. ``zero``: lanes that read 0 instead (or None)."""
    t = op.types[0]
    nbytes = type_bytes(t)
    memory = machine.memory
    safe, found = _check_access(machine, op, act, offset, nbytes, live)
    if not found:  # no lane really loads
        shape = (1, 1, 1, t.n) if t.n else (1, 1, 1)
        dtype = torch.bool if t.elem == "i1" else ELEMENTS.get(t.elem, torch.int64)
        machine.set(op.results[0], torch.zeros(shape, dtype=dtype, device=memory.device))
        return
    raw = gather(memory.views, safe, nbytes)
    if op.spin:
        machine.polls.append((op, safe, raw, live))
        machine.poll_act = act
    unknown: Any = None
    if machine.checks.uninitialized and any(a.tracked for a in found):
        written = gather(memory.defined_views, safe, nbytes)
        if bool((written != -1).any()) if written.dtype != torch.uint8 else True:
            mark = ~written
            if zero is not None:
                mark = torch.where(zero.unsqueeze(-1), torch.zeros_like(mark), mark)
            unknown = uninitialized.clean(mark_as(mark, t))
    if zero is not None and bool(zero.any()):
        raw = torch.where(zero.unsqueeze(-1), torch.zeros_like(raw), raw)
    machine.set(op.results[0], as_type(raw, t), unknown)
    _count(machine, op, act, safe, nbytes, found, scope, live, "load")
    order = machine.shared.order
    if order is not None and any(a.written >= order.start for a in found):
        _check_order(machine, op, act, safe, nbytes, live, scope)


def _check_order(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, nbytes: int, live: Any, scope: int
) -> None:
    """Stale reads and program order of the words just read."""
    memory, order = machine.memory, machine.shared.order
    assert order is not None
    words = (nbytes + 3) // 4
    index = offset // 4
    entries = memory.writer.index_select(0, index.reshape(-1)).view(index.shape)
    for k in range(1, words):  # the latest writer of any of the words
        more = memory.writer.index_select(0, (index + k).reshape(-1)).view(index.shape)
        entries = torch.maximum(entries, more)
    if not bool((entries >> 24 >= order.start).any()):
        return
    shape = common_shape(entries.shape, (act.shape[0], act.shape[1], 1))
    if live is not None:
        shape = common_shape(shape, live.shape)
    ids = machine.ctas.ids[act.rows].view(-1, 1, 1).expand(shape)
    waves = act.waves.view(1, -1, 1).expand(shape)
    entries = entries.expand(shape)
    # neighbouring lanes mostly read words of one store: look at each such run once
    keep = torch.ones(shape, dtype=torch.bool, device=entries.device)
    if shape[2] > 1:
        keep[..., 1:] = entries[..., 1:] != entries[..., :-1]
    if live is not None:
        some = live.expand(shape)
        keep[..., 1:] |= ~some[..., :-1]
        keep &= some
    flat = [t[keep] for t in (entries, ids, waves)]
    whole = act.mask is None and len(act.waves) == machine.n_waves
    bad = order.load(op.index, flat[0], flat[1], flat[2], scope, op.spin, whole)
    if bad is None:
        return
    at = bad.at if isinstance(bad, Violation) else bad[0]
    c, w, lane = (int(i) for i in keep.nonzero()[at])
    where = (c, w, lane)
    place = memory.describe(int(offset.expand(shape)[where]))
    if isinstance(bad, Violation):
        if not machine.checks.stale:
            return
        source = machine.op_line(order.source(bad.seq))
        raise StaleRead(
            f"{machine.line(op)}: {place}, written by CTA {bad.writer} at {source}, "
            f"{bad.why} ({machine.where(where)})"
        )
    if machine.checks.order and not machine.share_loop(op.index, bad[1]):
        raise ProgramOrder(
            f"{machine.line(op)}: {machine.where(where)} polls {place}, which only a later point "
            f"of the program writes ({machine.op_line(bad[1])})"
        )


def _store(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, live: Any, scope: int, slot: int
) -> None:
    value = machine.vals[slot]
    t = machine.program.slot_types[slot]
    nbytes = type_bytes(t)
    memory = machine.memory
    if live is not None and not bool(live.any()):
        return
    machine.forbid_taint(slot, act, "a store", live)
    safe, found = _check_access(machine, op, act, offset, nbytes, live)
    unit = unit_of(safe, nbytes)
    words = as_words(value, nbytes, unit, t.n > 0)
    shape = common_shape(safe.shape, words.shape[:3])
    if live is not None:
        shape = common_shape(shape, live.shape)
    safe = safe.expand(shape)
    words = words.expand(*shape, words.shape[-1])
    if live is not None:
        keep = live.expand(shape)
        flat, data = safe[keep], words[keep]
    else:
        flat, data = safe.reshape(-1), words.reshape(-1, words.shape[-1])
    for k in range(nbytes // unit):
        index = (flat + k * unit) // unit
        if unit == 16:
            memory.views[16][index] = data[:, 4 * k : 4 * k + 4]
        else:
            memory.views[unit][index] = data[:, k]
        if any(a.tracked for a in found):
            memory.defined_views[unit][index] = -1 if unit > 1 else 0xFF
    _note_store(machine, op, act, flat, nbytes, found, scope, live, shape)
    _count(machine, op, act, safe, nbytes, found, scope, live, "store")


def _note_store(
    machine: Machine,
    op: Any,
    act: Active,
    flat: torch.Tensor,
    nbytes: int,
    found: list[Allocation],
    scope: int,
    live: Any,
    shape: Any,
) -> None:
    """Remember who wrote which words, and wake or accuse those who watch them."""
    memory, order = machine.memory, machine.shared.order
    seq = memory.stores
    for a in found:
        a.written = seq
    if machine.shared.watched:
        for word in (flat // 4).unique().tolist():
            hit = machine.shared.watched.get(word) or machine.shared.watched.get(word + 1)
            if hit is not None:
                raise ProgramOrder(
                    f"{hit}; only a later point of the program writes it ({machine.line(op)})"
                )
    if order is None:
        memory.stores += 1
        return
    c, w, _ = act.shape
    ids = machine.ctas.ids[act.rows].view(-1, 1).expand(c, w)
    waves = act.waves.view(1, -1).expand(c, w)
    picked = torch.ones((c, w), dtype=torch.bool, device=flat.device)
    if live is not None:
        picked = live.expand(common_shape(live.shape, (c, w, 1))).any(-1)
    entries = torch.zeros((c, w), dtype=torch.int64, device=flat.device)
    entries[picked] = order.store(op.index, ids[picked], waves[picked], scope)
    if shape[0] == 1:  # every CTA (or wave) stores the same words: one of them is named
        entries = entries.amax(0, keepdim=True)
    if shape[1] == 1:
        entries = entries.amax(1, keepdim=True)
    per_lane = entries.unsqueeze(-1).expand(shape)
    chosen = per_lane[live.expand(shape)] if live is not None else per_lane.reshape(-1)
    for k in range((nbytes + 3) // 4):
        memory.writer[flat // 4 + k] = chosen


def _count(
    machine: Machine,
    op: Any,
    act: Active,
    offset: torch.Tensor,
    nbytes: int,
    found: list[Allocation],
    scope: int,
    live: Any,
    what: str,
) -> None:
    """Bytes asked for: a lane-uniform address counts once a wave."""
    c, w, _ = act.shape
    lanes = offset.shape[2]
    if live is None:
        n = c * w * lanes
    else:
        shape = common_shape(live.shape, (1, 1, lanes))
        reps = (c // shape[0]) * (w // shape[1])
        n = int(live.expand(shape).sum()) * reps
    names = {NONE: "cached", DEVICE: "device", SYSTEM: "system"}
    buffer = found[0].name if found else "none"
    machine.counters.access(op, "global", names[scope], buffer, what, n * nbytes, machine)
    clock = machine.shared.clock
    if clock is not None:
        clock.access(machine, op, act, offset, nbytes, found, scope, live, what)


# ---------------------------------------------------------------------- buffer resources


@machine_op("rocdl.make.buffer.rsrc")
def make_rsrc(machine: Machine, op: Any, act: Active) -> None:
    """A buffer resource: (base address, bytes). Must be uniform over the wave."""
    base, _, size, _ = (machine.vals[s] for s in op.operands)
    size = size.to(torch.int64) & 0xFFFFFFFF
    for name, part in (("base", base), ("size", size)):
        if part.shape[2] > 1:
            same = part == part[:, :, :1]
            if act.mask is not None:
                lane = act.mask.expand(*act.mask.shape[:2], LANES).to(torch.uint8).argmax(-1)
                wide = part.expand(*common_shape(part.shape, act.mask.shape))
                index = lane.expand(wide.shape[:2]).unsqueeze(-1)
                part = wide.gather(2, index)
                same = (wide == part) | ~act.mask
            else:
                part = part[:, :, :1]
            if not bool(same.all()):
                at = machine.first(~same)
                raise NonUniform(
                    f"{machine.line(op)}: a buffer descriptor's {name} differs between the lanes "
                    f"of a wave ({machine.where(at)}); the compiler would loop over the values"
                )
        if name == "base":
            base = part
        else:
            size = part
    machine.forbid_taint(op.operands[0], act, "a buffer's base")
    machine.set(op.results[0], (base, size))


def _buffer(
    machine: Machine, op: Any, act: Active, first: int, nbytes: int
) -> tuple[torch.Tensor, Any, Any]:
    """(arena offsets, lanes that access memory, lanes out of range) of a raw buffer access."""
    base, size = machine.vals[op.operands[first]]
    voffset, soffset = (machine.vals[s] for s in op.operands[first + 1 : first + 3])
    offset = voffset.to(torch.int64) & 0xFFFFFFFF
    if soffset.numel() > 1 or int(soffset) != 0:
        offset = offset + (soffset.to(torch.int64) & 0xFFFFFFFF)
    live = act.mask
    outside = None
    if size.numel() > 1 or int(size) != _NO_LIMIT:
        unlimited = size == _NO_LIMIT
        outside = (offset + nbytes > size) & ~unlimited
        if not bool(outside.any()):
            outside = None
        else:
            live = ~outside if live is None else live & ~outside
    for slot in op.operands[first + 1 : first + 3]:
        machine.forbid_taint(slot, act, "an address", live)
    return offset + (base - BASE), live, outside


def _aux_scope(op: Any) -> int:
    aux = int(op.attrs.get("aux", 0) or 0)
    if aux & _SC1:
        return SYSTEM if aux & _SC0 else DEVICE
    return NONE


@machine_op("rocdl.raw.ptr.buffer.load")
def buffer_load(machine: Machine, op: Any, act: Active) -> None:
    offset, live, outside = _buffer(machine, op, act, 0, type_bytes(op.types[0]))
    _load(machine, op, act, offset, live, _aux_scope(op), outside)


@machine_op("rocdl.raw.ptr.buffer.store")
def buffer_store(machine: Machine, op: Any, act: Active) -> None:
    offset, live, _ = _buffer(machine, op, act, 1, type_bytes(op.in_types[0]))
    _store(machine, op, act, offset, live, _aux_scope(op), op.operands[0])


# ---------------------------------------------------------------------- pointers


def _pointer_scope(op: Any) -> int:
    if not int(op.attrs.get("ordering", 0) or 0):
        return NONE
    return _SCOPES.get(str(op.attrs.get("syncscope", "")), NONE)


@machine_op("llvm.load")
def load(machine: Machine, op: Any, act: Active) -> None:
    machine.forbid_taint(op.operands[0], act, "an address")
    ptr = machine.vals[op.operands[0]]
    if op.in_types[0].elem == "ptr<3>":
        lds_access.load(machine, op, act, ptr)
        return
    scope = _pointer_scope(op)
    _load(machine, op, act, ptr - BASE, act.mask, scope, None)
    if int(op.attrs.get("ordering", 0) or 0) in (_ACQUIRE, _ACQ_REL, 7):
        _fence(machine, act, scope, True, False)


@machine_op("llvm.store")
def store(machine: Machine, op: Any, act: Active) -> None:
    machine.forbid_taint(op.operands[1], act, "an address")
    ptr = machine.vals[op.operands[1]]
    if op.in_types[1].elem == "ptr<3>":
        lds_access.store(machine, op, act, ptr)
        return
    scope = _pointer_scope(op)
    if int(op.attrs.get("ordering", 0) or 0) in (_RELEASE, _ACQ_REL, 7):
        _fence(machine, act, scope, False, True)
    _store(machine, op, act, ptr - BASE, act.mask, scope, op.operands[0])


# ---------------------------------------------------------------------- fences and waits


def _active_waves(machine: Machine, act: Active) -> tuple[torch.Tensor, torch.Tensor]:
    c, w, _ = act.shape
    ids = machine.ctas.ids[act.rows].view(-1, 1).expand(c, w)
    waves = act.waves.view(1, -1).expand(c, w)
    if act.mask is None:
        return ids.reshape(-1), waves.reshape(-1)
    some = act.mask.any(-1).expand(c, w)
    return ids[some], waves[some]


def _fence(machine: Machine, act: Active, scope: int, acquire: bool, release: bool) -> None:
    if machine.shared.order is not None:
        ids, waves = _active_waves(machine, act)
        machine.shared.order.fence(ids, waves, scope, acquire, release)


@machine_op("llvm.fence")
def fence(machine: Machine, op: Any, act: Active) -> None:
    """Agent and system scope order memory between CTAs. A workgroup fence does not: outside
    tgsplit mode it waits for no global store (LLVM AMDGPU memory model, gfx942)."""
    ordering = int(op.attrs.get("ordering", 0) or 0)
    scope = _SCOPES.get(str(op.attrs.get("syncscope", "")), NONE)
    acquire, release = ordering in (_ACQUIRE, _ACQ_REL, 7), ordering in (_RELEASE, _ACQ_REL, 7)
    _fence(machine, act, scope, acquire, release)


@machine_op("rocdl.s.waitcnt")
def waitcnt(machine: Machine, op: Any, act: Active) -> None:
    """vmcnt(0) means the wave's stores were acknowledged at their scope."""
    field = int(next((v for v in op.attrs.values() if isinstance(v, int)), -1))
    vmcnt = (field & 0xF) | ((field >> 14) & 0x3) << 4
    if vmcnt == 0 and machine.shared.order is not None:
        machine.shared.order.drain(*_active_waves(machine, act))


@machine_op(
    "rocdl.s.sleep", "rocdl.sched.barrier", "rocdl.sched.group.barrier", "rocdl.s.setprio",
    "rocdl.iglp.opt", "rocdl.s.nop",
)  # fmt: skip
def nothing(machine: Machine, op: Any, act: Active) -> None:
    """Scheduling hints: no effect on values."""


@machine_op("llvm.call_intrinsic:llvm.amdgcn.s.memrealtime", "rocdl.s.memrealtime")
def memrealtime(machine: Machine, op: Any, act: Active) -> None:
    """The virtual clock in 10 ns ticks when one is attached, else 0."""
    clock = machine.shared.clock
    if clock is None:
        value = torch.zeros((1, 1, 1), dtype=torch.int64, device=machine.device)
    else:
        value = clock.ticks(machine, act)
    machine.set(op.results[0], value)


@machine_op("llvm.mlir.undef", "llvm.mlir.poison")
def undefined(machine: Machine, op: Any, act: Active) -> None:
    """A value of which every bit counts as never written."""
    value = LANE[op.kind](op, device=machine.device)
    known = not isinstance(value, torch.Tensor) or not machine.checks.uninitialized
    machine.set(op.results[0], value, None if known else uninitialized.full_like(value))


@machine_op("gpu.block_id")
def block_id(machine: Machine, op: Any, act: Active) -> None:
    grid = machine.program.grid
    index = machine.ctas.blocks[act.rows].view(-1, 1, 1)
    dim = str(op.attrs["dimension"]).rstrip(">")[-1]
    if dim == "x":
        value = index % grid[0]
    elif dim == "y":
        value = index // grid[0] % grid[1]
    else:
        value = index // (grid[0] * grid[1])
    machine.set(op.results[0], value)
