"""MX operands of the expert stages: block scales, fp8 elements, weight tiles and their scales.

An activation row is MXFP8: E4M3 elements with one E8M0 scale per 32 k. A weight matrix is MXFP4, or
MXFP8 for the shared expert of that build, in the shuffled order of the specification's formats
chapter, read by waves as tiles of 16 rows by 128 k. Which rows and which k is the stages' matter.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.device import gfx950, mfma
from m3lab.kernels.device.wave import butterfly, div, largest, mod
from m3lab.kernels.plan import CHUNK_K, MX_BLOCKS_PER_CHUNK, scale_cols, scale_pitch

FP8_MAX = 448.0
CHUNK_WORDS = CHUNK_K // 4  # of an MXFP8 row in LDS
SCALE_TILE_BYTES = 256  # a lane's dword: two row groups by two chunks
ROW_GROUPS_PER_SCALE = 2

# ---------------------------------------------------------------------- quantizing


def block_scale(values, lanes):
    """(E8M0 byte, its inverse as fp32) of the 32-block that the lanes ``lanes`` apart share.

    The exponent of amax / 448, rounded up: 1..254, so a zero block gives 1. The inverse is made of
    the byte itself; at 254, past every finite bf16 block, it is 0.
    """
    amax = gfx950.absolute(values[0])
    for value in values[1:]:
        amax = largest(amax, gfx950.absolute(value))
    bits = gfx950.bitcast_i32(butterfly(amax, lanes, largest) * (1.0 / FP8_MAX))
    # a carry out of the mantissa is the round-up
    byte = ((bits + 0x7FFFFF) >> 23) & 0xFF
    byte = fx.max(fx.min(byte, fx.Int32(254)), fx.Int32(1))
    return byte, gfx950.bitcast_f32((fx.Int32(254) - byte) << 23)


def fp8_elements(values, inverse):
    """Four scaled values as a word of E4M3, clamped to +-448."""
    return gfx950.pack_fp8x4(*[clamp(value * inverse, FP8_MAX) for value in values])


def clamp(x, limit):
    return fx.max(fx.min(x, fx.Float32(limit)), fx.Float32(-limit))


# ---------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Matrix:
    """A weight matrix: the 64-bit addresses of its tiles and scales, its columns, its format."""

    weights: Any
    scales: Any
    k: int
    fp8: bool = False

    @property
    def tile_bytes(self) -> int:
        """16 rows by 128 k."""
        return 2048 if self.fp8 else 1024


@dataclass(frozen=True)
class Lane:
    """What a lane adds to its wave's offsets: its slot of a tile (16 g + r: row r, k from g), and
    row groups further on."""

    slot: Any
    groups: Any = 0


@dataclass(frozen=True)
class Tiles:
    """Consecutive 128-k chunks of a row group, on their way: words a chunk, a scale dword a pair of
    chunks, and the shift that brings this row group's bytes to the even ones."""

    words: list[Any]
    scales: list[Any]
    shift: Any
    fp8: bool


def request_tiles(table, group, first, count, lane, *, skip=0, present=None, left=None):
    """Request chunks ``first`` (even, uniform) .. + ``count`` of row group ``group`` (uniform).

    ``skip``: row groups further on, an even number. ``present``: without it every byte reads as 0.
    ``left``: chunks of the row from ``first`` on, where they may be fewer: the others are zeros.
    The uniform part goes into the buffer's base: a buffer without records must be 0 at any offset,
    and whether an SGPR offset takes part in that check differs between documents.
    """
    records = None if present is None else gfx950.select(present, fx.Int32(0x7FFFFFFF), fx.Int32(0))
    row_bytes = table.k // CHUNK_K * table.tile_bytes
    scale_row = scale_cols(table.k) // 8 * SCALE_TILE_BYTES
    at = group * row_bytes + first * table.tile_bytes
    scale_at = div(group, ROW_GROUPS_PER_SCALE) * scale_row + div(first, 2) * SCALE_TILE_BYTES
    row_records = records if left is None else gfx950.select(present, left * table.tile_bytes, 0)
    weights = gfx950.buffer(table.weights + gfx950.i64(at), row_records)
    scales = gfx950.buffer(table.scales + gfx950.i64(scale_at), records)

    lane_at = lane.groups * row_bytes + lane.slot * (table.tile_bytes // gfx950.LANES)
    lane_scale = div(lane.groups, ROW_GROUPS_PER_SCALE) * scale_row + lane.slot * 4
    base = {"base": skip * row_bytes}
    words = []
    for i in range(count):
        byte = lane_at + i * table.tile_bytes
        low = gfx950.load(weights, byte, 4, **base)
        words.append(
            mfma.join(low, gfx950.load(weights, byte + 16, 4, **base)) if table.fp8 else low
        )
    base = {"base": skip // ROW_GROUPS_PER_SCALE * scale_row}
    dwords = [
        gfx950.load(scales, lane_scale + i * SCALE_TILE_BYTES, **base)
        for i in range((count + 1) // 2)
    ]
    return Tiles(words, dwords, mod(group, ROW_GROUPS_PER_SCALE) * 8, table.fp8)


# ---------------------------------------------------------------------- products


def scale_word(block, chunks):
    """Word of a 32-block's scale in an LDS row that keeps ``chunks`` chunks together: [part][k of a
    chunk / 32][chunk], so that a lane reads its scales of a part's chunks at once."""
    chunk, group = div(block, MX_BLOCKS_PER_CHUNK), mod(block, MX_BLOCKS_PER_CHUNK)
    part = div(chunk, chunks)
    return (part * MX_BLOCKS_PER_CHUNK + group) * scale_pitch(chunks) + (chunk - part * chunks)


def load_scales(ctx, at, part, chunks):
    """This lane's scales of a part's chunks, from the LDS scale row at word ``at``."""
    word = at + (part * MX_BLOCKS_PER_CHUNK + ctx.group) * scale_pitch(chunks)
    scales = []
    for i in range(0, chunks, 4):
        n = min(chunks - i, 4)
        wide = gfx950.lds_load(ctx.lds.pool, word + i, {1: 1, 2: 2}.get(n, 4))
        scales += [wide] if n == 1 else [wide[j] for j in range(n)]
    return scales


def load_row_operand(ctx, at):
    """This lane's fp8 of the chunk at LDS word ``at``: k 16 g .. + 16, then 64 + 16 g .. + 16."""
    halves = [gfx950.lds_load(ctx.lds.pool, at + 16 * h + 4 * ctx.group, 4) for h in range(2)]
    return mfma.join(*halves)


def multiply(tiles, i, row, row_scale, acc):
    """``acc`` plus chunk ``i`` of the tiles by an operand of activations."""
    a_scale = tiles.scales[i // 2] >> tiles.shift
    return mfma.mfma_mx(
        tiles.words[i], row, acc, fp8=tiles.fp8, scales=(a_scale, row_scale), byte=2 * (i % 2)
    )


def drop_scales_past(tiles, left):
    """The tiles with no scale of a chunk ``left`` or further on, an odd number: a table's padding
    scales are NaN, and NaN times nothing is NaN."""
    scales = [
        gfx950.select(left > 2 * i + 1, word, word & fx.Int32(0xFFFF))
        for i, word in enumerate(tiles.scales)
    ]
    return Tiles(tiles.words, scales, tiles.shift, tiles.fp8)
