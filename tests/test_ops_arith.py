"""Every ``arith`` operation against Python integers and Fractions, special values included."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from lane_arithmetic import (
    F32,
    FLOATS,
    Float,
    bare,
    first_difference,
    float_values,
    floats,
    int_pairs,
    int_values,
    ints,
    nearest,
    run,
    signed,
)
from scalar_rules import COMPARE, FLOAT_COMPARE, FLOAT_OPS, INT_OPS

WIDTHS = (8, 16, 32, 64)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", INT_OPS)
def test_integer_operation_wraps_like_python_integers(kind: str, bits: int) -> None:
    a, b = int_pairs(bits)
    got = run(kind, ints(a, bits), ints(b, bits))
    want = [signed(INT_OPS[kind](x, y, bits), bits) for x, y in zip(a, b, strict=True)]
    assert got.dtype == ints(a, bits).dtype
    assert not first_difference(got, want, a, b)


@pytest.mark.parametrize("kind", INT_OPS)
def test_a_single_constant_operand_gives_the_same_as_a_vector_of_it(kind: str) -> None:
    a = int_values(32)
    for b in int_values(32):
        got = run(kind, ints(a, 32), ints([b], 32))
        want = [signed(INT_OPS[kind](x, b, 32), 32) for x in a]
        assert not first_difference(got, want, a, [b] * len(a))


BOOL_OPS = [k for k in INT_OPS if k not in ("arith.floordivsi", "arith.ceildivsi")]


@pytest.mark.parametrize("kind", [k for k in BOOL_OPS if "ceil" not in k])
def test_booleans_are_one_bit_integers(kind: str) -> None:
    a, b = [0, 0, -1, -1], [0, -1, 0, -1]  # an i1 read with sign
    got = run(kind, *(torch.tensor(v).reshape(1, 1, -1) != 0 for v in (a, b)))
    want = [signed(INT_OPS[kind](x, bare(y, 1) if "sh" in kind else y, 1), 1) != 0
            for x, y in zip(a, b, strict=True)]  # fmt: skip
    assert got.dtype == torch.bool
    assert got.flatten().tolist() == want


@pytest.mark.parametrize("bits", [1, *WIDTHS])
@pytest.mark.parametrize("predicate", range(10))
def test_integer_comparison_has_all_ten_predicates(predicate: int, bits: int) -> None:
    a, b = int_pairs(bits) if bits > 1 else ([0, 0, -1, -1], [0, -1, 0, -1])
    to = ints if bits > 1 else lambda v, _: torch.tensor(v).reshape(1, 1, -1) != 0
    got = run("arith.cmpi", to(a, bits), to(b, bits), predicate=predicate)
    rule = COMPARE[predicate if predicate < 6 else predicate - 4]
    if predicate >= 6:
        want = [rule(bare(x, bits), bare(y, bits)) for x, y in zip(a, b, strict=True)]
    else:
        want = [rule(x, y) for x, y in zip(a, b, strict=True)]
    assert got.dtype == torch.bool
    assert not first_difference(got, want, a, b)


@pytest.mark.parametrize("bits", WIDTHS)
def test_extended_arithmetic_gives_the_carry_or_the_high_word(bits: int) -> None:
    a, b = int_pairs(bits)
    x, y = ints(a, bits), ints(b, bits)
    pairs = list(zip(a, b, strict=True))
    total, carry = run("arith.addui_extended", x, y)
    assert not first_difference(total, [signed(p + q, bits) for p, q in pairs], a, b)
    assert not first_difference(
        carry, [bare(p, bits) + bare(q, bits) >> bits == 1 for p, q in pairs], a, b
    )
    _, borrow = run("arith.subui_extended", x, y)
    assert not first_difference(borrow, [bare(p, bits) < bare(q, bits) for p, q in pairs], a, b)
    for kind, read in (("arith.mulsi_extended", signed), ("arith.mului_extended", bare)):
        low, high = run(kind, x, y)
        products = [read(p, bits) * read(q, bits) for p, q in pairs]
        assert not first_difference(low, [signed(p, bits) for p in products], a, b)
        assert not first_difference(high, [signed(p >> bits, bits) for p in products], a, b)


# ---------------------------------------------------------------------- floats


def float_pairs(form: Float) -> tuple[list[float], list[float]]:
    values = float_values(form)
    return [a for a in values for _ in values], [b for _ in values for b in values]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kind", FLOAT_OPS)
def test_float_operation_is_rounded_once_to_nearest_even(kind: str, name: str) -> None:
    form = FLOATS[name]
    a, b = float_pairs(form)
    got = run(kind, floats(a, form), floats(b, form))
    want = [FLOAT_OPS[kind](x, y, form) for x, y in zip(a, b, strict=True)]
    assert got.dtype == form.dtype
    assert not first_difference(got, want, a, b)


def test_negation_flips_the_sign_of_everything() -> None:
    values = float_values(F32)
    got = run("arith.negf", floats(values, F32))
    assert not first_difference(got, [-v for v in values], values)


@pytest.mark.parametrize("predicate", range(16), ids=[n for n, _, _ in FLOAT_COMPARE])
def test_float_comparison_has_all_sixteen_predicates(predicate: int) -> None:
    a, b = float_pairs(F32)
    _, rule, if_unordered = FLOAT_COMPARE[predicate]
    got = run("arith.cmpf", floats(a, F32), floats(b, F32), predicate=predicate)
    want = [
        if_unordered if math.isnan(x) or math.isnan(y) else rule(x, y)
        for x, y in zip(a, b, strict=True)
    ]
    assert got.dtype == torch.bool
    assert not first_difference(got, want, a, b)


# ---------------------------------------------------------------------- selection, constants


def test_select_takes_a_condition_per_lane_or_per_element() -> None:
    a, b = torch.arange(8).reshape(1, 1, 4, 2), -torch.arange(8).reshape(1, 1, 4, 2)
    lanes = torch.tensor([True, False, False, True]).reshape(1, 1, 4)
    got = run("arith.select", lanes, a, b)
    assert got.tolist() == [[[[0, 1], [-2, -3], [-4, -5], [6, 7]]]]
    each = torch.tensor([True, False] * 4).reshape(1, 1, 4, 2)
    assert run("arith.select", each, a, b).tolist() == [[[[0, -1], [2, -3], [4, -5], [6, -7]]]]


def test_select_of_uniform_values_stays_uniform() -> None:
    one = torch.ones(1, 1, 1)
    assert run("arith.select", one > 0, one, -one).shape == (1, 1, 1)


@pytest.mark.parametrize(
    ("value", "kind", "want"),
    [
        (7, "i32", [7]),
        (0xFFFFFFFF, "i32", [-1]),
        (True, "i1", [True]),
        (-1, "i1", [True]),
        (0x80, "i8", [-128]),
        (-0.0, "f32", [-0.0]),
        (0.1, "f32", [0.10000000149011612]),
        (0.1, "bf16", [0.10009765625]),
        (math.inf, "f32", [math.inf]),
        (3, "index", [3]),
        ([1, 2, 3], "3xi32", [1, 2, 3]),
        ([5], "4xi64", [5, 5, 5, 5]),
        ([0.5, -2.0], "2xf16", [0.5, -2.0]),
    ],
)
def test_constant_has_its_type_and_one_lane(value: object, kind: str, want: list[object]) -> None:
    got = run("arith.constant", outs=kind, value=value)
    assert got.shape[:3] == (1, 1, 1)
    assert got.flatten().tolist() == want
    assert math.copysign(1, float(got.flatten()[0])) == math.copysign(1, float(want[0]))


def test_zero_and_minus_zero_are_different_constants() -> None:
    signs = [
        math.copysign(1, run("arith.constant", outs="f32", value=v).item()) for v in (0.0, -0.0)
    ]
    assert signs == [1, -1]


def test_an_undefined_struct_is_filled_by_insertvalue() -> None:
    from m3lab.interpreter.ops import LANE
    from m3lab.interpreter.program import Op, Type

    undefined = LANE["llvm.mlir.undef"](Op("", (), (), (), (Type("struct", 2),), {}))
    one = torch.ones(1, 1, 1)
    filled = run("llvm.insertvalue", undefined, one, position=[1])
    assert filled[0] is None
    assert filled[1] is one
    assert run("llvm.extractvalue", filled, position=[1]) is one


# ---------------------------------------------------------------------- widths and types


@pytest.mark.parametrize("bits", [1, 8, 16, 32])
def test_extension_keeps_or_drops_the_sign(bits: int) -> None:
    values = int_values(bits) if bits > 1 else [0, -1]
    x = ints(values, bits) if bits > 1 else torch.tensor(values).reshape(1, 1, -1) != 0
    for kind in ("arith.extsi", "arith.index_cast"):
        got = run(kind, x, outs="i64")
        assert got.dtype == torch.int64
        assert not first_difference(got, values, values)
    for kind in ("arith.extui", "arith.index_castui"):
        got = run(kind, x, outs="i64")
        assert not first_difference(got, [bare(v, bits) for v in values], values)


@pytest.mark.parametrize("kind", ["arith.trunci", "arith.index_cast", "arith.index_castui"])
def test_truncation_keeps_the_low_bits(kind: str) -> None:
    values = int_values(64)
    for bits in (8, 16, 32):
        got = run(kind, ints(values, 64), outs=f"i{bits}")
        assert not first_difference(got, [signed(v, bits) for v in values], values)
    if kind == "arith.trunci":
        got = run(kind, ints(values, 64), outs="i1")
        assert got.flatten().tolist() == [v & 1 == 1 for v in values]


TIES = [
    (1 << 24) + 1,
    (1 << 24) + 3,
    (1 << 25) + 2,
    (1 << 30) + 64,
    (1 << 31) - 64,
    257,
    259,
    65519,
]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bits", [8, 32, 64])
def test_integers_become_floats_rounded_once(bits: int, name: str) -> None:
    form = FLOATS[name]
    extra = [*TIES, (1 << 53) + 1, (1 << 62) + (1 << 54) + 1, (1 << 62) + (1 << 38) + 1]
    extra += [(1 << 63) + (1 << 39) + 1]
    values = int_values(bits) + [signed(s * v, bits) for v in extra for s in (1, -1)]
    x = ints(values, bits)
    got = run("arith.sitofp", x, outs=name)
    assert got.dtype == form.dtype
    assert not first_difference(got, [nearest(Fraction(v), form) for v in values], values)
    got = run("arith.uitofp", x, outs=name)
    want = [nearest(Fraction(bare(v, bits)), form) for v in values]
    assert not first_difference(got, want, values)


def test_a_signed_boolean_becomes_minus_one() -> None:
    x = torch.tensor([False, True]).reshape(1, 1, -1)
    assert run("arith.sitofp", x, outs="f32").flatten().tolist() == [0.0, -1.0]
    assert run("arith.uitofp", x, outs="f32").flatten().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bits", WIDTHS)
def test_floats_become_integers_toward_zero_and_saturate(bits: int) -> None:
    top = 2.0 ** (bits - 1)
    edges = [top, 2 * top, top - 0.5, 1.5, 2.5, 0.99999994, 255.7, 2.0**31, 2.0**62, 2.0**63]
    values = [float(nearest(Fraction(s * v), F32)) for v in edges for s in (1, -1)]
    values += float_values(F32)
    for kind, low, high in (
        ("arith.fptosi", -(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        ("arith.fptoui", 0, (1 << bits) - 1),
    ):
        got = run(kind, floats(values, F32), outs=f"i{bits}")

        def convert(v: float, low: int = low, high: int = high) -> int:
            if math.isnan(v):
                return 0
            if math.isinf(v):
                return high if v > 0 else low
            return min(max(math.trunc(v), low), high)

        assert not first_difference(got, [signed(convert(v), bits) for v in values], values)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_fp32_narrows_to_nearest_even(name: str) -> None:
    form = FLOATS[name]
    step = 2.0 ** (1 - form.digits)
    values = float_values(F32) + float_values(form)
    values += [1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-23, 2.0 ** (form.most + 1) - 1]
    values += [2.0**form.least * step / 2, 2.0**form.least * step * 1.5, 65519.0, 65520.0, 3.39e38]
    values = [float(v) for v in floats(values, F32).flatten().tolist()]
    got = run("arith.truncf", floats(values, F32), outs=name)
    assert got.dtype == form.dtype
    want = [
        v if not math.isfinite(v) or v == 0 else nearest_signed(Fraction(v), form) for v in values
    ]
    assert not first_difference(got, want, values)
    back = run("arith.extf", got, outs="f32")
    assert back.dtype == torch.float32
    assert not first_difference(back, want, values)


def nearest_signed(x: Fraction, form: Float) -> float:
    return nearest(x, form) if nearest(x, form) else math.copysign(0.0, x)


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_fp64_narrows_in_one_step(name: str) -> None:
    form = FLOATS[name]
    step = 2.0 ** (1 - form.digits)
    # by way of fp32 each of these would become an exact tie and fall to the wrong side
    values = [1 + step / 2 + 2.0**-40, 1 + 3 * step / 2 - 2.0**-40, -1 - step / 2 - 2.0**-40]
    x = torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1)
    got = run("arith.truncf", x, outs=name)
    assert not first_difference(got, [nearest(Fraction(v), form) for v in values], values)
