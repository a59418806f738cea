"""Moves between the 64 lanes of a wave: shuffles, DPP, permlane swaps, readlane, ballot.

A function takes the operands and ``mask`` (bool [ctas | 1, waves | 1, 64 | 1], the active lanes, or
None: all) and returns (result, source lanes): per lane the lane it read, or None where that says
nothing (ballot). What a lane gets from an inactive lane is whatever that lane's value holds; the
machine looks at ``source`` and objects where it is used. Sources: the CDNA3 and CDNA4 ISA documents
(DPP controls, ds_swizzle, permlane swaps), LLVM's AMDGPU usage (intrinsics), MLIR's GPU to ROCDL
lowering (gpu.shuffle).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from m3lab.interpreter.ops import cross_op, lane_op
from m3lab.interpreter.ops.values import common_shape, immediate
from m3lab.interpreter.program import Op

Tensor = torch.Tensor
Mask = Tensor | None
Moved = tuple[Any, Tensor | None]

LANES = 64
ROW = 16  # lanes of a DPP row

# which operands are values that move (the others say where from); the first names the result's own
MOVES: dict[str, tuple[int, ...]] = {}


def _cross(kinds: tuple[str, ...], moves: tuple[int, ...]) -> Any:
    for kind in kinds:
        MOVES[kind] = moves
    return cross_op(*kinds)


def _calls(*names: str, types: tuple[str, ...] = ("i32", "f32", "i64")) -> tuple[str, ...]:
    """Kinds of the LLVM intrinsics ``names`` at each overload."""
    return tuple(f"llvm.call_intrinsic:{n}{t and '.' + t}" for n in names for t in ("", *types))


@cache
def lane_index(device: torch.device | str) -> Tensor:
    """[1, 1, 64] int64: each lane's own number (shared: never write to it)."""
    return torch.arange(LANES, device=device).reshape(1, 1, LANES)


def take_lanes(x: Tensor, source: Tensor) -> Tensor:
    """``x`` of lane ``source[lane]`` for every lane; x: [c, w, 64 | 1] and maybe elements."""
    if x.shape[2] == 1:
        return x
    if source.shape[0] == 1 and source.shape[1] == 1:
        return x.index_select(2, source.reshape(-1))
    shape = (*common_shape(x.shape[:2], source.shape[:2]), source.shape[2])
    index = source.expand(shape)
    x = x.expand(*shape[:2], *x.shape[2:])
    if x.dim() > 3:
        index = index.unsqueeze(-1).expand(*shape, x.shape[-1])
    return x.gather(2, index)


# ---------------------------------------------------------------------- gpu dialect


@cross_op("gpu.shuffle")
def shuffle(op: Op, value: Tensor, offset: Tensor, width: Tensor, *, mask: Mask = None) -> Moved:
    """Lane ^, -, + ``offset`` or ``offset`` itself; past the group's end the lane's own value.

    Second result: whether the lane was in range. As lowered for AMDGPU: a group ends at the next
    multiple of ``width``, and a lane below 0 (mode up) wraps around the wave.
    """
    lane = lane_index(value.device)
    by, size = offset.to(torch.int64), width.to(torch.int64)
    mode = str(op.attrs["mode"]).rstrip(">").split()[-1]
    wanted = _SHUFFLE[mode](lane, by)
    valid = wanted < ((lane + size) & -size)
    source = torch.where(valid, wanted, lane) & (LANES - 1)
    return (take_lanes(value, source), valid), source


_SHUFFLE: dict[str, Any] = {
    "xor": lambda lane, by: lane ^ by,
    "up": lambda lane, by: lane - by,
    "down": lambda lane, by: lane + by,
    "idx": lambda lane, by: by.expand(common_shape(lane.shape, by.shape)),
}
MOVES["gpu.shuffle"] = (0,)


@lane_op("gpu.lane_id")
def lane_id(op: Op, *, device: str | torch.device = "cpu") -> Tensor:
    return lane_index(device)


# ---------------------------------------------------------------------- by address


@_cross(("rocdl.ds_bpermute", *_calls("llvm.amdgcn.ds.bpermute", types=())), (1,))
def ds_bpermute(op: Op, index: Tensor, value: Tensor, *, mask: Mask = None) -> Moved:
    """Lane index / 4 modulo 64: the index is a byte address."""
    source = (index.to(torch.int64) >> 2) & (LANES - 1)
    return take_lanes(value, source), source


@_cross(("rocdl.ds_swizzle", *_calls("llvm.amdgcn.ds.swizzle", types=())), (0,))
def ds_swizzle(op: Op, value: Tensor, pattern: Tensor, *, mask: Mask = None) -> Moved:
    """In 32 lanes: ((lane & and) | or) ^ xor with bit 15 off, a quad permutation with it on."""
    code = immediate(op, "pattern", pattern)
    lane = lane_index(value.device)
    if code & 0x8000 == 0:
        low = ((lane & code & 31) | ((code >> 5) & 31)) ^ ((code >> 10) & 31)
        source = low | (lane & 32)
    elif code & 0xFF00 == 0x8000:
        source = _quad(lane, code & 0xFF)
    else:
        raise ValueError(f"ds_swizzle pattern {code:#x} is not modelled (bit mask and quad are)")
    return take_lanes(value, source), source


def _quad(lane: Tensor, code: int) -> Tensor:
    return (lane & ~3) | ((code >> ((lane & 3) * 2)) & 3)


@_cross(("rocdl.readlane", *_calls("llvm.amdgcn.readlane")), (0,))
def readlane(op: Op, value: Tensor, which: Tensor, *, mask: Mask = None) -> Moved:
    """One lane's value for the whole wave; a lane number that varies: the first lane's."""
    lane = first_lane(which, mask).to(torch.int64) & (LANES - 1)
    return take_lanes(value, lane), lane


@_cross(("rocdl.readfirstlane", *_calls("llvm.amdgcn.readfirstlane")), (0,))
def readfirstlane(op: Op, value: Tensor, *, mask: Mask = None) -> Moved:
    """The first active lane's value for the whole wave."""
    return first_lane(value, mask), None


def first_lane(value: Tensor, mask: Mask) -> Tensor:
    """The value in each wave's first active lane ([c, w, 1], lane 0 where none is active)."""
    if value.shape[2] == 1:
        return value
    if mask is None or mask.shape[2] == 1:
        return value[:, :, :1]
    return take_lanes(value, mask.to(torch.uint8).argmax(2, keepdim=True))


@_cross(("rocdl.ballot", "gpu.ballot", *_calls("llvm.amdgcn.ballot")), (0,))
def ballot(op: Op, predicate: Tensor, *, mask: Mask = None) -> Moved:
    """Bit l of the i64: lane l is active and its predicate holds."""
    voted = predicate if mask is None else predicate & mask
    if voted.shape[2] == 1:
        return torch.where(voted, -1, 0), None
    # eight lanes' bytes (each 0 or 1) gathered into one: byte i of x lands on bit 56 + i
    eight = voted.contiguous().view(torch.uint8).view(torch.int64)
    packed = ((eight * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.view(torch.int64), None


# ---------------------------------------------------------------------- DPP


def dpp_source(control: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(source lane, whether there is one) per lane for a DPP control word; [1, 1, 64] each."""
    lane = lane_index(device)
    row, place = lane & ~(ROW - 1), lane & (ROW - 1)
    always = torch.ones_like(lane, dtype=torch.bool)
    n = control & 0xF
    if control <= 0xFF:
        return _quad(lane, control), always
    if 0x101 <= control <= 0x10F:  # row_shl: from the lane n above
        return row | ((place + n) & 15), place + n < ROW
    if 0x111 <= control <= 0x11F:  # row_shr: from the lane n below
        return row | ((place - n) & 15), place >= n
    if 0x121 <= control <= 0x12F:  # row_ror
        return row | ((place - n) & 15), always
    if 0x150 <= control <= 0x15F:  # row_newbcast: lane n of the row
        return row | n, always
    try:
        wanted = _DPP_WHOLE[control](lane)
    except KeyError:
        raise ValueError(f"DPP control {control:#x} is not one that gfx950 has") from None
    return wanted & (LANES - 1), (wanted >= 0) & (wanted < LANES)


_DPP_WHOLE: dict[int, Any] = {
    0x130: lambda lane: lane + 1,  # wave_shl:1
    0x134: lambda lane: (lane + 1) & 63,  # wave_rol:1
    0x138: lambda lane: lane - 1,  # wave_shr:1
    0x13C: lambda lane: (lane - 1) & 63,  # wave_ror:1
    0x140: lambda lane: lane ^ 15,  # row_mirror
    0x141: lambda lane: lane ^ 7,  # row_half_mirror
    0x142: lambda lane: (lane & ~15) - 1,  # row_bcast:15, to the next row
    0x143: lambda lane: (lane & 32) - 1,  # row_bcast:31, to the upper half
}


@cache
def _dpp_plan(
    control: int, row_mask: int, bank_mask: int, bound: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(lane to take, lane that counts as read, lanes that get 0, lanes that take the move).

    None: no lane gets 0; every lane takes it.
    """
    lane = lane_index(device)
    source, exists = dpp_source(control, device)
    on = (((row_mask >> (lane // ROW)) & 1) & ((bank_mask >> ((lane % ROW) // 4)) & 1)) != 0
    takes = on if bound else on & exists
    return (
        source,
        torch.where(on & exists, source, lane),
        None if not bound or bool(exists.all()) else ~exists,
        None if bool(takes.all()) else takes,
    )


def _dpp(op: Op, old: Tensor, value: Tensor, immediates: tuple[Tensor | None, ...]) -> Moved:
    names = ("dppCtrl", "rowMask", "bankMask", "boundCtrl")
    control, row_mask, bank_mask, bound = (
        immediate(op, name, v) for name, v in zip(names, immediates, strict=True)
    )
    take, read, zero, takes = _dpp_plan(control, row_mask, bank_mask, bool(bound), value.device)
    moved = take_lanes(value, take)
    if zero is not None:
        moved = torch.where(zero, torch.zeros((), dtype=moved.dtype, device=moved.device), moved)
    return moved if takes is None else torch.where(takes, moved, old), read


@_cross(("rocdl.update.dpp", *_calls("llvm.amdgcn.update.dpp")), (1, 0))
def update_dpp(op: Op, old: Tensor, value: Tensor, *immediates: Tensor, mask: Mask = None) -> Moved:
    """A value moved by a DPP control; ``old`` where the row or bank is off or no source exists.

    With bound_ctrl a lane with no source gets 0 instead. The rocdl form has the four immediates as
    attributes, the intrinsic as operands.
    """
    return _dpp(op, old, value, immediates or (None,) * 4)


@_cross(_calls("llvm.amdgcn.mov.dpp"), (0,))
def mov_dpp(op: Op, value: Tensor, *immediates: Tensor, mask: Mask = None) -> Moved:
    """As update.dpp; where nothing is written (undefined there) the lane's own value."""
    return _dpp(op, value, value, immediates or (None,) * 4)


# ---------------------------------------------------------------------- permlane swaps


def _swap(old: Tensor, value: Tensor, half: int) -> Moved:
    """Exchange the odd groups of ``half`` lanes of ``old`` with the even groups of ``value``."""
    shape = common_shape(old.shape[:2], value.shape[:2])
    pairs = (LANES // (2 * half), 2, half)
    a, b = (v.expand(*shape, LANES).reshape(*shape, *pairs) for v in (old, value))
    first = torch.stack((a[..., 0, :], b[..., 0, :]), dim=-2).reshape(*shape, LANES)
    second = torch.stack((a[..., 1, :], b[..., 1, :]), dim=-2).reshape(*shape, LANES)
    return (first, second), lane_index(old.device) ^ half


@_cross(("rocdl.permlane16.swap", *_calls("llvm.amdgcn.permlane16.swap", types=())), (0, 1))
def permlane16_swap(op: Op, old: Tensor, value: Tensor, *_: Tensor, mask: Mask = None) -> Moved:
    """(old, value) with old's rows 1, 3 and value's rows 0, 2 exchanged; a struct of two.

    The source map names the partner lane for both results, though each lane keeps one of its own.
    """
    return _swap(old, value, 16)


@_cross(("rocdl.permlane32.swap", *_calls("llvm.amdgcn.permlane32.swap", types=())), (0, 1))
def permlane32_swap(op: Op, old: Tensor, value: Tensor, *_: Tensor, mask: Mask = None) -> Moved:
    """(old, value) with old's upper and value's lower half exchanged; a struct of two."""
    return _swap(old, value, 32)


__all__ = ["MOVES", "dpp_source", "first_lane", "lane_index", "take_lanes"]
