"""Loads and stores of LDS, with their checks: bounds, alignment, races, words nothing wrote."""

from __future__ import annotations

from typing import Any

import torch

from m3lab.interpreter import uninitialized
from m3lab.interpreter.errors import LdsRace, Misaligned, OutOfBounds
from m3lab.interpreter.machine import Active, Machine
from m3lab.interpreter.ops.pointer import type_bytes
from m3lab.interpreter.ops.values import common_shape
from m3lab.interpreter.program import Type
from m3lab.interpreter.words import alignment, as_type, as_words, gather, mark_as, unit_of


def _address(
    machine: Machine, op: Any, act: Active, ptr: torch.Tensor, nbytes: int
) -> tuple[torch.Tensor, Any]:
    """Checked byte addresses in the CTA's LDS (lanes off: a safe one) and the live mask."""
    live = act.mask
    addr = ptr
    if live is not None and addr.numel() > 1:
        if not bool(live.any()):
            return addr[:1, :1, :1] * 0, live
        wide = common_shape(live.shape, addr.shape)
        some, addr = live.expand(wide), addr.expand(wide)
        addr = torch.where(some, addr, addr[some][0])
    lo, hi = int(addr.min()), int(addr.max())
    if lo < 0 or hi + nbytes > machine.program.lds_bytes:
        bad = (addr < 0) | (addr + nbytes > machine.program.lds_bytes)
        at = machine.first(bad)
        raise OutOfBounds(
            f"{machine.line(op)}: LDS byte {int(addr[at])} (+{nbytes}) is outside the CTA's "
            f"{machine.program.lds_bytes} bytes ({machine.where(at)})"
        )
    need = min(alignment(op, nbytes), nbytes & -nbytes)
    if need > 1 and bool((addr % need).any()):
        at = machine.first((addr % need) != 0)
        raise Misaligned(
            f"{machine.line(op)}: LDS byte {int(addr[at])} must be aligned to {need} bytes for a "
            f"{nbytes}-byte access ({machine.where(at)})"
        )
    return addr, live


def _flat(machine: Machine, act: Active, addr: torch.Tensor) -> torch.Tensor:
    """Byte offsets into the routine's LDS storage: [c, w | 1, 64 | 1]."""
    rows = act.rows.view(-1, 1, 1)
    return rows * (machine.lds.words * 4) + addr


def load(machine: Machine, op: Any, act: Active, ptr: torch.Tensor) -> None:
    t = op.types[0]
    nbytes = type_bytes(t)
    addr, live = _address(machine, op, act, ptr, nbytes)
    offset = _flat(machine, act, addr)
    raw = gather(machine.lds.views, offset, nbytes)
    machine.counters.lds(op, addr, nbytes, act, machine, "load")
    if machine.shared.clock is not None:
        machine.shared.clock.lds(machine, op, act, addr, nbytes)
    unknown: Any = None
    checks = machine.checks
    if checks.races or checks.uninitialized:
        unknown = _read_checks(machine, op, act, offset, live, t, nbytes)
    machine.set(op.results[0], as_type(raw, t), unknown)


def _spread(
    act: Active, offset: torch.Tensor, live: Any, words: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, Any]:
    """Flat word indices of an LDS access with CTA row and wave of each, active lanes only."""
    c, w, _ = act.shape
    lanes = offset.shape[2]
    shape = (c, w, max(lanes, 1 if live is None else live.shape[2]))
    first = (offset // 4).expand(shape)
    rows = act.rows.view(-1, 1, 1).expand(shape)
    waves = act.waves.view(1, -1, 1).expand(shape)
    keep = None
    if live is not None:
        keep = live.expand(shape)
        first, rows, waves = first[keep], rows[keep], waves[keep]
    first, rows, waves = first.reshape(-1), rows.reshape(-1), waves.reshape(-1)
    if words > 1:
        steps = torch.arange(words, device=first.device)
        first = (first[:, None] + steps).reshape(-1)
        rows = rows.repeat_interleave(words)
        waves = waves.repeat_interleave(words)
    return first, rows, waves, keep, shape


def _read_checks(
    machine: Machine, op: Any, act: Active, offset: torch.Tensor, live: Any, t: Type, nbytes: int
) -> Any:
    words = (nbytes + 3) // 4
    flat, rows, waves, keep, shape = _spread(act, offset, live, words)
    never, raced = machine.lds.reads_race(flat, rows, waves)
    if machine.checks.races and bool(raced.any()):
        i = int(raced.nonzero()[0, 0])
        _race(machine, op, int(flat[i]), int(rows[i]), int(waves[i]), "reads", "changed")
    if not machine.checks.uninitialized or not bool(never.any()):
        return None
    lane_bad = never.view(-1, words)
    mark = torch.zeros((*shape, words), dtype=torch.bool, device=flat.device)
    if keep is not None:
        mark[keep] = lane_bad
    else:
        mark = lane_bad.view(*shape, words)
    bits = torch.where(mark, -1, 0).to(torch.int32)
    if nbytes < 4:
        bits = bits.to({1: torch.int8, 2: torch.int16}[nbytes])
    return uninitialized.clean(mark_as(bits.contiguous(), t))


def _race(machine: Machine, op: Any, word: int, row: int, wave: int, does: str, did: str) -> None:
    byte = word % machine.lds.words * 4
    name = next(
        (g.name for g in machine.program.lds if g.offset <= byte < g.offset + g.nbytes), "LDS"
    )
    raise LdsRace(
        f"{machine.line(op)}: wave {wave} {does} LDS byte {byte} ({name}) which another wave {did} "
        f"since the last barrier (rank {int(machine.ctas.ranks[row])} "
        f"CTA {int(machine.ctas.blocks[row])})"
    )


def store(machine: Machine, op: Any, act: Active, ptr: torch.Tensor) -> None:
    slot = op.operands[0]
    t = op.in_types[0]
    nbytes = type_bytes(t)
    if act.mask is not None and not bool(act.mask.any()):
        return
    machine.forbid_taint(slot, act, "a store to LDS")
    addr, live = _address(machine, op, act, ptr, nbytes)
    offset = _flat(machine, act, addr)
    unit = unit_of(offset, nbytes)
    words = as_words(machine.vals[slot], nbytes, unit, t.n > 0)
    c, w, _ = act.shape
    lanes = max(offset.shape[2], words.shape[2], 1 if live is None else live.shape[2])
    shape = (c, w, lanes)
    offset = offset.expand(shape)
    words = words.expand(*shape, words.shape[-1])
    if live is not None:
        keep = live.expand(shape)
        flat, data = offset[keep], words[keep]
    else:
        flat, data = offset.reshape(-1), words.reshape(-1, words.shape[-1])
    view = machine.lds.views[unit]
    indices = [(flat + k) // unit for k in range(0, nbytes, unit)]
    parts = [
        data[:, 4 * k : 4 * k + 4] if unit == 16 else data[:, k] for k in range(nbytes // unit)
    ]
    if machine.checks.races:
        old = [view.index_select(0, i) for i in indices]
        _write_checks(machine, op, act, offset, live, nbytes, unit, old, parts)
    for i, part in zip(indices, parts, strict=True):
        view[i] = part
    if machine.checks.races and (c * w > c or lanes > 1):
        _same_store(machine, op, act, offset, live, view, indices, parts)
    machine.counters.lds(op, addr, nbytes, act, machine, "store")
    if machine.shared.clock is not None:
        machine.shared.clock.lds(machine, op, act, addr, nbytes)


def _write_checks(
    machine: Machine,
    op: Any,
    act: Active,
    offset: torch.Tensor,
    live: Any,
    nbytes: int,
    unit: int,
    old: list[torch.Tensor],
    new: list[torch.Tensor],
) -> None:
    words = (nbytes + 3) // 4
    flat, rows, waves, _, _ = _spread(act, offset, live, words)
    was = torch.cat([o.reshape(len(o), -1) for o in old], 1)
    now = torch.cat([n.reshape(len(n), -1) for n in new], 1)
    differs = was != now
    if unit == 8:
        differs = differs.repeat_interleave(2, 1)
    elif unit < 4:
        differs = differs.view(len(differs), words, -1).any(-1)
    changed = differs.reshape(-1)
    raced = machine.lds.writes_race(flat, rows, waves, changed)
    if bool(raced.any()):
        i = int(raced.nonzero()[0, 0])
        _race(machine, op, int(flat[i]), int(rows[i]), int(waves[i]), "changes", "read or changed")


def _same_store(
    machine: Machine,
    op: Any,
    act: Active,
    offset: torch.Tensor,
    live: Any,
    view: torch.Tensor,
    indices: list[torch.Tensor],
    parts: list[torch.Tensor],
) -> None:
    """Two lanes of one store giving one word different values."""
    for i, part in zip(indices, parts, strict=True):
        got = view.index_select(0, i)
        differ = got != part
        if differ.dim() > 1:
            differ = differ.any(1)
        if bool(differ.any()):
            at = int(differ.nonzero()[0, 0])
            _, rows, waves, _, _ = _spread(act, offset, live, 1)
            _race(
                machine, op, int(i[at]) * (machine.lds.data.numel() // view.shape[0]) // 4,
                int(rows[at]), int(waves[at]), "changes", "(or another lane) changes",
            )  # fmt: skip
