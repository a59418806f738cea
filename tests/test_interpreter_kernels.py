"""Real FlyDSL kernels, traced, lowered and interpreted, against the scalar rules.

A kernel may cover many operation kinds; each test asserts that the kinds it is about are in the
Program it ran, so that a fold in the compiler cannot empty it.
"""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("flydsl")

from flykernels import (
    as_float,
    constant,
    emit,
    float_type,
    float_word,
    int_type,
    narrowed,
    one,
    run_lanes,
    values,
    vector_type,
    widened,
    words_of,
)
from lane_arithmetic import (
    F16,
    F32,
    FLOATS,
    bare,
    f32_bits,
    float_values,
    from_bits,
    identical,
    int_values,
    nearest,
    signed,
)
from scalar_rules import (
    COMPARE,
    DECODE,
    ENCODE,
    FLOAT_COMPARE,
    FLOAT_OPS,
    INT_OPS,
    exact_exp2,
    exact_fma,
    exact_log2,
    exact_rcp,
    exact_rsqrt,
    exact_sqrt,
    permute_bytes,
)

from m3lab.interpreter import Program

Row = list[int]


def float_of(word: int, name: str) -> float:
    form = FLOATS[name]
    return from_bits(bare(word, form.bits), form)


def bits_of(x: float, name: str) -> int:
    if name == "f32":
        return signed(f32_bits(x), 32)
    if name == "f16":
        return struct.unpack("<H", struct.pack("<e", x))[0]
    return f32_bits(x) >> 16


def has(program: Program, *kinds: str) -> None:
    missing = set(kinds) - set(program.kinds())
    assert not missing, f"the kernel holds no {sorted(missing)}"


def grid_for(rows: int) -> dict[str, int]:
    return {"block": 256, "grid": -(-rows // 256)}


# ---------------------------------------------------------------------- integers


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_integer_operations(bits: int) -> None:
    some = int_values(bits) if bits > 8 else int_values(8)[::7]
    rows = [[a, b] for a in some for b in some]

    def body(words: Any) -> Any:
        a, b = (narrowed(w, bits) for w in values(words))
        out = [one(kind, [a, b], int_type(bits)) for kind in INT_OPS]
        for predicate in range(10):
            out.append(one("arith.cmpi", [a, b], int_type(1), predicate=f"{predicate} : i64"))
        return words_of([widened(v) for v in out])

    got, program = run_lanes(f"ints{bits}", body, rows, len(INT_OPS) + 10, **grid_for(len(rows)))
    has(program, *INT_OPS, "arith.cmpi")
    for (a, b), line in zip(rows, got, strict=True):
        want = [signed(rule(a, b, bits), bits) for rule in INT_OPS.values()]
        want += [int(COMPARE[p](a, b)) for p in range(6)]
        want += [int(COMPARE[p - 4](bare(a, bits), bare(b, bits))) for p in range(6, 10)]
        assert line == want, (a, b)


def test_64_bit_operations() -> None:
    some = int_values(64)[::2]
    rows = [[signed(v, 32) for x in (a, b) for v in (x, x >> 32)] for a in some for b in some]

    def join(low: Any, high: Any) -> Any:
        wide = one("arith.shli", [one("arith.extsi", [high], int_type(64)), constant(32, 64)],
                   int_type(64))  # fmt: skip
        return one("arith.ori", [one("arith.extui", [low], int_type(64)), wide], int_type(64))

    def split(x: Any) -> list[Any]:
        high = one("arith.shrui", [x, constant(32, 64)], int_type(64))
        return [one("arith.trunci", [v], int_type(32)) for v in (x, high)]

    def body(words: Any) -> Any:
        w = values(words)
        a, b = join(w[0], w[1]), join(w[2], w[3])
        out = [r for kind in INT_OPS for r in split(one(kind, [a, b], int_type(64)))]
        for kind in ("arith.mulsi_extended", "arith.mului_extended"):
            out += split(emit(kind, [a, b], int_type(64), int_type(64))[1])
        return words_of(out)

    n = 2 * len(INT_OPS) + 4
    got, program = run_lanes("ints64", body, rows, n, **grid_for(len(rows)))
    has(program, "arith.extui", "arith.trunci", "arith.mului_extended", "arith.mulsi_extended")
    for (a, b), line in zip([(a, b) for a in some for b in some], got, strict=True):
        whole = [signed(bare(line[i], 32) | line[i + 1] << 32, 64) for i in range(0, n, 2)]
        want = [signed(rule(a, b, 64), 64) for rule in INT_OPS.values()]
        want += [a * b >> 64, signed(bare(a, 64) * bare(b, 64) >> 64, 64)]
        assert whole == want, (a, b)


def test_bit_counts_carries_and_index_casts() -> None:
    some = int_values(32)
    rows = [[a, b] for a in some for b in some[::5]]

    def body(words: Any) -> Any:
        a, b = values(words)
        out = [one(f"math.{k}", [a], int_type(32)) for k in ("ctpop", "absi")]
        out += [one(f"math.{k}", [a], int_type(32)) for k in ("ctlz", "cttz")]
        total, carry = emit("arith.addui_extended", [a, b], int_type(32), int_type(1))
        low, high = emit("arith.mulsi_extended", [a, b], int_type(32), int_type(32))
        from flydsl._mlir import ir

        index = one("arith.index_cast", [a], ir.IndexType.get())
        bare_index = one("arith.index_castui", [a], ir.IndexType.get())
        more = one("arith.addi", [index, bare_index], ir.IndexType.get())
        more = one("arith.index_cast", [more], int_type(64))
        more = one("arith.shrsi", [more, constant(1, 64)], int_type(64))
        out += [total, widened(carry), low, high, one("arith.trunci", [more], int_type(32))]
        picked = one("arith.select", [carry, a, b], int_type(32))
        return words_of([*out, picked])

    got, program = run_lanes("bits", body, rows, 10, **grid_for(len(rows)))
    has(program, "math.ctpop", "math.ctlz", "math.cttz", "math.absi", "arith.addui_extended",
        "arith.index_castui", "arith.select")  # fmt: skip
    for (a, b), line in zip(rows, got, strict=True):
        text = format(bare(a, 32), "032b")
        carry = bare(a, 32) + bare(b, 32) >> 32
        want = [text.count("1"), signed(abs(a), 32)]
        want += [32 - len(text.lstrip("0")), 32 - len(text.rstrip("0"))]
        want += [signed(a + b, 32), carry, signed(a * b, 32), a * b >> 32]
        want += [signed((a + bare(a, 32)) >> 1, 32), a if carry else b]
        assert line == want, (a, b)


# ---------------------------------------------------------------------- floats


@pytest.mark.parametrize("name", FLOATS)
def test_float_operations(name: str) -> None:
    form = FLOATS[name]
    some = float_values(form)
    rows = [[bits_of(a, name), bits_of(b, name)] for a in some for b in some]
    kinds = [k for k in FLOAT_OPS if k != "arith.remf"]

    def body(words: Any) -> Any:
        a, b = (as_float(w, name) for w in values(words))
        out = [float_word(one(kind, [a, b], float_type(name))) for kind in kinds]
        out.append(float_word(one("arith.negf", [a], float_type(name))))
        out.append(float_word(one("math.absf", [a], float_type(name))))
        out.append(float_word(one("math.fma", [a, b, a], float_type(name))))
        for p in range(1, 15):
            held = one("arith.cmpf", [a, b], int_type(1), predicate=f"{p} : i64")
            out.append(widened(held))
        return words_of(out)

    got, program = run_lanes(f"floats_{name}", body, rows, len(kinds) + 17, **grid_for(len(rows)))
    has(program, *kinds, "arith.negf", "math.absf", "math.fma", "arith.cmpf")
    for (p, q), line in zip(rows, got, strict=True):
        a, b = float_of(p, name), float_of(q, name)
        want = [FLOAT_OPS[k](a, b, form) for k in kinds]
        want += [-a, abs(a), exact_fma(a, b, a, form)]
        for value, exact in zip(line, want, strict=False):
            assert identical(float_of(value, name), exact), (a, b, float_of(value, name), exact)
        unordered = math.isnan(a) or math.isnan(b)
        for (_, rule, otherwise), value in zip(FLOAT_COMPARE[1:15], line[len(want) :], strict=True):
            assert value == int(otherwise if unordered else rule(a, b))


UNARY = {
    "math.sqrt": exact_sqrt, "math.rsqrt": exact_rsqrt, "math.exp2": exact_exp2,
    "math.log2": exact_log2, "rocdl.rcp": exact_rcp, "rocdl.rsq": exact_rsqrt,
    "rocdl.exp2": exact_exp2, "rocdl.log": exact_log2, "rocdl.sqrt": exact_sqrt,
}  # fmt: skip
CALLS = {
    "llvm.amdgcn.rcp.f32": exact_rcp, "llvm.amdgcn.rsq.f32": exact_rsqrt,
    "llvm.amdgcn.exp2.f32": exact_exp2, "llvm.exp2.f32": exact_exp2,
}  # fmt: skip


def test_functions_and_intrinsics() -> None:
    rng = random.Random(1)
    some = [*float_values(F32), *(rng.uniform(-130, 130) for _ in range(60))]
    some = [from_bits(f32_bits(v), F32) for v in some]
    rows = [[bits_of(v, "f32")] for v in some]

    def body(words: Any) -> Any:
        from flydsl._mlir.dialects import llvm

        x = as_float(values(words)[0], "f32")
        out = [one(kind, [x], float_type("f32")) for kind in UNARY]
        out += [llvm.call_intrinsic(float_type("f32"), name, [x], [], []) for name in CALLS]
        return words_of([float_word(v) for v in out])

    got, program = run_lanes("functions", body, rows, len(UNARY) + len(CALLS), block=128)
    has(program, *UNARY, *(f"llvm.call_intrinsic:{name}" for name in CALLS))
    for x, line in zip(some, got, strict=True):
        for kind, value, rule in zip([*UNARY, *CALLS], line, [*UNARY.values(), *CALLS.values()],
                                     strict=True):  # fmt: skip
            assert identical(float_of(value, "f32"), rule(x)), (kind, x)


def test_rounding_and_conversions() -> None:
    some = [v for v in float_values(F32) if abs(v) < 2.0**31 or math.isnan(v)]
    some += [0.5, 1.5, -2.5, 2.0**30 + 64, -7.9, 1e9]
    some = [from_bits(f32_bits(v), F32) for v in some]
    rows = [[bits_of(v, "f32"), signed(0x5A5A0000 + 77 * i, 32)] for i, v in enumerate(some)]
    roundings = ("floor", "ceil", "trunc", "round", "roundeven")

    def body(words: Any) -> Any:
        from flydsl._mlir.dialects import llvm

        word, n = values(words)
        x = as_float(word, "f32")
        out = [float_word(one(f"math.{k}", [x], float_type("f32"))) for k in roundings]
        out += [one("arith.fptosi", [x], int_type(32)), one("arith.fptoui", [x], int_type(32))]
        for name in ("f32", "f16", "bf16"):
            for kind in ("arith.sitofp", "arith.uitofp"):
                out.append(float_word(one(kind, [n], float_type(name))))
        for name in ("f16", "bf16"):
            small = one("arith.truncf", [x], float_type(name))
            out.append(float_word(one("arith.extf", [small], float_type("f32"))))
        near = one("arith.cmpi", [n, word], int_type(1), predicate="0 : i64")
        true = one("arith.constant", [], int_type(1), value="true")
        hint = llvm.call_intrinsic(int_type(1), "llvm.expect.i1", [near, true], [], [])
        out.append(one("arith.extsi", [hint], int_type(32)))
        return words_of(out)

    got, program = run_lanes("conversions", body, rows, 16)
    has(program, *(f"math.{k}" for k in roundings), "arith.fptosi", "arith.fptoui", "arith.sitofp",
        "arith.uitofp", "arith.truncf", "arith.extf", "arith.extsi",
        "llvm.call_intrinsic:llvm.expect.i1")  # fmt: skip
    rules = {
        "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "roundeven": round,
        "round": lambda v: math.trunc(v + math.copysign(0.5, v)) if abs(v) < 2**23 else v,
    }  # fmt: skip
    for x, (_, n), line in zip(some, rows, got, strict=True):
        for k, value in zip(roundings, line, strict=False):
            if abs(x) == math.nextafter(0.5, 0):
                continue
            want = x if math.isnan(x) else math.copysign(float(rules[k](x)), x)
            assert identical(float_of(value, "f32"), want), (k, x)
        whole = 0 if math.isnan(x) else math.trunc(x)
        assert line[5] == whole
        assert bare(line[6], 32) == max(whole, 0)
        place = 7
        for name in ("f32", "f16", "bf16"):
            for value in (n, bare(n, 32)):
                want = nearest(Fraction(value), FLOATS[name])
                assert identical(float_of(line[place], name), want), (name, value)
                place += 1
        for name in ("f16", "bf16"):
            want = x if math.isnan(x) else math.copysign(nearest(Fraction(x), FLOATS[name]), x)
            assert identical(float_of(line[place], "f32"), want), (name, x)
            place += 1
        assert line[15] == 0


# ---------------------------------------------------------------------- vectors


def test_vectors() -> None:
    rng = random.Random(2)
    rows = [[signed(rng.getrandbits(32), 32) for _ in range(4)] for _ in range(64)]

    def body(words: Any) -> Any:
        i32, bf16 = int_type(32), float_type("bf16")
        w = values(words)
        v4 = one("vector.from_elements", w, vector_type(4, i32))
        halves = one("vector.bitcast", [v4], vector_type(8, int_type(16)))
        picked = one("vector.extract", [halves], int_type(16), static_position="array<i64: 5>")
        wide = one("vector.bitcast", [v4], vector_type(2, int_type(64)))
        long = one("vector.extract", [wide], int_type(64), static_position="array<i64: 1>")
        high = one(
            "arith.trunci", [one("arith.shrui", [long, constant(32, 64)], int_type(64))], i32
        )
        mixed = one("vector.shuffle", [v4, v4], vector_type(4, i32), mask="array<i64: 3, 6, 1, 4>")
        placed = one("vector.insert", [w[0], mixed], mixed.type, static_position="array<i64: 2>")
        middle = one("vector.extract_strided_slice", [placed], vector_type(2, i32),
                     offsets="[1]", sizes="[2]", strides="[1]")  # fmt: skip
        back = one("vector.insert_strided_slice", [middle, v4], v4.type,
                   offsets="[2]", strides="[1]")  # fmt: skip
        out = [widened(picked), high]
        for i in range(4):
            out.append(one("vector.extract", [back], i32, static_position=f"array<i64: {i}>"))
        same = one("vector.broadcast", [w[1]], vector_type(4, i32))
        total = one("arith.addi", [same, v4], v4.type)
        out.append(one("vector.reduction", [total], i32, kind="#vector.kind<add>"))
        out.append(one("vector.reduction", [total], i32, kind="#vector.kind<maxui>"))
        from flydsl._mlir import ir

        where = one("arith.andi", [w[3], constant(3)], i32)
        where = one("arith.index_cast", [where], ir.IndexType.get())
        dynamic = "array<i64: -9223372036854775808>"
        out.append(one("vector.extract", [v4, where], i32, static_position=dynamic))
        limits = one(
            "arith.constant", [], v4.type, value="dense<[1, -2, 3, 2147483647]> : vector<4xi32>"
        )
        least = one("arith.minsi", [v4, limits], v4.type)
        out.append(one("vector.reduction", [least], i32, kind="#vector.kind<xor>"))
        pair = one("vector.bitcast", [one("vector.from_elements", w[:1], vector_type(1, i32))],
                   vector_type(2, bf16))  # fmt: skip
        up = one("arith.extf", [pair], vector_type(2, float_type("f32")))
        half = one("arith.constant", [], up.type, value="dense<5.0e-01> : vector<2xf32>")
        down = one("arith.truncf", [one("arith.mulf", [up, half], up.type)], pair.type)
        word = one("vector.bitcast", [down], vector_type(1, i32))
        out.append(one("vector.extract", [word], i32, static_position="array<i64: 0>"))
        return words_of(out)

    got, program = run_lanes("vectors", body, rows, 11)
    has(program, "vector.from_elements", "vector.bitcast", "vector.extract", "vector.shuffle",
        "vector.insert", "vector.extract_strided_slice", "vector.insert_strided_slice",
        "vector.broadcast", "vector.reduction")  # fmt: skip
    for row, line in zip(rows, got, strict=True):
        a, b, c, d = row
        mixed = [d, c, a, a]
        sums = [signed(v + b, 32) for v in row]
        least = [min(v, m) for v, m in zip(row, (1, -2, 3, 2147483647), strict=True)]
        halves = [scaled_half(bare(a, 32) >> s & 0xFFFF) for s in (0, 16)]
        want = [signed(c >> 16, 16), d, a, b, mixed[1], mixed[2], signed(sum(sums), 32)]
        want += [max(sums, key=lambda v: bare(v, 32)), row[d & 3]]
        want += [least[0] ^ least[1] ^ least[2] ^ least[3]]
        assert line[:10] == want
        assert all(
            identical(float_of(bare(line[10], 32) >> s, "bf16"), half)
            for s, half in zip((0, 16), halves, strict=True)
        )


def scaled_half(bits: int) -> float:
    """Half of a bf16, rounded to bf16."""
    x = float_of(bits, "bf16")
    if not math.isfinite(x) or x == 0:
        return x
    return math.copysign(nearest(Fraction(x) / 2, FLOATS["bf16"]), x)


# ---------------------------------------------------------------------- small floats and bytes


def test_fp8_conversions() -> None:
    rng = random.Random(3)
    some = [*float_values(F32), 448.0, 464.0, 465.0, 57344.0, 61440.0, 0.0009765625]
    some += [rng.uniform(-500, 500) for _ in range(100)]
    some = [from_bits(f32_bits(v), F32) for v in some if v == v]
    rows = [[bits_of(a, "f32"), bits_of(b, "f32"), signed(rng.getrandbits(32), 32)]
            for a, b in zip(some, some[::-1], strict=True)]  # fmt: skip

    def body(words: Any) -> Any:
        i32, f32 = int_type(32), float_type("f32")
        a, b = (as_float(w, "f32") for w in values(words)[:2])
        raw = values(words)[2]
        out = []
        for name in ENCODE:
            for word in ("false", "true"):
                out.append(one(f"rocdl.cvt.pk.{name}.f32", [a, b, raw], i32, wordSel=word))
        for name in ENCODE:
            for byte in range(4):
                got = one(f"rocdl.cvt.f32.{name}", [raw], f32, byteSel=f"{byte} : i32")
                out.append(float_word(got))
            pair = one(f"rocdl.cvt.pk.f32.{name}", [raw], vector_type(2, f32), wordSel="true")
            for i in range(2):
                place = f"array<i64: {i}>"
                out.append(float_word(one("vector.extract", [pair], f32, static_position=place)))
        return words_of(out)

    got, program = run_lanes("fp8", body, rows, 16, **grid_for(len(rows)))
    has(
        program, *(f"rocdl.cvt.pk.{n}.f32" for n in ENCODE), *(f"rocdl.cvt.f32.{n}" for n in ENCODE)
    )
    for (p, q, raw), line in zip(rows, got, strict=True):
        a, b = float_of(p, "f32"), float_of(q, "f32")
        for i, name in enumerate(ENCODE):
            half = ENCODE[name](a) | ENCODE[name](b) << 8
            assert bare(line[2 * i], 32) == bare(raw, 32) & 0xFFFF0000 | half
            assert bare(line[2 * i + 1], 32) == bare(raw, 32) & 0xFFFF | half << 16
            exact = [DECODE[name](bare(raw, 32) >> s & 0xFF) for s in (0, 8, 16, 24)]
            decoded = [float_of(v, "f32") for v in line[4 + 6 * i : 10 + 6 * i]]
            assert all(map(identical, decoded, [*exact, *exact[2:]]))


def test_packed_arithmetic() -> None:
    rng = random.Random(4)
    rows = []
    for _ in range(128):
        pairs = [bits_of(nearest(Fraction(rng.uniform(-9, 9)), FLOATS["bf16"]), "bf16")
                 for _ in range(4)]  # fmt: skip
        row = [
            pairs[0] | pairs[1] << 16,
            pairs[2] | pairs[3] << 16,
            bits_of(rng.uniform(-3, 3), "f32"),
        ]
        row.append(sum(rng.randrange(14) << s for s in (0, 8, 16, 24)))
        rows.append([signed(v, 32) for v in row])

    def body(words: Any) -> Any:
        from flydsl._mlir.dialects import llvm

        i32, f32 = int_type(32), float_type("f32")
        a, b, c, select = values(words)
        one_word = vector_type(1, i32)
        packed = [
            one("vector.bitcast", [one("vector.from_elements", [w], one_word)],
                vector_type(2, float_type("bf16")))
            for w in (a, b)
        ]  # fmt: skip
        dot = one("rocdl.fdot2.f32.bf16", [*packed, as_float(c, "f32")], f32, clamp="false")
        perm = llvm.call_intrinsic(i32, "llvm.amdgcn.perm", [a, b, select], [], [])
        rtz = one("rocdl.cvt.pkrtz", [as_float(c, "f32"), as_float(a, "f32")],
                  vector_type(2, float_type("f16")))  # fmt: skip
        rtz = one("vector.bitcast", [rtz], one_word)
        rtz = one("vector.extract", [rtz], i32, static_position="array<i64: 0>")
        low = one("rocdl.mbcnt.lo", [a, constant(0)], i32)
        count = one("rocdl.mbcnt.hi", [b, low], i32)
        return words_of([float_word(dot), perm, rtz, count])

    got, program = run_lanes("packed", body, rows, 4, block=128)
    has(program, "rocdl.fdot2.f32.bf16", "llvm.call_intrinsic:llvm.amdgcn.perm", "rocdl.cvt.pkrtz",
        "rocdl.mbcnt.lo", "rocdl.mbcnt.hi")  # fmt: skip
    for thread, ((a, b, c, select), line) in enumerate(zip(rows, got, strict=True)):
        x, y = ([float_of(bare(w, 32) >> s, "bf16") for s in (0, 16)] for w in (a, b))
        total = float_of(c, "f32")
        for i in range(2):
            total = nearest(Fraction(total) + Fraction(x[i]) * Fraction(y[i]), F32)
        assert identical(float_of(line[0], "f32"), total)
        assert line[1] == permute_bytes(a, b, select)
        for value, word in ((line[2] & 0xFFFF, c), (bare(line[2], 32) >> 16, a)):
            exact = float_of(word, "f32")
            assert abs(from_bits(value, F16)) <= abs(exact)
            away = from_bits(value + 1, F16)
            assert math.isinf(away) or abs(away) > abs(exact)
        lane = thread % 64
        below = bare(a, 32) & ((1 << min(lane, 32)) - 1)
        above = bare(b, 32) & ((1 << max(lane - 32, 0)) - 1)
        assert line[3] == below.bit_count() + above.bit_count()
