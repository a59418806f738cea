"""Matrix instructions: layouts and numerics against sums written out in plain Python.

Small integers (and powers of two as scales) make every partial sum exact, so that results must be
equal whatever the order of summation; random operands are held to the rounding of K additions.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from lane_arithmetic import make_op, signed
from matrix_rules import (
    CODECS,
    HALF,
    PLAIN,
    Codec,
    accumulator_place,
    as_accumulators,
    multiply,
    packed,
    scaled_side,
    small_accumulators,
    tensor_of,
)

from m3lab.interpreter.ops import MATRIX
from m3lab.interpreter.ops.matrix import FORMATS, operand_format

LANES = 64


def run_matrix(kind: str, *operands: torch.Tensor, **attrs: object) -> torch.Tensor:
    return MATRIX[kind](make_op(kind, **attrs), *operands)


# ---------------------------------------------------------------------- plain instructions

# name, rows, k per lane, codec of A, of B, dtype and length of an operand value


@pytest.mark.parametrize(
    ("name", "rows", "share", "codec_a", "codec_b", "dtype", "n"), PLAIN, ids=[p[0] for p in PLAIN]
)
def test_eight_bit_product_puts_every_element_in_its_place(
    name: str, rows: int, share: int, codec_a: Codec, codec_b: Codec, dtype: torch.dtype, n: int
) -> None:
    rng = random.Random(name)
    depth = share * LANES // rows
    sides = []
    for codec in (codec_a, codec_b):
        codes = [[rng.choice(codec.whole()) for _ in range(share)] for _ in range(LANES)]
        matrix = {
            (lane % rows, share * (lane // rows) + i): codec.value(code)
            for lane in range(LANES)
            for i, code in enumerate(codes[lane])
        }
        sides.append((tensor_of([packed(c, 8) for c in codes], dtype, n), matrix))
    c = small_accumulators(rng, rows)
    accumulators = as_accumulators(c, torch.int32 if name.startswith("i32") else torch.float32)
    got = run_matrix(f"rocdl.mfma.{name}", sides[0][0], sides[1][0], accumulators,
                     cbsz=0, abid=0, blgp="#rocdl<mfma_perm_b none>")  # fmt: skip
    assert got.dtype == accumulators.dtype
    assert got.flatten().tolist() == multiply(sides[0][1], sides[1][1], c, rows, depth)


@pytest.mark.parametrize(("name", "rows", "share", "dtype"), HALF, ids=[h[0] for h in HALF])
def test_sixteen_bit_product_puts_every_element_in_its_place(
    name: str, rows: int, share: int, dtype: torch.dtype
) -> None:
    rng = random.Random(name)
    depth = share * LANES // rows
    sides = []
    for _ in range(2):
        values = [[float(rng.randrange(-8, 9)) for _ in range(share)] for _ in range(LANES)]
        matrix = {
            (lane % rows, share * (lane // rows) + i): v
            for lane in range(LANES)
            for i, v in enumerate(values[lane])
        }
        sides.append((torch.tensor(values, dtype=dtype).reshape(1, 1, LANES, share), matrix))
    c = small_accumulators(rng, rows)
    # the bf16 1k forms take i16 lanes
    operands = [s[0].view(torch.int16) if name.endswith("1k") else s[0] for s in sides]
    got = run_matrix(f"rocdl.mfma.{name}", *operands, as_accumulators(c))
    assert got.flatten().tolist() == multiply(sides[0][1], sides[1][1], c, rows, depth)


def test_integer_products_of_extremes_do_not_round() -> None:
    a = torch.full((1, 1, LANES, 4), signed(0x80808080, 32), dtype=torch.int32)
    c = torch.full((1, 1, LANES, 4), (1 << 30) + 1, dtype=torch.int32)
    got = run_matrix("rocdl.mfma.i32.16x16x64.i8", a, a, c)
    assert set(got.flatten().tolist()) == {(1 << 30) + 1 + 64 * 128 * 128}


def test_lane_broadcasts_are_refused() -> None:
    x = torch.zeros(1, 1, LANES, dtype=torch.int64)
    c = torch.zeros(1, 1, LANES, 4)
    with pytest.raises(ValueError, match="blgp"):
        run_matrix("rocdl.mfma.f32.16x16x32.fp8.fp8", x, x, c, cbsz=0, abid=0,
                   blgp="#rocdl<mfma_perm_b bcast_first_32>")  # fmt: skip


# ---------------------------------------------------------------------- scaled instructions


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("a", "b"), list(itertools.product(CODECS, CODECS)))
def test_scaled_product_puts_elements_and_scales_in_their_places(a: str, b: str, rows: int) -> None:
    rng = random.Random(f"{a}{b}{rows}")
    depth = 32 * LANES // rows
    kind = f"rocdl.mfma.scale.f32.{rows}x{rows}x{depth}.f8f6f4"
    left, scale_a, matrix_a = scaled_side(rng, a, rows, whole=True)
    right, scale_b, matrix_b = scaled_side(rng, b, rows, whole=True)
    c = small_accumulators(rng, rows)
    got = run_matrix(
        kind, left, right, as_accumulators(c), scale_a, scale_b, opselA=2, opselB=2,
        cbsz=f"#rocdl<matrix_format {a}>", blgp=f"#rocdl<matrix_format {b}>",
    )  # fmt: skip
    assert got.flatten().tolist() == multiply(matrix_a, matrix_b, c, rows, depth)


SCALED = "rocdl.mfma.scale.f32.16x16x128.f8f6f4"
F4F8 = {"cbsz": 4, "blgp": 0, "opselA": 2, "opselB": 2}


def test_a_longer_operand_s_spare_dwords_do_not_count() -> None:
    rng = random.Random(8)
    left, scale_a, _ = scaled_side(rng, "fp4_e2m1", 16, whole=True)
    right, scale_b, _ = scaled_side(rng, "fp8_e4m3", 16, whole=True)
    c = torch.zeros(1, 1, 1, 4)
    padded = torch.cat((left, torch.full_like(left, -1)), -1)
    want = run_matrix(SCALED, left, right, c, scale_a, scale_b, **F4F8)
    assert torch.equal(run_matrix(SCALED, padded, right, c, scale_a, scale_b, **F4F8), want)


@pytest.mark.parametrize("select", range(4))
def test_the_byte_select_picks_the_scale_byte(select: int) -> None:
    one = torch.full((1, 1, 1, 4), 0x22222222, dtype=torch.int32)  # E2M1 code 2 is 1.0
    word = signed(sum((127 + i) << (8 * i) for i in range(4)), 32)
    scales = torch.full((1, 1, 1), word, dtype=torch.int32)
    unit = torch.full((1, 1, 1), 0x7F7F7F7F, dtype=torch.int32)
    c = torch.zeros(1, 1, 1, 4)
    formats = {"cbsz": 4, "blgp": 4}
    got = run_matrix(SCALED, one, one, c, scales, unit, opselA=select, opselB=0, **formats)
    assert set(got.flatten().tolist()) == {128.0 * 2**select}
    got = run_matrix(SCALED, one, one, c, unit, scales, opselA=0, opselB=select, **formats)
    assert set(got.flatten().tolist()) == {128.0 * 2**select}


def test_a_nan_scale_spoils_its_row_and_column_only() -> None:
    one = torch.full((1, 1, LANES, 4), 0x22222222, dtype=torch.int32)
    unit = torch.full((1, 1, 1), 127, dtype=torch.int32)
    bad = torch.full((1, 1, LANES), 127, dtype=torch.int32)
    bad[0, 0, 16 * 2 + 5] = 255  # row 5, k = 64 .. 95
    c = torch.zeros(1, 1, 1, 4)
    attrs = {"cbsz": 4, "blgp": 4, "opselA": 0, "opselB": 0}
    got = run_matrix(SCALED, one, one, c, bad, unit, **attrs)
    for lane, e in itertools.product(range(LANES), range(4)):
        row, _ = accumulator_place(lane, e, 16)
        value = float(got[0, 0, lane, e])
        assert math.isnan(value) if row == 5 else value == 128.0
    got = run_matrix(SCALED, one, one, c, unit, bad, **attrs)
    for lane, e in itertools.product(range(LANES), range(4)):
        _, column = accumulator_place(lane, e, 16)
        value = float(got[0, 0, lane, e])
        assert math.isnan(value) if column == 5 else value == 128.0


@pytest.mark.parametrize(("ea", "eb"), [(0, 254), (254, 0), (20, 230), (0, 127), (254, 127)])
def test_far_apart_scales_do_not_overflow_on_the_way(ea: int, eb: int) -> None:
    one = torch.full((1, 1, 1, 4), 0x22222222, dtype=torch.int32)
    scales = [torch.full((1, 1, 1), e, dtype=torch.int32) for e in (ea, eb)]
    c = torch.zeros(1, 1, 1, 4)
    attrs = {"cbsz": 4, "blgp": 4, "opselA": 0, "opselB": 0}
    got = run_matrix(SCALED, one, one, c, *scales, **attrs)
    exact = 128.0 * 2.0 ** (ea + eb - 254)
    want = exact if exact < 2.0**128 else math.inf
    assert set(got.flatten().tolist()) == {want}


def test_random_products_are_within_the_rounding_of_their_additions() -> None:
    rng = random.Random(77)
    left, scale_a, matrix_a = scaled_side(rng, "fp8_e4m3", 16, whole=False)
    right, scale_b, matrix_b = scaled_side(rng, "fp8_e5m2", 16, whole=False)
    c = small_accumulators(rng, 16)
    got = run_matrix(SCALED, left, right, as_accumulators(c), scale_a, scale_b,
                     cbsz=0, blgp=1, opselA=2, opselB=2)  # fmt: skip
    want = multiply(matrix_a, matrix_b, c, 16, 128)
    for place, (value, exact) in enumerate(zip(got.flatten().tolist(), want, strict=True)):
        i, j = accumulator_place(place // 4, place % 4, 16)
        size = sum(abs(matrix_a[i, k] * matrix_b[j, k]) for k in range(128))
        assert abs(value - exact) <= 129 * 2.0**-24 * (size + abs(c[place // 4][place % 4]))


# ---------------------------------------------------------------------- batches


def random_words(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
    return words.to(torch.int32) & 0x77777777  # no NaN among the bytes


def test_a_wave_s_result_does_not_depend_on_the_waves_beside_it() -> None:
    a, b = random_words(40, 8, LANES, 4, seed=1), random_words(40, 8, LANES, 8, seed=2)
    scales = 127 + random_words(40, 8, LANES, seed=3) % 5
    c = torch.randn(
        40, 8, LANES, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(4)
    )
    attrs = {"cbsz": 4, "blgp": 0, "opselA": 0, "opselB": 0}
    whole = run_matrix(SCALED, a, b, c, scales, scales, **attrs)
    for cta, wave in ((0, 0), (17, 3), (39, 7)):
        part = tuple(x[cta : cta + 1, wave : wave + 1] for x in (a, b, c, scales, scales))
        alone = run_matrix(SCALED, *part, **attrs)
        assert torch.equal(alone[0, 0], whole[cta, wave])


def test_operands_of_different_shapes_broadcast() -> None:
    a, b = random_words(3, 1, LANES, 4, seed=1), random_words(1, 2, LANES, 8, seed=2)
    scale = torch.full((1, 1, 1), 130, dtype=torch.int32)
    c = torch.randn(
        1, 1, 1, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(5)
    )
    attrs = {"cbsz": 4, "blgp": 0, "opselA": 0, "opselB": 0}
    got = run_matrix(SCALED, a, b, c, scale, scale, **attrs)
    full = [x.expand(3, 2, LANES, *x.shape[3:]).contiguous() for x in (a, b, c, scale, scale)]
    assert got.shape == (3, 2, LANES, 4)
    assert torch.equal(got, run_matrix(SCALED, *full, **attrs))
    a8, b8 = a.view(torch.int64)[..., 0], b.view(torch.int64)[..., 0]
    got = run_matrix("rocdl.mfma.f32.16x16x32.fp8.fp8", a8, b8, c)
    wide = [x.expand(3, 2, LANES, *x.shape[3:]).contiguous() for x in (a8, b8, c)]
    assert torch.equal(got, run_matrix("rocdl.mfma.f32.16x16x32.fp8.fp8", *wide))


def test_operands_are_not_written_to() -> None:
    a, c = random_words(2, 1, LANES, 4, seed=1), torch.randn(2, 1, LANES, 4)
    scale = torch.full((2, 1, LANES), 128, dtype=torch.int32)
    before = [x.clone() for x in (a, c, scale)]
    run_matrix(SCALED, a, a, c, scale, scale, cbsz=4, blgp=4, opselA=0, opselB=0)
    assert all(torch.equal(x, y) for x, y in zip((a, c, scale), before, strict=True))


def test_format_codes_follow_the_instruction() -> None:
    assert [f.name for f in FORMATS] == list(CODECS)
    assert operand_format(4) is operand_format("#rocdl<matrix_format fp4_e2m1>")
    with pytest.raises(ValueError, match="fp7"):
        operand_format("#rocdl<matrix_format fp7>")
