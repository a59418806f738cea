"""Codecs and quantizers against scalar arithmetic written from the format definitions."""

import math
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3lab.model import formats as f

E4M3_GRID = [
    Fraction(2 ** max(e, 1) * ((e > 0) * 8 + m), 8 * 2**7) for e in range(16) for m in range(8)
]
E2M1_GRID = [Fraction(v).limit_denominator(2) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def nearest_even(x: float, grid: list[Fraction]) -> int:
    """The index of the grid value nearest |x|, a tie to the even index, exactly."""
    a = abs(Fraction(x))
    below = max(i for i, v in enumerate(grid) if v <= a)
    if below + 1 == len(grid):
        return below
    lo, hi = a - grid[below], grid[below + 1] - a
    if lo == hi:
        return below + below % 2
    return below if lo < hi else below + 1


def scalar_e4m3(x: float) -> int:
    """E4M3 as the part converts: the grid goes on past 448, and what lands there is NaN."""
    sign = 0x80 if math.copysign(1.0, x) < 0 else 0
    if math.isnan(x) or math.isinf(x):
        return sign | 0x7F
    return sign | min(nearest_even(x, [*E4M3_GRID, Fraction(1 << 200)]), 0x7F)


def scalar_e2m1(x: float) -> int:
    return (8 if math.copysign(1.0, x) < 0 else 0) | nearest_even(x, E2M1_GRID)


def all_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def fp32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# the value at code 0x7F, 480, exists on the rounding grid but not in the format
assert E4M3_GRID[0x7E] == 448
assert E4M3_GRID[0x7F] == 480


def test_e4m3_decodes_every_byte_by_definition():
    values = f.e4m3_decode(torch.arange(256, dtype=torch.uint8))
    for code, value in enumerate(values.tolist()):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
        else:
            assert value == (-1 if code & 0x80 else 1) * float(E4M3_GRID[code & 0x7F])


def test_e4m3_encodes_every_bf16_like_scalar_arithmetic():
    x = all_bf16()
    # every exponent with every mantissa; one sign is enough for the slow scalar
    want = [scalar_e4m3(v) for v in x[: 1 << 15].tolist()]
    got = f.e4m3_encode(x)
    assert got[: 1 << 15].tolist() == want
    assert got[1 << 15 :].tolist() == [c | 0x80 for c in want]


def test_e4m3_encodes_ties_and_their_neighbours_like_scalar_arithmetic():
    ties = fp32([float((a + b) / 2) for a, b in pairwise(E4M3_GRID)])
    x = torch.cat([ties, ties.nextafter(fp32(0.0)), ties.nextafter(fp32(1e9))])
    x = torch.cat([x, -x])
    assert f.e4m3_encode(x).tolist() == [scalar_e4m3(v) for v in x.tolist()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=33))
def test_e4m3_encodes_any_fp32_like_scalar_arithmetic(values):
    assert f.e4m3_encode(fp32(values)).tolist() == [scalar_e4m3(v) for v in values]


def test_e4m3_past_448_is_nan_unless_saturated():
    x = fp32([448.0, 464.0, 464.01, -465.0, math.inf, -math.inf, math.nan])
    assert f.e4m3_encode(x).tolist() == [0x7E, 0x7E, 0x7F, 0xFF, 0x7F, 0xFF, 0x7F]
    saturated = f.e4m3_encode(x, saturate=True).tolist()
    assert saturated == [0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F]


def test_e4m3_survives_a_round_trip():
    code = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(f.e4m3_encode(f.e4m3_decode(code)), code)


def test_e2m1_decodes_every_code_and_survives_a_round_trip():
    code = torch.arange(16, dtype=torch.uint8)
    values = f.e2m1_decode(code)
    assert values[:8].tolist() == [float(v) for v in E2M1_GRID]
    assert values[8:].tolist() == [-float(v) for v in E2M1_GRID]
    assert torch.equal(f.e2m1_encode(values), code)


def test_e2m1_encodes_every_finite_bf16_like_scalar_arithmetic():
    x = all_bf16()
    x = x[x.isfinite()]
    assert f.e2m1_encode(x).tolist() == [scalar_e2m1(v) for v in x.tolist()]


def test_e2m1_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        f.e2m1_encode(fp32([math.nan]))


def test_e2m1_puts_the_lower_k_in_the_low_nibble():
    code = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    packed = f.e2m1_pack(code)
    assert packed.tolist() == [[0x21, 0x43]]
    assert torch.equal(f.e2m1_unpack(packed), code)
    assert f.e2m1_decode_packed(packed).tolist() == [[0.5, 1.0, 1.5, 2.0]]
    with pytest.raises(ValueError, match="even"):
        f.e2m1_pack(code[:, :3])


def test_e8m0_decodes_every_byte_by_definition():
    values = f.e8m0_decode(torch.arange(256, dtype=torch.uint8)).tolist()
    assert values[:255] == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(values[255])


def scalar_mx_byte(amax: float) -> int:
    """127 + ceil(log2 a) of the fp32 product a = amax * fp32(1/448), without a logarithm."""
    inv = struct.unpack("f", struct.pack("f", 1 / 448))[0]
    a = struct.unpack("f", struct.pack("f", amax * inv))[0]
    byte = 1
    while byte < 254 and Fraction(a) > Fraction(2) ** (byte - 127):
        byte += 1
    return byte


def test_mx_scale_byte_is_the_least_power_of_two_not_below_amax_over_448():
    x = all_bf16()[: 1 << 15 : 7]
    x = x[x.isfinite()]
    powers = 448 * 2.0 ** torch.arange(-20, 20)
    x = torch.cat([x, powers, powers.nextafter(fp32(1e9)), torch.zeros(1)])
    assert f.mx_scale_byte(x).tolist() == [scalar_mx_byte(v) for v in x.tolist()]


def test_a_zero_block_scales_by_byte_one_and_a_nan_block_by_254():
    assert f.mx_scale_byte(fp32([0.0, math.nan, math.inf])).tolist() == [1, 254, 254]


def test_mxfp8_elements_use_the_top_of_the_range_and_are_never_nan():
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    code, scale = f.quantize_mxfp8(x)
    top = f.e4m3_decode(code).abs().unflatten(-1, (-1, 32)).amax(-1)
    assert bool((top >= 224).all())
    assert bool((top <= 448).all())
    y = f.dequantize_mxfp8(code, scale)
    block = x.abs().unflatten(-1, (-1, 32)).amax(-1, keepdim=True)
    # half a step of the element's own binade, or of the smallest one of its block
    bound = (x.abs().unflatten(-1, (-1, 32)) / 16) + block * 2**-16
    assert bool(((y - x).abs().unflatten(-1, (-1, 32)) <= bound).all())


def test_mxfp8_clamps_an_infinity_and_keeps_a_nan():
    x = torch.zeros(2, 32)
    x[0, 3], x[1, 4] = -math.inf, math.nan
    code, scale = f.quantize_mxfp8(x)
    assert scale.tolist() == [[254], [254]]
    assert code[0, 3] == 0xFE
    assert code[1, 4] & 0x7F == 0x7F


def test_mxfp4_keeps_values_that_it_can_hold_exactly():
    rows = f.CHUNK_BLOCKS // 4 + 3  # more than one chunk
    codes = torch.randint(0, 16, (rows, 128), dtype=torch.uint8)
    codes[:, ::32] = 7  # each block holds a 6, so its scale is decided
    codes[codes == 8] = 0
    scale = torch.randint(90, 160, (rows, 4), dtype=torch.uint8)
    x = f.dequantize_mxfp4(f.e2m1_pack(codes), scale)
    packed, got = f.quantize_mxfp4(x)
    assert torch.equal(got, scale)
    assert torch.equal(f.e2m1_unpack(packed), codes)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_mxfp4_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="finite"):
        f.quantize_mxfp4(torch.full((1, 32), bad))


def test_ptpc_uses_448_in_every_row_and_errs_by_half_a_step():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    w[5] = 0
    code, scale = f.quantize_ptpc(w)
    assert scale[5] == fp32(1e-30)
    live = [i for i in range(16) if i != 5]
    assert f.e4m3_decode(code[live]).abs().amax(-1).tolist() == [448.0] * 15
    y = f.dequantize_ptpc(code, scale)
    assert bool(((y - w).abs() <= w.abs() / 16 + scale[:, None] * 2**-10).all())


def test_a_zero_row_is_quantized_with_scale_one():
    code, scale = f.quantize_rows(torch.zeros(2, 128))
    assert scale.tolist() == [1.0, 1.0]
    assert not bool(code.any())
    _, scale = f.quantize_rows(fp32([[1.0, -3.0]]))
    assert scale.item() == (fp32(3.0) / 448).item()


def test_bf16_round_goes_to_even():
    x = fp32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
    assert f.bf16_round(x).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


@pytest.mark.parametrize("call", [f.quantize_mxfp8, f.quantize_mxfp4])
def test_a_row_of_half_a_block_is_refused(call):
    with pytest.raises(ValueError, match="multiple of 32 long, got 48"):
        call(torch.zeros(2, 48))


def test_wrong_dtypes_and_scale_counts_are_refused():
    with pytest.raises(ValueError, match=r"got torch\.float64"):
        f.e4m3_encode(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"must be torch\.uint8"):
        f.e4m3_decode(torch.zeros(2, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"one per 32 elements, got \(2, 1\) for \(2, 64\)"):
        f.dequantize_mxfp8(
            torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
        )
