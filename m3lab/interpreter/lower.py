"""From FlyDSL's MLIR module to a ``Program``.

The module must be at the level after ``convert-fly-to-rocdl`` and ``canonicalize``: structured
control flow and standard dialects. This is the only interpreter module that touches MLIR, and it
interprets nothing: what it does not recognise it copies by name, and the machine refuses it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from m3lab.interpreter.program import UNMARKED, Frame, LdsGlobal, Op, Program, Region, Type, walk

_PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LEVELS = ("const", "cta", "wave", "varying")
_WAVE = 64


class LowerError(ValueError):
    """The module is not at the interpreter's level, or holds no such kernel."""


def lower(module: Any, kernel_name: str | None = None, *, mark: str = "") -> Program:
    """Lower the kernel ``kernel_name`` (default: the only one) of an MLIR ``module``.

    ``mark``: prefix of the file names of frames that stand for a stage and not for source, as in
    ``<mark>select``. An operation belongs to the innermost stage of its call chain.

    Raises LowerError when the module holds no kernel, several with no name given, or a launch
    shape that is not a constant.
    """
    return _Lowering(module, mark).program(kernel_name)


class _Lowering:
    def __init__(self, module: Any, mark: str) -> None:
        self.module = module
        self.mark = mark
        self.slots: dict[int, int] = {}
        self.slot_types: list[Type] = []
        self.locs: list[tuple[Frame, ...]] = [()]
        self.loc_stages = [UNMARKED]
        self.loc_ids: dict[tuple[tuple[Frame, ...], str], int] = {((), UNMARKED): 0}
        self.loc_cache: dict[str, int] = {}
        self.counter = 0

    # ------------------------------------------------------------------ module level

    def program(self, kernel_name: str | None) -> Program:
        kernels = {}
        lds: list[LdsGlobal] = []
        for top in self.module.body.operations:
            if top.operation.name != "gpu.module":
                continue
            for op in top.operation.regions[0].blocks[0].operations:
                if op.operation.name == "gpu.func" and _is_kernel(op.operation):
                    kernels[_attr(op.operation.attributes["sym_name"])] = op.operation
                elif op.operation.name == "llvm.mlir.global":
                    lds.append(_lds_global(op.operation))
        if kernel_name is None and len(kernels) == 1:
            kernel_name = next(iter(kernels))
        if kernel_name is None or kernel_name not in kernels:
            raise LowerError(
                f"no kernel {kernel_name!r} to lower; the module holds {sorted(kernels) or 'none'}"
            )
        func = kernels[kernel_name]
        lds_bytes = _place_lds(lds)
        block = func.regions[0].blocks[0]
        args = tuple(self._new_slot(a) for a in block.arguments)
        ops = [self._op(op.operation) for op in block.operations]
        body = Region(args, ops)
        _captures(body)
        _last_uses(body, set())
        grid, threads = self._launch_shape(kernel_name, func)
        program = Program(
            name=kernel_name,
            arg_names=tuple(f"arg{i}" for i in range(len(args))),
            arg_types=tuple(self.slot_types[s] for s in args),
            arg_slots=args,
            grid=grid,
            block=threads,
            lds=lds,
            lds_bytes=lds_bytes,
            body=body,
            n_slots=len(self.slot_types),
            slot_types=self.slot_types,
            locs=self.locs,
            loc_stages=self.loc_stages,
        )
        program.uniform = _uniformity(program)
        return program

    def _launch_shape(
        self, kernel_name: str, func: Any
    ) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Grid and block of the kernel's launch, from the host function's constants."""
        for top in self.module.body.operations:
            if top.operation.name != "func.func":
                continue
            for op in top.operation.regions[0].blocks[0].operations:
                if op.operation.name != "gpu.launch_func":
                    continue
                if not str(op.operation.attributes["kernel"]).endswith(f"@{kernel_name}"):
                    continue
                dims = [_constant(v) for v in list(op.operation.operands) if _is_index(v)][:6]
                if len(dims) < 6 or any(d is None for d in dims):
                    raise LowerError(f"{kernel_name}: grid and block must be constants")
                gx, gy, gz, bx, by, bz = (int(d) for d in dims if d is not None)
                return (gx, gy, gz), (bx, by, bz)
        if "known_block_size" in func.attributes:
            bx, by, bz = _attr(func.attributes["known_block_size"])
            return (1, 1, 1), (bx, by, bz)
        raise LowerError(f"{kernel_name}: nothing launches it and its block size is not declared")

    # ------------------------------------------------------------------ operations

    def _new_slot(self, value: Any) -> int:
        slot = len(self.slot_types)
        self.slots[_key(value)] = slot
        self.slot_types.append(_type(value.type))
        return slot

    def _op(self, op: Any) -> Op:
        operands = tuple(self.slots[_key(v)] for v in op.operands)
        attrs = {named.name: _attr(named.attr) for named in _named_attrs(op)}
        kind = op.name
        if kind in ("llvm.call_intrinsic",):
            kind = f"{kind}:{attrs['intrin']}"
        index = self.counter
        self.counter += 1
        regions = []
        for region in op.regions:
            blocks = list(region.blocks)
            if not blocks:
                continue
            if len(blocks) > 1:
                raise LowerError(f"{kind} holds unstructured control flow (several blocks)")
            args = tuple(self._new_slot(a) for a in blocks[0].arguments)
            regions.append(Region(args, [self._op(o.operation) for o in blocks[0].operations]))
        results = tuple(self._new_slot(r) for r in op.results)
        return Op(
            kind=kind,
            operands=operands,
            results=results,
            in_types=tuple(self.slot_types[s] for s in operands),
            types=tuple(self.slot_types[s] for s in results),
            attrs=attrs,
            regions=tuple(regions),
            loc=self._loc(op.location),
            index=index,
        )

    def _loc(self, loc: Any) -> int:
        text = str(loc)
        known = self.loc_cache.get(text)
        if known is None:
            frames, stage = self._marked(_frames(loc))
            known = self.loc_ids.setdefault((frames, stage), len(self.locs))
            if known == len(self.locs):
                self.locs.append(frames)
                self.loc_stages.append(stage)
            self.loc_cache[text] = known
        return known

    def _marked(self, frames: list[Frame]) -> tuple[tuple[Frame, ...], str]:
        """(the source frames, the innermost marked stage)."""
        if not self.mark:
            return tuple(_short(frames)), UNMARKED
        stages = [f.file.removeprefix(self.mark) for f in frames if f.file.startswith(self.mark)]
        source = [f for f in frames if not f.file.startswith(self.mark)]
        return tuple(_short(source)), stages[0] if stages else UNMARKED


def _short(frames: list[Frame]) -> list[Frame]:
    return [Frame(_short_path(f.file), f.line) for f in frames]


def _key(value: Any) -> int:
    """A value's identity. FlyDSL overloads ``==`` of values to trace a comparison, so they must not
    be keys themselves."""
    from flydsl._mlir import ir

    return ir.Value.__hash__(value)


def _named_attrs(op: Any) -> list[Any]:
    attributes = op.attributes
    return [attributes[i] for i in range(len(attributes))]


def _is_kernel(op: Any) -> bool:
    return "kernel" in op.attributes or "gpu.kernel" in op.attributes


def _is_index(value: Any) -> bool:
    return str(value.type) == "index"


def _constant(value: Any) -> int | None:
    owner = value.owner
    name = getattr(owner, "name", None)
    if name != "arith.constant":
        return None
    constant = _attr(owner.attributes["value"])
    return int(constant)


# ---------------------------------------------------------------------- types and attributes


def _type(t: Any) -> Type:
    text = str(t)
    if text.startswith("vector<"):
        dims, elem = text[len("vector<") : -1].rsplit("x", 1)
        count = 1
        for d in dims.split("x"):
            count *= int(d)
        return Type(elem, count)
    if text.startswith("!llvm.ptr"):
        space = text[len("!llvm.ptr") :].strip("<>") or "0"
        return Type(f"ptr<{space}>")
    if text.startswith("!llvm.struct"):
        return Type("struct", text.count(",") + 1)
    return Type(text)


def _attr(attr: Any) -> Any:
    """An MLIR attribute as plain Python data; what has no plain form stays its text."""
    from flydsl._mlir import ir

    if isinstance(attr, ir.Attribute) and type(attr) is ir.Attribute:
        attr = attr.maybe_downcast()
    if isinstance(attr, ir.BoolAttr):
        return bool(attr.value)
    if isinstance(attr, ir.IntegerAttr):
        return int(attr.value)
    if isinstance(attr, ir.FloatAttr):
        return float(attr.value)
    if isinstance(attr, ir.StringAttr):
        return attr.value
    if isinstance(attr, ir.UnitAttr):
        return True
    if isinstance(attr, ir.FlatSymbolRefAttr):
        return attr.value
    if isinstance(attr, ir.TypeAttr):
        return _type(attr.value)
    if isinstance(attr, ir.ArrayAttr):
        return [_attr(a) for a in attr]
    if isinstance(attr, ir.DictAttr):
        return {attr[i].name: _attr(attr[i].attr) for i in range(len(attr))}
    for dense in (
        ir.DenseI32ArrayAttr,
        ir.DenseI64ArrayAttr,
        ir.DenseI8ArrayAttr,
        ir.DenseBoolArrayAttr,
    ):
        if isinstance(attr, dense):
            return list(attr)
    if isinstance(attr, (ir.DenseIntElementsAttr, ir.DenseFPElementsAttr)):
        return list(attr)
    return str(attr)


def _frames(loc: Any) -> list[Frame]:
    from flydsl._mlir import ir

    loc = ir.Location.from_attr(loc.attr, loc.context)
    if isinstance(loc, ir.CallSiteLoc):
        return _frames(loc.callee) + _frames(loc.caller)
    if isinstance(loc, ir.NameLoc):
        return _frames(loc.child_loc)
    if isinstance(loc, ir.FusedLoc):
        return [f for child in loc.locations for f in _frames(child)]
    if not isinstance(loc, ir.FileLineColLoc) or loc.filename in ("", "-"):
        return []
    return [] if loc.filename[0] == "<" else [Frame(loc.filename, loc.start_line)]


@lru_cache(maxsize=1024)
def _short_path(path: str) -> str:
    """Path inside the package, else the bare file name: Programs carry no machine's paths."""
    if path.startswith(_PACKAGE_PARENT + os.sep):
        return os.path.relpath(path, _PACKAGE_PARENT)
    return os.path.basename(path)


def _lds_global(op: Any) -> LdsGlobal:
    text = str(_attr(op.attributes["global_type"]))
    # an array type: !llvm.array<2048 x i8>
    inner = str(op.attributes["global_type"])
    digits = inner.split("array<", 1)[-1].split(" x ", 1)
    if len(digits) != 2 or not digits[1].startswith("i8"):
        raise LowerError(f"LDS global {_attr(op.attributes['sym_name'])} is not bytes: {text}")
    align = int(_attr(op.attributes["alignment"])) if "alignment" in op.attributes else 16
    size = int(digits[0])
    return LdsGlobal(_attr(op.attributes["sym_name"]), align, size)


def _place_lds(lds: list[LdsGlobal]) -> int:
    """Give every LDS array its offset (in declaration order, each at its alignment)."""
    offset = 0
    for g in lds:
        align = max(g.offset, 1)
        offset = (offset + align - 1) // align * align
        g.offset = offset
        offset += g.nbytes
    return offset


# ---------------------------------------------------------------------- analyses


def _captures(region: Region) -> set[int]:
    """Fill ``captures`` of every nested region; return the slots ``region`` uses from outside."""
    defined = set(region.args)
    used: set[int] = set()
    for op in region.ops:
        used.update(op.operands)
        for inner in op.regions:
            used.update(_captures(inner))
        defined.update(op.results)
    outside = used - defined
    region.captures = tuple(sorted(outside))
    return outside


def _last_uses(region: Region, keep: set[int]) -> None:
    """Fill ``last``: slots defined in the same region that no later operation of it reads."""
    defined = set(region.args)
    for op in region.ops:
        defined.update(op.results)
    seen: set[int] = set()
    for op in reversed(region.ops):
        uses = set(op.operands)
        for inner in op.regions:
            uses.update(inner.captures)
            _last_uses(inner, set())
        dead = {s for s in uses | set(op.results) if s in defined and s not in seen}
        op.last = tuple(sorted(dead - keep))
        seen |= uses | set(op.results)


def _uniformity(program: Program) -> list[str]:
    """How far each slot's value is the same: const, cta, wave or varying (a sound bound)."""
    level = [0] * program.n_slots
    constants: dict[int, int] = {}
    thread_ids: set[int] = set()
    for op in program.walk():
        if op.kind == "arith.constant" and isinstance(op.attrs.get("value"), int):
            constants[op.results[0]] = op.attrs["value"]
    changed = True
    while changed:
        changed = False
        for op in program.walk():
            for slot, new in _op_levels(op, level, constants, thread_ids):
                if new > level[slot]:
                    level[slot] = new
                    changed = True
    return [_LEVELS[v] for v in level]


_WAVE_RESULTS = ("rocdl.readfirstlane", "rocdl.readlane", "rocdl.ballot")
_WAVE_DIVISIONS = ("arith.divsi", "arith.divui", "arith.floordivsi")


def _op_levels(
    op: Op, level: list[int], constants: dict[int, int], thread_ids: set[int]
) -> list[tuple[int, int]]:
    inputs = max((level[s] for s in op.operands), default=0)
    if op.kind == "gpu.thread_id":
        thread_ids.update(op.results)
        return [(s, 3) for s in op.results]
    if op.kind == "gpu.block_id":
        return [(s, 1) for s in op.results]
    if op.kind.startswith("arith.index_cast") and op.operands[0] in thread_ids:
        thread_ids.update(op.results)
    if op.kind in _WAVE_RESULTS:
        return [(s, min(inputs, 2)) for s in op.results]
    if op.kind in _WAVE_DIVISIONS and op.operands[0] in thread_ids:
        by = constants.get(op.operands[1], 0)
        if by and by % _WAVE == 0:
            return [(s, 2) for s in op.results]
    if op.kind.startswith(("gpu.shuffle", "rocdl.ds", "rocdl.permlane", "rocdl.mfma")):
        return [(s, 3) for s in op.results]
    if not op.regions:
        return [(s, inputs) for s in op.results]
    out: list[tuple[int, int]] = []
    yields = [r.ops[-1] for r in op.regions]
    bound = max([inputs] + [level[s] for y in yields for s in y.operands])
    for region in op.regions:
        out += [(s, bound) for s in region.args]
    return out + [(s, bound) for s in op.results]


__all__ = ["LowerError", "lower", "walk"]
