"""Vector operations: element by element by hand, reinterpretation by struct."""

from __future__ import annotations

import struct

import pytest
import torch
from lane_arithmetic import F32, floats, ints, run

from m3lab.interpreter.ops import LANE


def vectors(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One lane a row: [1, 1, lanes, n]."""
    return torch.tensor(rows, dtype=dtype).reshape(1, 1, len(rows), -1)


def test_extract_and_insert_at_a_fixed_place() -> None:
    x = vectors([[1, 2, 3], [4, 5, 6]])
    assert run("vector.extract", x, static_position=[1]).tolist() == [[[2, 5]]]
    value = vectors([[7], [8]]).squeeze(-1)
    got = run("vector.insert", value, x, static_position=[2])
    assert got.tolist() == [[[[1, 2, 7], [4, 5, 8]]]]
    assert x.tolist() == [[[[1, 2, 3], [4, 5, 6]]]]


def test_extract_and_insert_at_a_place_of_each_lane() -> None:
    x = vectors([[1, 2, 3], [4, 5, 6]])
    where = torch.tensor([2, 0]).reshape(1, 1, 2)
    dynamic = [-(1 << 63)]
    assert run("vector.extract", x, where, static_position=dynamic).tolist() == [[[3, 4]]]
    assert run("llvm.extractelement", x, where.to(torch.int32)).tolist() == [[[3, 4]]]
    value = vectors([[7], [8]]).squeeze(-1)
    want = [[[[1, 2, 7], [8, 5, 6]]]]
    assert run("vector.insert", value, x, where, static_position=dynamic).tolist() == want
    assert run("llvm.insertelement", x, value, where).tolist() == want
    one = torch.ones(1, 1, 1, dtype=torch.int64)
    assert run("vector.extract", x, one, static_position=dynamic).tolist() == [[[2, 5]]]


def test_insert_widens_a_uniform_vector_to_the_value_s_lanes() -> None:
    x = vectors([[1, 2]])
    value = torch.arange(3.0).reshape(1, 1, 3)
    got = run("vector.insert", value, x, static_position=[0])
    assert got.tolist() == [[[[0, 2], [1, 2], [2, 2]]]]


def test_a_vector_from_elements_of_different_shapes() -> None:
    lanes = torch.arange(3).reshape(1, 1, 3)
    uniform = torch.full((2, 1, 1), 9)
    got = run("vector.from_elements", lanes, uniform)
    assert got.shape == (2, 1, 3, 2)
    assert got[1].tolist() == [[[0, 9], [1, 9], [2, 9]]]
    assert run("vector.from_elements", lanes).shape == (1, 1, 3, 1)
    parts = run("vector.to_elements", got)
    assert [p.tolist() for p in parts] == [got[..., 0].tolist(), got[..., 1].tolist()]


def test_broadcast_of_a_scalar_and_of_a_vector() -> None:
    lanes = torch.arange(2).reshape(1, 1, 2)
    got = run("vector.broadcast", lanes, ins="i64", outs="3xi64")
    assert got.tolist() == [[[[0, 0, 0], [1, 1, 1]]]]
    pair = vectors([[1, 2]])
    assert run("vector.broadcast", pair, ins="2xf32", outs="4xf32").tolist() == [[[[1, 2, 1, 2]]]]


def test_shuffle_picks_from_both_operands() -> None:
    a, b = vectors([[1, 2, 3]]), vectors([[4, 5, 6]])
    for mask, want in (
        ([0, 3, 2, 5], [1, 4, 3, 6]),
        ([1, 2], [2, 3]),
        ([4, 5], [5, 6]),
        ([2, 3], [3, 4]),
        ([5], [6]),
    ):
        assert run("vector.shuffle", a, b, mask=mask).tolist() == [[[want]]]


def test_slices_and_interleaving() -> None:
    x = vectors([[0, 1, 2, 3, 4, 5]])
    got = run("vector.extract_strided_slice", x, offsets=[2], sizes=[3], strides=[1])
    assert got.tolist() == [[[[2, 3, 4]]]]
    part = vectors([[8, 9]])
    got = run("vector.insert_strided_slice", part, x, offsets=[3], strides=[1])
    assert got.tolist() == [[[[0, 1, 2, 8, 9, 5]]]]
    assert run("vector.interleave", part, -part).tolist() == [[[[8, -8, 9, -9]]]]
    even, odd = run("vector.deinterleave", x)
    assert (even.tolist(), odd.tolist()) == ([[[[0, 2, 4]]]], [[[[1, 3, 5]]]])
    assert run("vector.shape_cast", x, ins="6xf32", outs="6xf32") is x


WIDE_FORMS = [
    ("4xf32", "8xbf16", "<4f", "<8H"),
    ("1xi32", "2xbf16", "<i", "<2H"),
    ("2xi32", "4xi16", "<2i", "<4h"),
    ("4xi32", "2xi64", "<4i", "<2q"),
    ("2xi32", "1xi64", "<2i", "<q"),
    ("8xi8", "2xi32", "<8b", "<2i"),
    ("2xi64", "16xi8", "<2q", "<16b"),
    ("2xf32", "2xi32", "<2f", "<2i"),
    ("1xi64", "2xi32", "<q", "<2i"),
]
UNPACKED_BITS = {"bf16": torch.int16, "f16": torch.int16}


@pytest.mark.parametrize(("source", "target", "pack", "unpack"), WIDE_FORMS)
def test_bitcast_reads_the_same_bytes_little_endian(
    source: str, target: str, pack: str, unpack: str
) -> None:
    n = int(source.split("x")[0])
    rows = [[(37 * r + 11 * i - 60) for i in range(n)] for r in range(3)]
    dtype = {"f32": torch.float32, "i32": torch.int32, "i64": torch.int64, "i8": torch.int8}
    x = vectors(rows, dtype[source.split("x")[1]])
    for value in (x, torch.cat((x, x), -1)[..., ::1][..., :n], x.expand(2, 1, 3, n)):
        got = run("vector.bitcast", value, ins=source, outs=target)
        bits = UNPACKED_BITS.get(target.split("x")[1])
        got = got.view(bits) if bits else got
        for r, row in enumerate(rows):
            want = list(struct.unpack(unpack, struct.pack(pack, *row)))
            mask = 0xFFFF if bits else None
            lanes = [v & mask if mask else v for v in got[-1, 0, r].tolist()]
            assert lanes == want


def test_bitcast_of_a_broadcast_and_of_an_element_view() -> None:
    one = torch.ones(1, 1, 4)
    wide = run("vector.broadcast", one, ins="f32", outs="2xf32")
    got = run("vector.bitcast", wide, ins="2xf32", outs="4xi16")
    assert got[0, 0, 3].tolist() == [0, 0x3F80, 0, 0x3F80]
    strided = vectors([[1, 2, 3, 4], [5, 6, 7, 8]])[..., 1::2]
    got = run("vector.bitcast", strided, ins="2xf32", outs="1xi64")
    assert got[0, 0, 1].tolist() == [struct.unpack("<q", struct.pack("<2f", 6, 8))[0]]


@pytest.mark.parametrize("kind", ["arith.bitcast", "llvm.bitcast"])
def test_scalar_bitcast(kind: str) -> None:
    x = floats([1.0, -0.0, float("inf")], F32)
    got = run(kind, x, ins="f32", outs="i32")
    assert got.flatten().tolist() == [0x3F800000, -(1 << 31), 0x7F800000]
    back = run(kind, got, ins="i32", outs="f32")
    assert back.flatten().tolist() == [1.0, 0.0, float("inf")]
    pair = run("llvm.bitcast", x, ins="f32", outs="2xbf16")
    assert pair[0, 0, 0].tolist() == [0.0, 1.0]
    assert run("llvm.bitcast", pair, ins="2xbf16", outs="f32").flatten().tolist()[0] == 1.0


REDUCTIONS = {
    "add": (6, -14), "mul": (6, -48), "minsi": (1, -8), "maxsi": (3, -2), "minui": (1, -8),
    "maxui": (3, -2), "and": (0, -16), "or": (3, -2), "xor": (0, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_integer_reduction(name: str) -> None:
    import functools
    import operator

    rows = [[1, 2, 3], [-8, -4, -2]]
    scalar = {
        "add": operator.add, "mul": operator.mul, "minsi": min, "maxsi": max,
        "and": operator.and_, "or": operator.or_, "xor": operator.xor,
        "minui": lambda a, b: min(a, b, key=lambda v: v & 0xFFFFFFFF),
        "maxui": lambda a, b: max(a, b, key=lambda v: v & 0xFFFFFFFF),
    }  # fmt: skip
    got = run("vector.reduction", vectors(rows, torch.int32), kind=f"#vector.kind<{name}>")
    assert got.flatten().tolist() == [functools.reduce(scalar[name], row) for row in rows]


def test_float_reduction_goes_in_element_order_from_the_start_value() -> None:
    big = 2.0**24
    x = vectors([[1.0, 1.0, big, -big], [big, 1.0, 1.0, -big]])
    add = "#vector.kind<add>"
    assert run("vector.reduction", x, kind=add).flatten().tolist() == [2.0, 0.0]
    start = floats([0.5], F32)
    got = run("vector.reduction", x[..., :2], start, kind=add)
    assert got.flatten().tolist() == [2.5, 2.0**24]
    nan = vectors([[1.0, float("nan"), 3.0]])
    assert run("vector.reduction", nan, kind="#vector.kind<maxnumf>").item() == 3.0
    assert run("vector.reduction", nan, kind="#vector.kind<maximumf>").isnan().all()
    assert run("vector.reduction", nan, kind="#vector.kind<minnumf>").item() == 1.0
    assert run("vector.reduction", nan, kind="#vector.kind<minimumf>").isnan().all()


def test_outer_product_and_step() -> None:
    a, b, c = vectors([[1, 2]]), vectors([[10, 20, 30]]), vectors([[1] * 6])
    assert run("vector.outerproduct", a, b, c).tolist() == [[[[11, 21, 31, 21, 41, 61]]]]
    assert run("vector.outerproduct", a, b).tolist() == [[[[10, 20, 30, 20, 40, 60]]]]
    assert run("vector.step", outs="3xindex").flatten().tolist() == [0, 1, 2]


def test_no_vector_operation_writes_to_its_operands() -> None:
    x = vectors([[1, 2, 3], [4, 5, 6]])
    before = x.clone()
    run("vector.insert_strided_slice", vectors([[9], [9]]), x, offsets=[1], strides=[1])
    run("vector.insert", ints([1], 32), x, static_position=[0])
    assert torch.equal(x, before)
    assert "vector.insert" in LANE
