"""The matrix instructions: D = A B + C over a wave's 64 lanes, all waves of all CTAs at once.

Operands are decoded by table straight into [matrix, k block, row, k] and multiplied by one batched
fp32 matrix product. Numerics: products are exact in fp32 (of 8-bit and 4-bit floats always, of bf16
and f16 while they stay in its range). A k block (the whole instruction, or 32 k of a scaled one) is
summed in fp32 by torch.bmm, whose order within the block is its own; the blocks are added to C in k
order. So a result may differ from a strict k-order fp32 sum by the rounding of at most 32 additions
(an integer result cannot differ). It does not depend on which other waves run along.

Layouts (lane l = R g + r, R = 16 or 32 rows): an operand lane holds row r of A (column r of B) and
consecutive k from g's share; 8-bit operands of the scaled forms hold k = 16 g .. + 16, then the
same of the upper half of k. A scale byte of lane R g + r applies to row r and k = 32 g .. + 32.
Accumulators: element e of lane l is row (8 (e / 4) +) 4 g + e mod 4, column r. Source: AMD's matrix
instruction calculator and CDNA3 / CDNA4 ISA documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from m3lab.interpreter.ops import matrix_op
from m3lab.interpreter.ops.convert import e2m1_values
from m3lab.interpreter.ops.values import common_shape, python_scalar, table
from m3lab.interpreter.program import Op

Tensor = torch.Tensor
LANES = 64
SCALE_BLOCK = 32  # k values under one scale byte
ONE = 127  # the E8M0 byte of 2^0
CHUNK = 256  # scaled matrices at a time: 2 MB of decoded operand, which stays in the caches


# ---------------------------------------------------------------------- operands


def _lanes(x: Tensor) -> Tensor:
    """[c, w, 64 | 1(, n)] as contiguous [c w, 64, bytes] uint8."""
    if x.dim() == 3:
        x = x.unsqueeze(-1)
    c, w, lanes, n = x.shape
    if lanes == 1:
        x = x.expand(c, w, LANES, n)
    return x.reshape(c * w, LANES, n).contiguous().view(torch.uint8)


def _by_rows(raw: Tensor, rows: int, chunk: int) -> Tensor:
    """Lane-major bytes as [matrix, row, bytes of all k]: g's shares side by side."""
    groups = LANES // rows
    item = torch.complex128 if chunk == 16 else torch.int64
    shares = raw.view(item).view(raw.shape[0], groups, rows)
    return shares.transpose(1, 2).contiguous().view(torch.uint8).view(raw.shape[0], rows, -1)


def _byte_table(dtype: torch.dtype) -> Callable[[], Tensor]:
    def make() -> Tensor:
        return torch.arange(256).to(torch.uint8).view(dtype).to(torch.float32)

    return make


_E4M3 = _byte_table(torch.float8_e4m3fn)
_E5M2 = _byte_table(torch.float8_e5m2)
_I8 = _byte_table(torch.int8)


def _e2m1_pairs() -> Tensor:
    """Byte to its two E2M1 values (low nibble first) as one 8-byte item."""
    values = e2m1_values()
    code = torch.arange(256)
    return torch.stack((values[code & 15], values[code >> 4]), dim=-1).view(torch.float64).view(-1)


def _fp6_values(exponent_bits: int, mantissa_bits: int) -> Callable[[], Tensor]:
    def make() -> Tensor:
        bias = (1 << (exponent_bits - 1)) - 1
        out = []
        for code in range(64):
            exponent = (code & 31) >> mantissa_bits
            mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
            size = mantissa * 2.0 ** (1 - bias)
            if exponent:
                size = (1 + mantissa) * 2.0 ** (exponent - bias)
            out.append(-size if code >> 5 else size)
        return torch.tensor(out)

    return make


_E2M3 = _fp6_values(2, 3)
_E3M2 = _fp6_values(3, 2)


def _look_up(raw: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Every byte of ``raw`` through a table, as a flat fp32 tensor."""
    values = table(make, raw.device)
    return values.index_select(0, raw.reshape(-1).to(torch.int32)).view(torch.float32)


def _decode_8(raw: Tensor, rows: int, make: Callable[[], Tensor]) -> Tensor:
    """32 bytes a lane: the two 16-byte halves go to the lower and upper half of k."""
    n, groups = raw.shape[0], LANES // rows
    half = raw.view(torch.complex128).view(n, groups // 2, 2, rows, 2)
    blocks = half.permute(0, 4, 1, 3, 2).contiguous()  # half, g / 2, row, g % 2
    return _look_up(blocks.view(torch.uint8), make).view(n, groups, rows, SCALE_BLOCK)


def _decode_4(raw: Tensor, rows: int) -> Tensor:
    return _look_up(raw, _e2m1_pairs).view(raw.shape[0], LANES // rows, rows, SCALE_BLOCK)


def _decode_6(raw: Tensor, rows: int, make: Callable[[], Tensor]) -> Tensor:
    """24 bytes a lane: 32 codes of six bits, lowest first."""
    triples = raw.view(raw.shape[0], LANES, 8, 3).to(torch.int32)
    word = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
    codes = torch.stack([(word >> (6 * i)) & 63 for i in range(4)], dim=-1)
    return _look_up(codes, make).view(raw.shape[0], LANES // rows, rows, SCALE_BLOCK)


@dataclass(frozen=True)
class Format:
    """An operand format of the scaled forms: bytes a lane holds and how they become fp32."""

    name: str
    nbytes: int
    decode: Callable[[Tensor, int], Tensor]  # [n, 64, nbytes], rows -> [n, groups, rows, 32]


# by the instruction's format code
FORMATS: tuple[Format, ...] = (
    Format("fp8_e4m3", 32, lambda raw, rows: _decode_8(raw, rows, _E4M3)),
    Format("fp8_e5m2", 32, lambda raw, rows: _decode_8(raw, rows, _E5M2)),
    Format("fp6_e2m3", 24, lambda raw, rows: _decode_6(raw, rows, _E2M3)),
    Format("fp6_e3m2", 24, lambda raw, rows: _decode_6(raw, rows, _E3M2)),
    Format("fp4_e2m1", 16, lambda raw, rows: _decode_4(raw, rows)),
)
_BY_NAME = {f.name: f for f in FORMATS}


def operand_format(attribute: Any) -> Format:
    """The format an attribute names: a code 0..4, or MLIR's ``#rocdl<matrix_format fp4_e2m1>``."""
    if isinstance(attribute, int) and 0 <= attribute < len(FORMATS):
        return FORMATS[attribute]
    name = str(attribute).rstrip(">").split()[-1]
    if name not in _BY_NAME:
        raise ValueError(f"matrix format {attribute} is unknown; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


# ---------------------------------------------------------------------- accumulators


def _to_lanes(d: Tensor, rows: int) -> Tensor:
    """[n, column, row] results as [n, 64, elements]: four rows of a column are one 16-byte item."""
    n, groups = d.shape[0], LANES // rows
    items = d.contiguous().view(torch.complex128).view(n, rows, rows // (4 * groups), groups)
    return items.permute(0, 3, 1, 2).contiguous().view(d.dtype).view(n, LANES, -1)


def _from_lanes(c: Tensor, rows: int) -> Tensor:
    """An accumulator [c, w, 64 | 1, elements] as [c, w, column, row]: the inverse."""
    groups = LANES // rows
    full = c.expand(*c.shape[:2], LANES, c.shape[-1]).contiguous()
    items = full.view(torch.complex128).view(-1, groups, rows, rows // (4 * groups))
    return items.permute(0, 2, 3, 1).contiguous().view(c.dtype).view(*c.shape[:2], rows, rows)


def _common(a: Tensor, b: Tensor, c: Tensor) -> tuple[int, int]:
    cw = common_shape(a.shape[:2], b.shape[:2], c.shape[:2])
    return int(cw[0]), int(cw[1])


def _spread(x: Tensor, own: torch.Size, cw: tuple[int, int]) -> Tensor:
    """A decoded operand [c w, ...] of shape ``own`` repeated to all of [C W, ...]."""
    if tuple(own[:2]) == cw:
        return x
    wide = x.view(own[0], own[1], *x.shape[1:]).expand(*cw, *x.shape[1:])
    return wide.reshape(cw[0] * cw[1], *x.shape[1:])


# ---------------------------------------------------------------------- plain forms


@dataclass(frozen=True)
class Plain:
    """An unscaled instruction: rows, bytes of an operand lane, bytes to numbers."""

    rows: int
    nbytes: int
    a: Callable[[Tensor], Tensor]
    b: Callable[[Tensor], Tensor]


def _bytes_by(make: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda raw: _look_up(raw, make).view(raw.shape)


def _floats(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda raw: raw.view(dtype).to(torch.float32)


_FP8, _BF8, _INT8 = _bytes_by(_E4M3), _bytes_by(_E5M2), _bytes_by(_I8)
_BF16, _F16 = _floats(torch.bfloat16), _floats(torch.float16)
_PLAIN: dict[str, Plain] = {
    "rocdl.mfma.f32.16x16x32.bf16": Plain(16, 16, _BF16, _BF16),
    "rocdl.mfma.f32.16x16x32.f16": Plain(16, 16, _F16, _F16),
    "rocdl.mfma.f32.16x16x16bf16.1k": Plain(16, 8, _BF16, _BF16),
    "rocdl.mfma.f32.16x16x16f16": Plain(16, 8, _F16, _F16),
    "rocdl.mfma.f32.32x32x16.bf16": Plain(32, 16, _BF16, _BF16),
    "rocdl.mfma.f32.32x32x16.f16": Plain(32, 16, _F16, _F16),
    "rocdl.mfma.f32.32x32x8bf16.1k": Plain(32, 8, _BF16, _BF16),
    "rocdl.mfma.f32.32x32x8f16": Plain(32, 8, _F16, _F16),
    "rocdl.mfma.i32.16x16x32.i8": Plain(16, 8, _INT8, _INT8),
    "rocdl.mfma.i32.16x16x64.i8": Plain(16, 16, _INT8, _INT8),
    "rocdl.mfma.i32.32x32x16.i8": Plain(32, 8, _INT8, _INT8),
    "rocdl.mfma.i32.32x32x32.i8": Plain(32, 16, _INT8, _INT8),
}
for _rows, _k in ((16, 32), (32, 16)):
    for _a, _fa in (("fp8", _FP8), ("bf8", _BF8)):
        for _b, _fb in (("fp8", _FP8), ("bf8", _BF8)):
            _PLAIN[f"rocdl.mfma.f32.{_rows}x{_rows}x{_k}.{_a}.{_b}"] = Plain(_rows, 8, _fa, _fb)


@matrix_op(*_PLAIN)
def mfma(op: Op, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """D = A B + C; ``cbsz``, ``abid`` and ``blgp`` (lane broadcasts) must be off."""
    form = _PLAIN[op.kind]
    _no_broadcasts(op)
    cw = _common(a, b, c)
    raws = []
    for x in (a, b):
        raw = _lanes(x)
        if raw.shape[-1] != form.nbytes:
            raise ValueError(f"{op.kind}: {raw.shape[-1]} bytes a lane, not {form.nbytes}")
        raws.append(_spread(raw, x.shape, cw))
    result = torch.empty((*cw, LANES, c.shape[-1]), dtype=c.dtype, device=c.device)
    for ctas, waves in _chunks(cw, 4 * CHUNK, c.device):
        left, right = (
            decode(_by_rows(raw[waves], form.rows, form.nbytes))
            for raw, decode in zip(raws, (form.a, form.b), strict=True)
        )
        product = torch.bmm(right, left.transpose(1, 2)).to(c.dtype)  # [n, column, row]
        into = result[ctas]
        given = c[ctas] if c.shape[0] > 1 else c
        torch.add(given, _to_lanes(product, form.rows).view(into.shape), out=into)
    return result


def _chunks(
    cw: tuple[int, int], matrices: int, device: torch.device
) -> Iterator[tuple[slice, slice]]:
    """The grid in parts of about so many matrices: (CTAs, their waves in the flattened order).

    Parts are for a CPU's caches; a GPU takes all that fits its memory at once.
    """
    step = max(1, (matrices if device.type == "cpu" else 1 << 16) // cw[1])
    for start in range(0, cw[0], step):
        stop = min(start + step, cw[0])
        yield slice(start, stop), slice(start * cw[1], stop * cw[1])


def _no_broadcasts(op: Op) -> None:
    permutation = str(op.attrs.get("blgp", 0)).rstrip(">").split()[-1]
    if op.attrs.get("cbsz", 0) or op.attrs.get("abid", 0) or permutation not in ("0", "none"):
        raise ValueError(f"{op.kind} with cbsz, abid or blgp is not modelled")


# ---------------------------------------------------------------------- scaled forms


@matrix_op("rocdl.mfma.scale.f32.16x16x128.f8f6f4", "rocdl.mfma.scale.f32.32x32x64.f8f6f4")
def mfma_scale(op: Op, a: Tensor, b: Tensor, c: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """D = (A 2^sa) (B 2^sb) + C, an E8M0 scale per row and 32 k; a scale byte of 255 is NaN.

    ``cbsz``, ``blgp``: the operands' formats; ``opselA``, ``opselB``: the scale dword's byte.
    """
    rows = 32 if "32x32" in op.kind else 16
    cw = _common(a, b, c)
    left, decode_left = _raw(op, a, op.attrs["cbsz"], cw)
    right, decode_right = _raw(op, b, op.attrs["blgp"], cw)
    lines, columns = _factors(
        [
            _exponents(scale_a, op.attrs["opselA"], rows, cw),
            _exponents(scale_b, op.attrs["opselB"], rows, cw),
        ]
    )
    result = torch.empty((*cw, LANES, c.shape[-1]), device=c.device)
    for ctas, waves in _chunks(cw, CHUNK, c.device):
        x = decode_left(left[waves], rows).flatten(0, 1)
        y = decode_right(right[waves], rows).flatten(0, 1)
        sums = torch.bmm(y, x.transpose(1, 2)).view(-1, LANES // rows, rows, rows)
        if columns is not None:
            sums = sums.to(columns.dtype).mul_(columns[waves].unsqueeze(-1))
        if lines is not None:
            sums = sums.to(lines.dtype).mul_(lines[waves].unsqueeze(-2))
        sums = sums.to(torch.float32)
        into = result[ctas]
        total = _from_lanes(c[ctas] if c.shape[0] > 1 else c, rows)
        total = total.expand(*into.shape[:2], rows, rows).reshape(-1, rows, rows) + sums[:, 0]
        for k in range(1, LANES // rows):
            total += sums[:, k]
        into.copy_(_to_lanes(total, rows).view(into.shape))
    return result


def _raw(op: Op, x: Tensor, code: Any, cw: tuple[int, int]) -> tuple[Tensor, Any]:
    """An operand's bytes as [C W, 64, bytes of its format], and the format's decoder."""
    form = operand_format(code)
    raw = _lanes(x)
    if raw.shape[-1] < form.nbytes:
        raise ValueError(f"{op.kind}: {form.name} takes {form.nbytes} bytes a lane")
    if raw.shape[-1] > form.nbytes:
        raw = raw[..., : form.nbytes].contiguous()
    return _spread(raw, x.shape, cw), form.decode


def _exponents(scale: Tensor, select: Any, rows: int, cw: tuple[int, int]) -> Tensor | None:
    """The selected scale byte as [C W, groups, rows] int32; None where all are 127 (one)."""
    known = python_scalar(scale)
    if known is not None and (known >> (8 * int(select))) & 0xFF == ONE:
        return None
    byte = (scale >> (8 * int(select))) & 0xFF
    return byte.expand(*cw, LANES).reshape(-1, LANES // rows, rows)


def _powers() -> Tensor:
    """E8M0: 2^(byte - 127) in fp64, NaN for 255."""
    return torch.tensor([2.0 ** (b - ONE) for b in range(255)] + [torch.nan], dtype=torch.float64)


def _factors(exponents: list[Tensor | None]) -> list[Tensor | None]:
    """The scales' powers of two, to multiply the sums of products by.

    fp32 where no intermediate can leave its range (sums are 0 or within 2^-18 .. 2^36), fp64
    otherwise.
    """
    given = [e for e in exponents if e is not None]
    if all(_moderate(e) for e in given):
        return [None if e is None else (e << 23).view(torch.float32) for e in exponents]
    return [
        None if e is None else table(_powers, e.device).index_select(0, e.flatten()).view(e.shape)
        for e in exponents
    ]


def _moderate(exponents: Tensor) -> bool:
    if exponents.device.type != "cpu":
        return False
    low, high = torch.aminmax(exponents)
    return int(low) >= ONE - 60 and int(high) <= ONE + 40
