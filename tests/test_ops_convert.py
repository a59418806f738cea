"""The part's conversions against encoders written from the format's definition, byte by byte."""

from __future__ import annotations

import itertools
import math
import random
import struct
from fractions import Fraction

import pytest
import torch
from lane_arithmetic import (
    BF16,
    F16,
    F32,
    FLOATS,
    bare,
    first_difference,
    float_values,
    floats,
    int_values,
    ints,
    nearest,
    run,
    signed,
)
from scalar_rules import DECODE, E2M1, E4M3, E5M2, ENCODE, e2m1, permute_bytes, value_e2m1

# ---------------------------------------------------------------------- formats by definition


VALUES = {"fp8": E4M3, "bf8": E5M2, "fp4": E2M1}


def inputs(name: str) -> list[float]:
    """Every value of the format, every midpoint, their fp32 neighbours, and special values."""
    exact = VALUES[name]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(exact)]
    middles.append(exact[-1] + (exact[-1] - exact[-2]) / 2)
    out = []
    for v in [*exact, *middles]:
        f = float(v)
        bits = struct.unpack("<i", struct.pack("<f", f))[0]
        near = [struct.unpack("<f", struct.pack("<i", max(bits + d, 0)))[0] for d in (-1, 0, 1)]
        out += [s * n for n in near for s in (1, -1)]
    return [*out, *float_values(F32), 449.0, 463.9, 480.0, 57345.0, 65536.0, 1e9]


def nan_alike(byte: int, name: str) -> int:
    """NaN codes of E5M2 all alike."""
    return byte | 0x7F if name == "bf8" and byte & 0x7F > 0x7C else byte


# ---------------------------------------------------------------------- unscaled


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_fp32_packs_to_nearest_even_and_leaves_the_other_half(name: str) -> None:
    a = inputs(name)
    b = a[::-1]
    old = 0x12345678
    for word in (False, True):
        got = run(
            f"rocdl.cvt.pk.{name}.f32",
            floats(a, F32),
            floats(b, F32),
            ints([old], 32),
            wordSel=word,
        )
        for x, y, value in zip(a, b, got.flatten().tolist(), strict=True):
            half = (bare(value, 32) >> 16 * word) & 0xFFFF
            assert (bare(value, 32) >> (16 - 16 * word)) & 0xFFFF == (
                old >> (16 - 16 * word)
            ) & 0xFFFF
            pair = [nan_alike(half & 0xFF, name), nan_alike(half >> 8, name)]
            if not math.isnan(x):
                assert pair[0] == ENCODE[name](x), x
            else:
                assert pair[0] & 0x7F == 0x7F
            if not math.isnan(y):
                assert pair[1] == ENCODE[name](y), y


def test_e4m3_has_no_saturation() -> None:
    values = [448.0, 464.0, 464.0000305, 480.0, -500.0, math.inf, -math.inf, math.nan]
    got = run("rocdl.cvt.pk.fp8.f32", floats(values, F32), floats([0.0], F32), ints([0], 32),
              wordSel=False)  # fmt: skip
    bytes_ = [bare(v, 32) & 0xFF for v in got.flatten().tolist()]
    assert bytes_[:7] == [0x7E, 0x7E, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF]
    assert bytes_[7] & 0x7F == 0x7F


@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_every_byte_unpacks_to_its_value(name: str) -> None:
    words = [
        signed(i | (255 - i) << 8 | (i ^ 0x55) << 16 | (i ^ 0xAA) << 24, 32) for i in range(256)
    ]
    x = ints(words, 32)
    for byte in range(4):
        got = run(f"rocdl.cvt.f32.{name}", x, byteSel=byte)
        want = [DECODE[name]((bare(w, 32) >> 8 * byte) & 0xFF) for w in words]
        assert not first_difference(got, want, words)
    for word in (False, True):
        got = run(f"rocdl.cvt.pk.f32.{name}", x, wordSel=word)
        for i in range(2):
            want = [DECODE[name]((bare(w, 32) >> (16 * word + 8 * i)) & 0xFF) for w in words]
            assert not first_difference(got[..., i].contiguous(), want, words)


def test_the_intrinsic_form_has_its_immediate_as_an_operand() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.bool)
    got = run("llvm.call_intrinsic:llvm.amdgcn.cvt.pk.f32.fp8", ints([0x38380000], 32), one)
    assert got.flatten().tolist() == [1.0, 1.0]


def test_pkrtz_rounds_toward_zero() -> None:
    values = [
        *float_values(F32),
        *float_values(F16),
        65535.0,
        1 + 2.0**-11,
        1 + 2.0**-10 - 2.0**-23,
    ]
    values = floats(values, F32).flatten().tolist()
    got = run("rocdl.cvt.pkrtz", floats(values, F32), floats([-3.0], F32))
    assert got.dtype == torch.float16
    assert set(got[..., 1].flatten().tolist()) == {-3.0}

    def toward_zero(x: float) -> float:
        if not math.isfinite(x) or x == 0:
            return x
        near = nearest(Fraction(x), F16)
        if abs(near) > abs(x):
            bits = (
                struct.unpack("<H", struct.pack("<e", abs(near)))[0]
                if abs(near) < 65520
                else 0x7C00
            )
            near = struct.unpack("<e", struct.pack("<H", bits - 1))[0]
        return math.copysign(near, x)

    assert not first_difference(got[..., 0].contiguous(), [toward_zero(v) for v in values], values)


# ---------------------------------------------------------------------- scaled

SCALES = [1.0, 2.0, 0.25, 2.0**-20, 2.0**30, 3.9]  # of 3.9 only the exponent (2) counts


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", ["fp8", "bf8"])
def test_scaled_unpacking_multiplies_by_the_power_of_two(name: str, wide: str) -> None:
    words = [i | (255 - i) << 8 for i in range(256)]
    for scale in SCALES:
        power = Fraction(2) ** math.floor(math.log2(scale))
        got = run(
            f"rocdl.cvt.scalef32.pk.{wide}.{name}",
            ints(words, 32), floats([scale], F32), srcLoHiSel=False,
        )  # fmt: skip
        for i in range(2):
            exact = [DECODE[name]((w >> 8 * i) & 0xFF) for w in words]
            want = [
                v if not math.isfinite(v) or v == 0 else signed_nearest(Fraction(v) * power, wide)
                for v in exact
            ]
            assert not first_difference(got[..., i].contiguous(), want, words)


def signed_nearest(x: Fraction, wide: str) -> float:
    return math.copysign(nearest(x, FLOATS[wide]), x)


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
def test_scaled_fp4_unpacks_one_byte(wide: str) -> None:
    words = [signed(i << 16, 32) for i in range(256)]
    got = run(
        f"rocdl.cvt.scalef32.pk.{wide}.fp4", ints(words, 32), floats([4.0], F32), srcSelIndex=2
    )
    for i in range(2):
        want = [4 * value_e2m1((w >> (16 + 4 * i)) & 15) for w in words]
        assert not first_difference(got[..., i].contiguous(), want, words)


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
def test_scaled_packing_divides_by_the_power_of_two(wide: str) -> None:
    form = {"f32": F32, "bf16": BF16, "f16": F16}[wide]
    for name, scale in (("fp8", 4.0), ("bf8", 0.5)):
        values = [v for v in floats(inputs(name)[:400], form).flatten().tolist() if v == v]
        x = floats(values, form)
        args = (x, x * 0 + 1) if wide == "f32" else (torch.stack((x, x * 0 + 1), -1),)
        old = torch.tensor([7, -9], dtype=torch.int16).reshape(1, 1, 1, 2)
        got = run(
            f"rocdl.cvt.scalef32.pk.{name}.{wide}",
            old,
            *args,
            floats([scale], F32),
            dstLoHiSel=True,
        )
        assert set(got[..., 0].flatten().tolist()) == {7}
        codes = [bare(v, 16) & 0xFF for v in got[..., 1].flatten().tolist()]
        want = [ENCODE[name](v / scale if math.isfinite(v) else v) for v in values]
        assert codes == want


@pytest.mark.parametrize("wide", ["f32", "bf16", "f16"])
def test_scaled_fp4_packing_rounds_to_even_and_saturates(wide: str) -> None:
    form = {"f32": F32, "bf16": BF16, "f16": F16}[wide]
    values = [v for v in floats(inputs("fp4"), form).flatten().tolist() if v == v]
    x = floats(values, form)
    args = (x, -x) if wide == "f32" else (torch.stack((x, -x), -1),)
    got = run(
        f"rocdl.cvt.scalef32.pk.fp4.{wide}",
        ints([0x11223344], 32), *args, floats([1.0], F32), dstSelIndex=1,
    )  # fmt: skip
    for v, word in zip(values, got.flatten().tolist(), strict=True):
        assert bare(word, 32) & 0xFFFF00FF == 0x11220044
        assert (word >> 8) & 0xFF == e2m1(v) | e2m1(-v) << 4


# ---------------------------------------------------------------------- dot products


def test_fdot2_sums_in_fp32_in_element_order() -> None:
    rng = random.Random(2)
    for kind, form in (("rocdl.fdot2.f32.bf16", BF16), ("rocdl.fdot2", F16)):

        def draw(form=form) -> float:
            return nearest(Fraction(rng.uniform(-4, 4)) * Fraction(2) ** rng.randrange(-6, 6), form)

        rows = [[draw() for _ in range(4)] for _ in range(500)]
        c = [nearest(Fraction(rng.uniform(-50, 50)), F32) for _ in rows]
        a = floats([v for r in rows for v in r[:2]], form).reshape(1, 1, -1, 2)
        b = floats([v for r in rows for v in r[2:]], form).reshape(1, 1, -1, 2)
        got = run(kind, a, b, floats(c, F32), clamp=False)
        want = []
        for r, start in zip(rows, c, strict=True):
            first = nearest(Fraction(start) + Fraction(r[0]) * Fraction(r[2]), F32)
            want.append(nearest(Fraction(first) + Fraction(r[1]) * Fraction(r[3]), F32))
        assert not first_difference(got, want, rows, c)


@pytest.mark.parametrize(("kind", "read"), [("rocdl.sdot4", signed), ("rocdl.udot4", bare)])
def test_integer_dot_of_four_bytes(kind: str, read: object) -> None:
    a = int_values(32)
    b = a[3:] + a[:3]
    got = run(kind, ints(a, 32), ints(b, 32), ints([1000], 32))
    want = [
        signed(1000 + sum(read(x >> s, 8) * read(y >> s, 8) for s in (0, 8, 16, 24)), 32)
        for x, y in zip(a, b, strict=True)
    ]
    assert not first_difference(got, want, a, b)


@pytest.mark.parametrize(("kind", "read"), [("rocdl.sdot2", signed), ("rocdl.udot2", bare)])
def test_integer_dot_of_two_halves(kind: str, read: object) -> None:
    a, b = int_values(16), int_values(16)[::-1]
    x = torch.stack((ints(a, 16), ints(b, 16)), -1)
    got = run(kind, x, x.flip(-1), ints([5], 32))
    want = [signed(5 + 2 * read(p, 16) * read(q, 16), 32) for p, q in zip(a, b, strict=True)]
    assert not first_difference(got, want, a, b)


# ---------------------------------------------------------------------- bytes and lanes


def test_perm_selects_bytes_signs_and_constants() -> None:
    rng = random.Random(4)
    cases = [(0x8899AABB, 0x44557766, s) for s in (0x03020100, 0x07060504, 0x0B0A0908, 0x0D0C000C)]
    cases += [
        (rng.getrandbits(32), rng.getrandbits(32),
         sum(rng.choice([*range(14), 255]) << 8 * i for i in range(4)))
        for _ in range(300)
    ]  # fmt: skip
    columns = [[signed(v, 32) for v in column] for column in zip(*cases, strict=True)]
    got = run("llvm.call_intrinsic:llvm.amdgcn.perm", *(ints(c, 32) for c in columns))
    assert not first_difference(got, [permute_bytes(*c) for c in cases], *columns)


def test_mbcnt_counts_mask_bits_below_the_lane() -> None:
    mask = 0xF0F0A5C3
    word = ints([signed(mask, 32)], 32)
    base = ints([100], 32)
    low = run("rocdl.mbcnt.lo", word, base)
    high = run("rocdl.mbcnt.hi", word, base)
    for lane in range(64):
        below = mask & ((1 << min(lane, 32)) - 1)
        above = mask & ((1 << max(lane - 32, 0)) - 1)
        assert low[0, 0, lane] == 100 + bin(below).count("1")
        assert high[0, 0, lane] == 100 + bin(above).count("1")
