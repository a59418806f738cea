"""The part's own conversions and packed arithmetic (``rocdl`` and its intrinsics).

fp32 to E4M3, E5M2, E2M1 and f16; back again; the dot-product instructions, byte permutes and lane
counts. Conversions round to nearest even; E4M3 (OCP) has no infinity, and past 448 gives NaN.
Numeric sources: AMD's CDNA3 and CDNA4 ISA documents, OCP 8-bit and MX format specifications.
"""

from __future__ import annotations

from typing import Any

import torch

from m3lab.interpreter.ops import lane_op
from m3lab.interpreter.ops.values import (
    common_shape,
    immediate,
    lanes_last,
    narrow,
    table,
    unsigned,
)
from m3lab.interpreter.program import Op

Tensor = torch.Tensor
LANES = 64

# ---------------------------------------------------------------------- codecs

E4M3_LIMIT = 464.0  # midpoint of 448 and the 480 that E4M3 has not; the tie goes to 448 (even)
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode_e4m3(x: Tensor) -> Tensor:
    """fp32 to E4M3 bytes (uint8), to nearest even; infinities and what rounds past 448 are NaN."""
    byte = x.to(torch.float8_e4m3fn).view(torch.uint8)  # torch's cast saturates
    over = ~(x.abs() <= E4M3_LIMIT)
    return torch.where(over, byte | 0x7F, byte)


def encode_e5m2(x: Tensor) -> Tensor:
    """fp32 to E5M2 bytes (uint8), to nearest even; what rounds past 57344 is infinite."""
    return x.to(torch.float8_e5m2).view(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """fp32 to E2M1 nibbles (uint8), to nearest even; saturates at 6, and NaN gives 6."""
    size = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for i, midpoint in enumerate(_E2M1_MIDPOINTS):
        # a tie goes to the even code: up where the lower code is odd
        code += ~(size <= midpoint) if i % 2 == 0 else ~(size < midpoint)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e4m3(byte: Tensor) -> Tensor:
    """uint8 to fp32, by table."""
    return _look_up(byte, table(_e4m3_table, byte.device))


def decode_e5m2(byte: Tensor) -> Tensor:
    """uint8 to fp32, by table."""
    return _look_up(byte, table(_e5m2_table, byte.device))


def decode_e2m1(nibble: Tensor) -> Tensor:
    """uint8 below 16 to fp32, by table."""
    return _look_up(nibble, table(e2m1_values, nibble.device))


def _look_up(byte: Tensor, values: Tensor) -> Tensor:
    return values.index_select(0, byte.reshape(-1).to(torch.int32)).view(byte.shape)


def _e4m3_table() -> Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def _e5m2_table() -> Tensor:
    return torch.arange(256).to(torch.uint8).view(torch.float8_e5m2).to(torch.float32)


def e2m1_values() -> Tensor:
    """The 16 values of E2M1 in code order."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor(positive + [-v for v in positive])


_ENCODE = {"fp8": encode_e4m3, "bf8": encode_e5m2}
_DECODE = {"fp8": decode_e4m3, "bf8": decode_e5m2}
_WIDE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def _byte(word: Tensor, index: int) -> Tensor:
    return ((word >> (8 * index)) & 0xFF).to(torch.uint8)


def _pair(low: Tensor, high: Tensor) -> Tensor:
    """Two bytes as one 16-bit number (int32)."""
    return low.to(torch.int32) | (high.to(torch.int32) << 8)


def _half_replaced(old: Tensor, half: Tensor, high: bool) -> Tensor:
    """The i32 ``old`` with one 16-bit half replaced."""
    if high:
        return (old & 0xFFFF) | (half << 16)
    return (old & -0x10000) | half


# ---------------------------------------------------------------------- fp8 and f16, unscaled


def _register_fp8(name: str) -> None:
    encode, decode = _ENCODE[name], _DECODE[name]

    @lane_op(f"rocdl.cvt.pk.{name}.f32", f"llvm.call_intrinsic:llvm.amdgcn.cvt.pk.{name}.f32")
    def pack(op: Op, a: Tensor, b: Tensor, old: Tensor, word: Tensor | None = None) -> Tensor:
        """Two floats to two bytes in the low (or high) half of ``old``."""
        half = _pair(encode(a), encode(b))
        return _half_replaced(old, half, bool(immediate(op, "wordSel", word)))

    @lane_op(f"rocdl.cvt.pk.f32.{name}", f"llvm.call_intrinsic:llvm.amdgcn.cvt.pk.f32.{name}")
    def unpack(op: Op, word: Tensor, select: Tensor | None = None) -> Tensor:
        """Two bytes of the low (or high) half to vector<2xf32>."""
        start = 2 * immediate(op, "wordSel", select)
        bytes_ = word.contiguous().unsqueeze(-1).view(torch.uint8)[..., start : start + 2]
        return decode(bytes_)

    @lane_op(f"rocdl.cvt.f32.{name}", f"llvm.call_intrinsic:llvm.amdgcn.cvt.f32.{name}")
    def one(op: Op, word: Tensor, select: Tensor | None = None) -> Tensor:
        """Byte ``byteSel`` to fp32."""
        return decode(_byte(word, immediate(op, "byteSel", select)))


for _name in _ENCODE:
    _register_fp8(_name)


@lane_op("rocdl.cvt.pkrtz", "llvm.call_intrinsic:llvm.amdgcn.cvt.pkrtz")
def cvt_pkrtz(op: Op, a: Tensor, b: Tensor) -> Tensor:
    """Two floats to vector<2xf16>, toward zero (a finite value never becomes infinite)."""
    a, b = torch.broadcast_tensors(a, b)
    x = torch.stack((a, b), dim=-1)
    near = x.to(torch.float16)
    too_far = near.to(torch.float32).abs() > x.abs()
    bits = near.view(torch.int16)
    return torch.where(too_far, bits - 1, bits).view(torch.float16)


# ---------------------------------------------------------------------- scaled (gfx950)


def _scale(x: Tensor) -> Tensor:
    """The power of two of the scale operand: its exponent field alone counts (255: NaN)."""
    field = (x.view(torch.int32) >> 23) & 0xFF
    power = ((field.to(torch.int64) + (1023 - 127)) << 52).view(torch.float64)
    return torch.where(field == 0xFF, torch.nan, power)


def _scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return narrow(values.to(torch.float64) * lanes_last(_scale(scale), values), dtype)


def _unscaled(values: Tensor, scale: Tensor) -> Tensor:
    wide = values.to(torch.float64) / lanes_last(_scale(scale), values)
    return wide.to(torch.float32)


def _register_scaled(name: str, wide: str) -> None:
    encode, decode, dtype = _ENCODE[name], _DECODE[name], _WIDE[wide]

    @lane_op(f"rocdl.cvt.scalef32.pk.{wide}.{name}")
    def unpack(op: Op, word: Tensor, scale: Tensor) -> Tensor:
        """Two bytes times the scale."""
        start = 2 * int(op.attrs["srcLoHiSel"])
        bytes_ = word.contiguous().unsqueeze(-1).view(torch.uint8)[..., start : start + 2]
        return _scaled(decode(bytes_), scale, dtype)

    @lane_op(f"rocdl.cvt.scalef32.pk.{name}.{wide}")
    def pack(op: Op, old: Tensor, a: Tensor, *rest: Tensor) -> Any:
        """Two floats over the scale, into one half of ``old`` (vector<2xi16>)."""
        values = a if len(rest) == 1 else torch.stack(torch.broadcast_tensors(a, rest[0]), -1)
        byte = encode(_unscaled(values, rest[-1]))
        half = _pair(byte[..., 0], byte[..., 1]).to(torch.int16)
        high = bool(op.attrs["dstLoHiSel"])
        other = old[..., 0 if high else 1]
        return torch.stack(torch.broadcast_tensors(*((other, half) if high else (half, other))), -1)


def _register_scaled_fp4(wide: str) -> None:
    dtype = _WIDE[wide]

    @lane_op(f"rocdl.cvt.scalef32.pk.{wide}.fp4")
    def unpack(op: Op, word: Tensor, scale: Tensor) -> Tensor:
        """The two nibbles of byte ``srcSelIndex`` times the scale."""
        byte = _byte(word, int(op.attrs["srcSelIndex"]))
        nibbles = torch.stack((byte & 15, byte >> 4), dim=-1)
        return _scaled(decode_e2m1(nibbles), scale, dtype)

    @lane_op(f"rocdl.cvt.scalef32.pk.fp4.{wide}")
    def pack(op: Op, old: Tensor, a: Tensor, *rest: Tensor) -> Tensor:
        """Two floats over the scale, as the two nibbles of byte ``dstSelIndex`` of ``old``."""
        values = a if len(rest) == 1 else torch.stack(torch.broadcast_tensors(a, rest[0]), -1)
        code = encode_e2m1(_unscaled(values, rest[-1])).to(torch.int32)
        place = 8 * int(op.attrs["dstSelIndex"])
        byte = (code[..., 0] | (code[..., 1] << 4)) << place
        keep = 0xFFFFFFFF ^ (0xFF << place)
        return (old & (keep - (1 << 32) if keep >> 31 else keep)) | byte


for _wide in _WIDE:
    _register_scaled_fp4(_wide)
    for _name in _ENCODE:
        _register_scaled(_name, _wide)


# ---------------------------------------------------------------------- dot products


@lane_op(
    "rocdl.fdot2.f32.bf16",
    "rocdl.fdot2",
    "llvm.call_intrinsic:llvm.amdgcn.fdot2.f32.bf16",
    "llvm.call_intrinsic:llvm.amdgcn.fdot2",
)
def fdot2(op: Op, a: Tensor, b: Tensor, c: Tensor, _clamp: Tensor | None = None) -> Tensor:
    """(c + a0 b0) + a1 b1: exact products, each sum rounded to fp32, element 0 first.

    Products of two bf16 (16 bits) or f16 (22 bits) are exact in fp32 unless they leave its range.
    No public source gives gfx950's order of the three terms; this is k order.
    """
    _no_clamp(op, _clamp)
    products = a.to(torch.float32) * b.to(torch.float32)
    return (c + products[..., 0]) + products[..., 1]


def _no_clamp(op: Op, clamp: Tensor | None) -> None:
    if bool(op.attrs.get("clamp", False)) or (clamp is not None and bool(clamp.any())):
        raise ValueError(f"{op.kind} with clamp is not modelled")


def _register_dot4(kind: str, signed_a: bool, signed_b: bool) -> None:
    dtypes = {True: torch.int8, False: torch.uint8}

    @lane_op(f"rocdl.{kind}", f"llvm.call_intrinsic:llvm.amdgcn.{kind}")
    def dot4(op: Op, a: Tensor, b: Tensor, c: Tensor, clamp: Tensor | None = None) -> Tensor:
        """c plus the products of four byte pairs, wrapping."""
        _no_clamp(op, clamp)
        x = a.contiguous().unsqueeze(-1).view(dtypes[signed_a]).to(torch.int32)
        y = b.contiguous().unsqueeze(-1).view(dtypes[signed_b]).to(torch.int32)
        return c + (x * y).sum(-1, dtype=torch.int32)


_register_dot4("sdot4", True, True)
_register_dot4("udot4", False, False)


@lane_op("rocdl.sdot2", "rocdl.udot2")
def dot2(op: Op, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c plus the products of two 16-bit pairs, wrapping."""
    _no_clamp(op, None)
    wide = [unsigned(v) if op.kind.endswith("udot2") else v.to(torch.int64) for v in (a, b)]
    return (c + (wide[0] * wide[1]).sum(-1)).to(torch.int32)


# ---------------------------------------------------------------------- bytes and lanes


@lane_op("llvm.call_intrinsic:llvm.amdgcn.perm", "rocdl.perm")
def perm(op: Op, high: Tensor, low: Tensor, select: Tensor) -> Tensor:
    """v_perm_b32: each result byte picks by its selector byte.

    0..3 a byte of ``low``, 4..7 of ``high``, 8..11 the sign of bytes 1, 3, 5, 7 spread, 12 gives
    0x00, above 0xFF.
    """
    source = (unsigned(low) | (high.to(torch.int64) << 32)).unsqueeze(-1).contiguous()
    source = source.view(torch.uint8)
    signs = torch.where(source[..., 1::2] >= 0x80, 0xFF, 0).to(torch.uint8)
    ends = torch.tensor([0, 0xFF], dtype=torch.uint8, device=low.device).expand(
        *source.shape[:-1], 2
    )
    choices = torch.cat((source, signs, ends), dim=-1)
    picks = select.contiguous().unsqueeze(-1).view(torch.uint8).to(torch.int64).clamp(max=13)
    shape = common_shape(choices.shape[:-1], picks.shape[:-1])
    chosen = choices.expand(*shape, 14).gather(-1, picks.expand(*shape, 4))
    return chosen.contiguous().view(torch.int32).squeeze(-1)


@lane_op("rocdl.mbcnt.lo", "llvm.call_intrinsic:llvm.amdgcn.mbcnt.lo")
def mbcnt_lo(op: Op, mask: Tensor, base: Tensor) -> Tensor:
    """base + bits of ``mask`` below this lane (lanes of the upper half count all 32)."""
    return base + _bits_below(mask, 0)


@lane_op("rocdl.mbcnt.hi", "llvm.call_intrinsic:llvm.amdgcn.mbcnt.hi")
def mbcnt_hi(op: Op, mask: Tensor, base: Tensor) -> Tensor:
    """base + bits of ``mask`` below this lane less 32 (lanes of the lower half count none)."""
    return base + _bits_below(mask, 32)


def _bits_below(mask: Tensor, first: int) -> Tensor:
    from m3lab.interpreter.ops.math import count_ones

    lane = torch.arange(LANES, device=mask.device).reshape(1, 1, LANES)
    below = (1 << (lane - first).clamp(0, 32)) - 1
    return count_ones(unsigned(mask) & below).to(torch.int32)
