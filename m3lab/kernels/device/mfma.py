"""Matrix-core operands of the kernels: packing, zero tiles, the MFMA forms that the stages use.

The operand layouts (lane 16 g + r) are those of the specification's details; ``isa`` holds the
instructions. No loads here.
"""

import flydsl.expr as fx

from m3lab.kernels.device import gfx950


def zero_tile():
    """An empty 16x16 accumulator: element e of lane 16 g + r is row 4 g + e, column r."""
    return fx.Vector.filled(4, 0.0, fx.Float32)


def fp8_operands(words):
    """The Int64 operands of 16x16x32 that a vector of 2 or 4 words holds, in order."""
    pairs = words.bitcast(fx.Int64)
    return [pairs[i] for i in range(pairs.numel)]


def join(low, high):
    """The 8-word operand of 16x16x128 from its two 64-k halves, 4 words each."""
    return fx.Vector.from_elements([v[i] for v in (low, high) for i in range(4)], fx.Int32)


def mfma_f8f8_unit(a, b, c):
    """16x16x128, E4M3 by E4M3, unit scales."""
    one = fx.Int32(gfx950.UNIT_SCALE)
    return gfx950.mfma_scaled(
        a, b, c, formats=(gfx950.FP8_FORMAT, gfx950.FP8_FORMAT), scales=(one, one)
    )


def mfma_mx(a, b, c, *, fp8, scales, byte):
    """16x16x128 of MX operands: ``a`` E2M1 (or E4M3, ``fp8``) whose E8M0 scale is byte ``byte`` of
    scale dword a, ``b`` E4M3 with its scale in byte 0."""
    a_format = gfx950.FP8_FORMAT if fp8 else gfx950.FP4_FORMAT
    formats = (a_format, gfx950.FP8_FORMAT)
    return gfx950.mfma_scaled(a, b, c, formats=formats, scales=scales, selects=(byte, 0))
