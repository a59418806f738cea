"""Structured control flow: if, for and while over lanes, waves and CTAs that part ways."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from m3lab.interpreter import uninitialized
from m3lab.interpreter.machine import Active, Machine, Pause, Value, Wait
from m3lab.interpreter.prepare import Code, machine_op

_KEEP_WHOLE = 0.75  # a region most waves enter runs under a mask: cutting its captures costs more


class Sub:
    """A subset of an ``Active``: which rows and waves were kept, and the mask left on them."""

    __slots__ = ("act", "any", "cols", "rows")

    def __init__(self, act: Active | None, rows: Any, cols: Any) -> None:
        self.act = act
        self.rows = rows
        self.cols = cols
        self.any = act is not None


def narrow(act: Active, cond: torch.Tensor) -> Sub:
    """The part of ``act`` where ``cond`` (bool, broadcastable) holds on active lanes."""
    eff = cond if act.mask is None else cond & act.mask
    if eff.numel() == 1:
        return Sub(act if bool(eff) else None, None, None)
    if bool(eff.all()):
        return Sub(Active(act.rows, act.waves, None), None, None)
    if not bool(eff.any()):
        return Sub(None, None, None)
    c, w, _ = act.shape
    waves = eff.any(-1)  # [c | 1, w | 1]
    rows = cols = None
    if waves.shape[0] > 1:
        rows = waves.any(1).nonzero().flatten()
        if len(rows) > c * _KEEP_WHOLE:
            rows = None
    if waves.shape[1] > 1:
        cols = waves.any(0).nonzero().flatten()
        if len(cols) == w:
            cols = None
    mask: torch.Tensor | None = cut(eff, rows, cols)
    if bool(mask.all()):  # type: ignore[union-attr]
        mask = None
    new_rows = act.rows if rows is None else act.rows[rows]
    new_waves = act.waves if cols is None else act.waves[cols]
    return Sub(Active(new_rows, new_waves, mask), rows, cols)


def cut(v: Value, rows: Any, cols: Any) -> Value:
    """A value on the kept rows and waves only."""
    if v is None:
        return None
    if isinstance(v, tuple):
        return tuple(cut(p, rows, cols) for p in v)
    if rows is not None and v.shape[0] > 1:
        v = v.index_select(0, rows)
    if cols is not None and v.shape[1] > 1:
        v = v.index_select(1, cols)
    return v


class _Overlay:
    """Captured values cut to a subset for the time a region runs on it."""

    def __init__(self, machine: Machine, slots: tuple[int, ...], sub: Sub) -> None:
        self.machine = machine
        self.saved: list[tuple[int, Value]] = []
        self.marks: list[tuple[int, Value]] = []
        if sub.rows is None and sub.cols is None:
            return
        vals, taints = machine.vals, machine.taints
        for s in slots:
            v = vals[s]
            if v is None:
                continue
            new = cut(v, sub.rows, sub.cols)
            if new is not v:
                self.saved.append((s, v))
                vals[s] = new
            if s in taints:
                self.marks.append((s, taints[s]))
                taints[s] = cut(taints[s], sub.rows, sub.cols)

    def restore(self) -> None:
        for s, v in self.saved:
            self.machine.vals[s] = v
        for s, t in self.marks:
            self.machine.taints[s] = t


def run_sub(
    machine: Machine, code: Code, sub: Sub, slots: tuple[int, ...] | None = None
) -> Generator[Any, None, tuple[list[Value], list[Value]]]:
    """Run ``code`` on a subset; returns its terminator's values and their taints."""
    assert sub.act is not None
    overlay = _Overlay(machine, code.captures if slots is None else slots, sub)
    values = yield from machine.region(code, sub.act)
    marks = [machine.taints.get(s) for s in code.end.operands]
    overlay.restore()
    return values, marks


# ---------------------------------------------------------------------- merging


def _lanes_of(mask: torch.Tensor | None) -> int:
    return 1 if mask is None else mask.shape[2]


def blend(base: Value, new: Value, sub: Sub, shape: tuple[int, int, int]) -> Value:
    """``base`` with ``new`` put where the subset's active lanes are; ``base`` None: don't care."""
    if isinstance(new, tuple):
        parts = base if base is not None else (None,) * len(new)
        return tuple(blend(b, n, sub, shape) for b, n in zip(parts, new, strict=True))
    assert sub.act is not None
    mask = sub.act.mask
    if sub.rows is None and sub.cols is None:
        if base is None or mask is None:
            return new
        wide = mask.unsqueeze(-1) if new.dim() > 3 else mask
        return torch.where(wide, new, base)
    c, w, _ = shape
    size = [
        c if sub.rows is not None else new.shape[0],
        w if sub.cols is not None else new.shape[1],
        max(new.shape[2], _lanes_of(mask)),
        *new.shape[3:],
    ]
    if mask is not None:
        size[0], size[1] = max(size[0], mask.shape[0]), max(size[1], mask.shape[1])
    if base is None:
        out = new.new_zeros(size)
        mask = None  # the rest is never read
    else:
        size = [max(a, b) for a, b in zip(size, base.shape, strict=True)]
        out = base.expand(size).clone()
    part_shape = list(size)
    if sub.rows is not None:
        part_shape[0] = len(sub.rows)
    if sub.cols is not None:
        part_shape[1] = len(sub.cols)
    if mask is not None:
        old = cut(out, sub.rows, sub.cols)
        wide = mask.unsqueeze(-1) if new.dim() > 3 else mask
        new = torch.where(wide, new, old)
    new = new.expand(part_shape)
    if sub.rows is not None and sub.cols is not None:
        out[sub.rows[:, None], sub.cols[None, :]] = new
    elif sub.rows is not None:
        out[sub.rows] = new
    else:
        out[:, sub.cols] = new
    return out


def _blend_marks(
    base: Value, base_mark: Value, new: Value, mark: Value, sub: Sub, shape: tuple[int, int, int]
) -> Value:
    """The taint of a blend; None stands for clean."""
    if mark is None and base_mark is None:
        return None
    if isinstance(new, tuple):
        return None
    if mark is None:
        mark = torch.zeros_like(new, dtype=uninitialized.int_dtype(new.dtype))
    if base_mark is None and base is not None:
        base_mark = torch.zeros_like(base, dtype=uninitialized.int_dtype(base.dtype))
    out = blend(base_mark, mark, sub, shape)
    return out if bool((out != 0).any()) else None


def _set(machine: Machine, slots: tuple[int, ...], values: list[Value], marks: list[Value]) -> None:
    for s, v, m in zip(slots, values, marks, strict=True):
        machine.vals[s] = v
        if m is not None:
            machine.taints[s] = m
        else:
            machine.taints.pop(s, None)


# ---------------------------------------------------------------------- if


@machine_op("scf.if", control=True)
def scf_if(machine: Machine, op: Any, act: Active) -> Generator[Any, None, None]:
    cond = machine.vals[op.operands[0]]
    machine.forbid_taint(op.operands[0], act, "a branch")
    yes = narrow(act, cond)
    if len(op.codes) == 1:
        if yes.any:
            yield from run_sub(machine, op.codes[0], yes)
        return
    then, other = op.codes
    if cond.numel() == 1:  # the same everywhere
        code = then if bool(cond) else other
        if act.mask is None or bool(act.mask.any()):
            values, marks = yield from run_sub(machine, code, Sub(act, None, None))
            _set(machine, op.results, values, marks)
        else:
            _set_zeros(machine, op)
        return
    no = narrow(act, ~cond)
    if not yes.any and not no.any:
        _set_zeros(machine, op)
        return
    if not (yes.any and no.any):
        sub, code = (yes, then) if yes.any else (no, other)
        values, marks = yield from run_sub(machine, code, sub)
        shape = act.shape
        merged = [blend(None, v, sub, shape) for v in values]
        tags = [
            _blend_marks(None, None, v, m, sub, shape) for v, m in zip(values, marks, strict=True)
        ]
        _set(machine, op.results, merged, tags)
        return
    if then.pure and other.pure:  # cheaper on all lanes than cut apart
        whole = Sub(act, None, None)
        a, am = yield from run_sub(machine, then, whole)
        b, bm = yield from run_sub(machine, other, whole)
        for s, x, y, xm, ym in zip(op.results, a, b, am, bm, strict=True):
            machine.vals[s] = _where(cond, x, y)
            if xm is not None or ym is not None:
                xm = uninitialized.full_like(x) * 0 if xm is None else xm
                ym = uninitialized.full_like(y) * 0 if ym is None else ym
                mark = _where(cond, xm, ym)
                if bool((mark != 0).any()):
                    machine.taints[s] = mark
        return
    a, am = yield from run_sub(machine, then, yes)
    b, bm = yield from run_sub(machine, other, no)
    values, marks = [], []
    for x, y, xm, ym in zip(a, b, am, bm, strict=True):
        base = blend(None, x, yes, act.shape)
        mark = _blend_marks(None, None, x, xm, yes, act.shape)
        values.append(blend(base, y, no, act.shape))
        marks.append(_blend_marks(base, mark, y, ym, no, act.shape))
    _set(machine, op.results, values, marks)


def _set_zeros(machine: Machine, op: Any) -> None:
    """Results of an if nobody runs: nobody reads them, but slots must hold something."""
    for s, t in zip(op.results, op.types, strict=True):
        shape = (1, 1, 1, t.n) if t.n else (1, 1, 1)
        machine.vals[s] = torch.zeros(shape, dtype=_dtype(t.elem), device=machine.device)


_DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32,
    "i64": torch.int64, "index": torch.int64, "f16": torch.float16, "bf16": torch.bfloat16,
    "f32": torch.float32, "f64": torch.float64, "ptr<3>": torch.int32,
}  # fmt: skip


def _dtype(elem: str) -> torch.dtype:
    return _DTYPES.get(elem, torch.int64)


def _where(cond: torch.Tensor, a: Value, b: Value) -> Value:
    if isinstance(a, tuple):
        return tuple(_where(cond, x, y) for x, y in zip(a, b, strict=True))
    return torch.where(cond.unsqueeze(-1) if a.dim() > 3 else cond, a, b)


# ---------------------------------------------------------------------- for


@machine_op("scf.for", control=True)
def scf_for(machine: Machine, op: Any, act: Active) -> Generator[Any, None, None]:
    lo, hi, step = (machine.vals[s] for s in op.operands[:3])
    for s in op.operands[:3]:
        machine.forbid_taint(s, act, "a loop bound")
    (code,) = op.codes
    iv_slot, *arg_slots = code.args
    carried = [machine.vals[s] for s in op.operands[3:]]
    marks = [machine.taints.get(s) for s in op.operands[3:]]
    if act.mask is not None and not bool(act.mask.any()):
        _set(machine, op.results, carried, marks)
        return
    if lo.numel() == hi.numel() == step.numel() == 1:
        for i in range(int(lo), int(hi), int(step)):
            machine.vals[iv_slot] = torch.full_like(lo, i)
            _set(machine, tuple(arg_slots), carried, marks)
            carried, marks = yield from run_sub(machine, code, Sub(act, None, None))
        _set(machine, op.results, carried, marks)
        return
    iv = lo
    while True:
        sub = narrow(act, iv < hi)
        if not sub.any:
            break
        machine.vals[iv_slot] = cut(iv, sub.rows, sub.cols)
        _set(
            machine,
            tuple(arg_slots),
            [cut(v, sub.rows, sub.cols) for v in carried],
            [cut(m, sub.rows, sub.cols) for m in marks],
        )
        new, new_marks = yield from run_sub(machine, code, sub)
        marks = [
            _blend_marks(old, om, v, m, sub, act.shape)
            for old, om, v, m in zip(carried, marks, new, new_marks, strict=True)
        ]
        carried = [blend(old, v, sub, act.shape) for old, v in zip(carried, new, strict=True)]
        iv = iv + step
    _set(machine, op.results, carried, marks)


# ---------------------------------------------------------------------- while


@machine_op("scf.while", control=True)
def scf_while(machine: Machine, op: Any, act: Active) -> Generator[Any, None, None]:
    before, after = op.codes
    state = [machine.vals[s] for s in op.operands]
    marks = [machine.taints.get(s) for s in op.operands]
    results: list[Value] = [None] * len(op.results)
    result_marks: list[Value] = [None] * len(op.results)
    sub = Sub(act, None, None)  # lanes still in the loop, relative to act
    rounds = 0
    machine.polls = []
    if act.mask is not None and not bool(act.mask.any()):
        _set_zeros(machine, op)
        return
    while True:
        _set(machine, before.args, state, marks)
        out, out_marks = yield from run_sub(machine, before, sub)
        assert sub.act is not None
        condition, *passed = out
        inner = sub.act
        machine.act = inner
        slot = before.end.operands[0]
        if out_marks[0] is not None:
            machine.taints[slot] = out_marks[0]
            machine.vals[slot] = condition
            machine.forbid_taint(slot, inner, "a loop condition")
        again = narrow(inner, condition)
        # lanes that leave now take their results; who goes on is overwritten later
        for i, (v, m) in enumerate(zip(passed, out_marks[1:], strict=True)):
            base, base_mark = results[i], result_marks[i]
            result_marks[i] = _blend_marks(base, base_mark, v, m, sub, act.shape)
            results[i] = blend(base, v, sub, act.shape)
        if not again.any:
            break
        nxt = _compose(sub, again)
        if rounds and any(getattr(o, "spin", False) for _, _, o in _all_steps(op)):
            yield from _wait(machine, op, nxt, rounds)
            assert nxt.act is not None
            if machine.dead:
                gone = nxt.act.mask
                if gone is not None and not bool(gone.any()):
                    break
        rounds += 1
        machine.polls = []
        _set(
            machine,
            after.args,
            [cut(v, again.rows, again.cols) for v in passed],
            [cut(m, again.rows, again.cols) for m in out_marks[1:]],
        )
        state, marks = yield from run_sub(machine, after, nxt)
        sub = nxt
    _set(machine, op.results, results, result_marks)


def _compose(outer: Sub, inner: Sub) -> Sub:
    """``inner`` (a subset of ``outer``'s) as a subset of what ``outer`` is a subset of."""

    def both(a: Any, b: Any) -> Any:
        if a is None or b is None:
            return b if a is None else a
        return a[b]

    return Sub(inner.act, both(outer.rows, inner.rows), both(outer.cols, inner.cols))


def _all_steps(op: Any) -> list[Any]:
    cached = getattr(op, "inner_steps", None)
    if cached is None:
        cached, todo = [], list(op.codes)
        while todo:
            code = todo.pop()
            cached += code.steps
            todo += [c for _, _, o in code.steps for c in getattr(o, "codes", ())]
        op.inner_steps = cached
    return list(cached)


def _wait(machine: Machine, op: Any, sub: Sub, rounds: int) -> Generator[Any, None, None]:
    """A polling loop found nothing new: let others run until something is stored."""
    act = sub.act
    assert act is not None
    lanes = act.mask.expand(act.shape).sum() if act.mask is not None else act.shape[0]
    machine.counters.poll(op, int(lanes), rounds == 1, machine)

    def rows() -> torch.Tensor:
        if act.mask is None:
            return act.rows
        return act.rows[act.mask.expand(act.shape).flatten(1).any(1)]

    def detail() -> str:
        return machine.poll_detail(op, act)

    def kill() -> None:
        gone = rows()
        machine.give_up(gone)
        keep = torch.zeros((len(act.rows), 1, 1), dtype=torch.bool, device=machine.device)
        act.mask = keep

    words = machine.poll_words(op)
    yield Wait(op.index, machine.line(op), detail, machine.memory.stores, kill, words)


@machine_op("gpu.barrier", "rocdl.s.barrier", control=True)
def barrier(machine: Machine, op: Any, act: Active) -> Generator[Any, None, None]:
    machine.barrier(op, act)
    if machine.shared.interleave:
        yield Pause(machine.prepared.stages[op.stage])
