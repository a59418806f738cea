"""Traced kernels across the lanes of a wave: shuffles, DPP, swaps, ballots, matrix instructions.

Each lane map and each matrix layout is the one written out lane by lane in the rules, reached here
through FlyDSL, its passes, the lowering and the machine.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("flydsl")

import flydsl.expr as fx
from flykernels import (
    constant,
    emit,
    float_type,
    int_type,
    one,
    run_lanes,
    values,
    vector_type,
    widened,
    words_of,
)
from lane_arithmetic import f32_bits, signed
from matrix_rules import (
    CODECS,
    HALF,
    LANES,
    PLAIN,
    Codec,
    multiply,
    packed,
    scaled_side,
    small_accumulators,
    tensor_of,
)
from scalar_rules import DPP

from m3lab.interpreter import InterpreterError, PartialMask
from m3lab.kernels.device import gfx950

Row = list[int]


def random_rows(n: int, words: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    return [[signed(rng.getrandbits(32), 32) for _ in range(words)] for _ in range(n)]


def by_wave(rows: list[Row], place: int) -> list[Row]:
    """Column ``place`` as one list of 64 a wave."""
    column = [r[place] for r in rows]
    return [column[i : i + LANES] for i in range(0, len(column), LANES)]


# ---------------------------------------------------------------------- moves

XOR = (1, 2, 3, 7, 8, 15, 16, 31, 32, 47, 63)


def shuffled(word: Any, mode: str, offset: Any, width: int = 64) -> list[Any]:
    return emit("gpu.shuffle", [word, offset, constant(width)], word.type, int_type(1),
                mode=f"#gpu<shuffle_mode {mode}>")  # fmt: skip


def test_shuffles_read_the_lanes_that_they_name() -> None:
    rows = random_rows(256, 1, 1)
    for row in rows:
        row.append(random.Random(row[0]).randrange(64))

    def body(words: Any) -> Any:
        word, index = values(words)
        out = [shuffled(word, "xor", constant(offset))[0] for offset in XOR]
        got, valid = shuffled(word, "down", constant(5), 32)
        out += [got, widened(valid)]
        out.append(shuffled(word, "idx", constant(9))[0])
        out.append(shuffled(word, "idx", index)[0])
        address = one("arith.muli", [index, constant(4)], int_type(32))
        out.append(one("rocdl.ds_bpermute", [address, word], int_type(32)))
        out.append(one("rocdl.ds_swizzle", [word, constant(0x401F)], int_type(32)))
        out.append(one("rocdl.ds_swizzle", [word, constant(0x8000 | 0x1B)], int_type(32)))
        return words_of(out)

    got, program = run_lanes("shuffles", body, rows, len(XOR) + 7, block=128, grid=2)
    assert {"gpu.shuffle", "rocdl.ds_bpermute", "rocdl.ds_swizzle"} <= set(program.kinds())
    for t, line in enumerate(got):
        wave = [r[0] for r in rows[t // 64 * 64 : t // 64 * 64 + 64]]
        lane, index = t % 64, rows[t][1]
        want = [wave[lane ^ offset] for offset in XOR]
        inside = lane % 32 + 5 < 32
        want += [wave[lane + 5 * inside], int(inside), wave[9], wave[index], wave[index]]
        want += [wave[lane ^ 16], wave[lane ^ 3]]
        assert line == want


def test_dpp_moves_by_every_control() -> None:
    rows = random_rows(128, 2, 2)
    masks = ((15, 15, True), (15, 15, False), (0xA, 0x7, False), (0x5, 0xE, True))

    def body(words: Any) -> Any:
        old, word = values(words)
        out = []
        for i, (control, _) in enumerate(DPP):
            row_mask, bank_mask, bound = masks[i % 4]
            out.append(
                one("rocdl.update.dpp", [old, word], int_type(32), dppCtrl=f"{control} : i32",
                    rowMask=f"{row_mask} : i32", bankMask=f"{bank_mask} : i32",
                    boundCtrl="true" if bound else "false")
            )  # fmt: skip
        return words_of(out)

    got, program = run_lanes("dpp", body, rows, len(DPP), block=128)
    assert program.kinds()["rocdl.update.dpp"] == len(DPP)
    for i, (control, rule) in enumerate(DPP):
        row_mask, bank_mask, bound = masks[i % 4]
        for t, line in enumerate(got):
            lane, first = t % 64, t // 64 * 64
            source = rule(lane)
            on = row_mask >> lane // 16 & bank_mask >> lane % 16 // 4 & 1
            if on and source is not None:
                want = rows[first + source][1]
            else:
                want = 0 if on and bound else rows[t][0]
            assert line[i] == want, (hex(control), lane)


def test_the_dpp_intrinsic_and_the_kernels_own_moves() -> None:
    rows = random_rows(64, 1, 3)

    def body(words: Any) -> Any:
        pairs = [*gfx950.swap_rows(words[0]), *gfx950.swap_halves(words[0])]
        return [*(gfx950.xor_in_row(words[0], n) for n in range(1, 16)), *pairs]

    got, program = run_lanes("moves", body, rows, 19)
    assert "llvm.call_intrinsic:llvm.amdgcn.update.dpp.i32" in program.kinds()
    wave = [r[0] for r in rows]
    for lane, line in enumerate(got):
        assert line[:15] == [wave[lane ^ n] for n in range(1, 16)]
        assert line[15:] == [wave[lane & ~16], wave[lane | 16], wave[lane & ~32], wave[lane | 32]]


def test_permlane_swaps_of_two_values() -> None:
    rows = random_rows(128, 2, 4)

    def body(words: Any) -> Any:
        from flydsl._mlir import ir

        pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
        out = []
        for kind in ("rocdl.permlane16.swap", "rocdl.permlane32.swap"):
            got = one(kind, values(words), pair, fi="false", boundControl="false")
            for i in range(2):
                place = f"array<i64: {i}>"
                out.append(one("llvm.extractvalue", [got], int_type(32), position=place))
        return words_of(out)

    got, program = run_lanes("swaps", body, rows, 4, block=128)
    assert {"rocdl.permlane16.swap", "llvm.extractvalue"} <= set(program.kinds())
    for t, line in enumerate(got):
        for i, half in enumerate((16, 32)):
            odd = bool(t % 64 & half)
            first = rows[t - half][1] if odd else rows[t][0]
            second = rows[t][1] if odd else rows[t + half][0]
            assert line[2 * i : 2 * i + 2] == [first, second]


def test_readlane_and_ballot_speak_for_the_wave() -> None:
    rows = random_rows(256, 1, 5)

    def body(words: Any) -> Any:
        (word,) = values(words)
        i32 = int_type(32)
        negative = one("arith.cmpi", [word, constant(0)], int_type(1), predicate="2 : i64")
        votes = one("rocdl.ballot", [negative], int_type(64))
        high = one("arith.shrui", [votes, constant(32, 64)], int_type(64))
        out = [one("rocdl.readlane", [word, constant(n)], i32) for n in (0, 17, 63)]
        out.append(one("rocdl.readfirstlane", [word], i32))
        out += [one("arith.trunci", [v], i32) for v in (votes, high)]
        return words_of(out)

    got, _ = run_lanes("votes", body, rows, 6, block=256)
    for w, wave in enumerate(by_wave(rows, 0)):
        votes = sum(1 << i for i, v in enumerate(wave) if v < 0)
        want = [wave[0], wave[17], wave[63], wave[0], signed(votes, 32), signed(votes >> 32, 32)]
        assert all(line == want for line in got[64 * w : 64 * w + 64])


# ---------------------------------------------------------------------- under a mask


@gfx950.traced
def in_a_branch(word: Any, limit: int) -> Any:
    """In lanes below ``limit`` of each 64: the first lane's word and the low half of the ballot."""
    first, votes = fx.Int32(-1), fx.Int32(-1)
    if (word & 63) < limit:
        first = gfx950.uniform(word)
        held = fx.rocdl.ballot(fx.typing.T.i64, (word & 64) != 0)
        votes = fx.Int32(fx.Int64(held))
    return first, votes


def test_a_branch_s_first_lane_and_ballot_are_those_of_its_active_lanes() -> None:
    # the low six bits of a word decide who is active: a different set a wave
    rows = [[(t * 37 + t // 64 * 11) % 64 + 64 * (t % 5)] for t in range(256)]

    def body(words: Any) -> Any:
        return list(in_a_branch(words[0], 20))

    got, program = run_lanes("masked", body, rows, 2, block=256)
    assert "scf.if" in program.kinds()
    for w, wave in enumerate(by_wave(rows, 0)):
        active = [i for i, v in enumerate(wave) if v & 63 < 20]
        votes = sum(1 << i for i in active if wave[i] & 64)
        for i, line in enumerate(got[64 * w : 64 * w + 64]):
            want = [wave[active[0]], signed(votes, 32)] if i in active else [-1, -1]
            assert line == want


@gfx950.traced
def neighbour_in_a_branch(word: Any, lane: Any, limit: int) -> Any:
    """Lanes below ``limit`` read their xor-1 neighbour."""
    got = word
    if lane < limit:
        got = gfx950.xor_in_row(word, 1)
    return got


def test_lanes_of_a_branch_may_read_each_other() -> None:
    rows = random_rows(64, 1, 6)

    def body(words: Any) -> Any:
        return [neighbour_in_a_branch(words[0], fx.thread_idx.x % 64, 20)]

    got, _ = run_lanes("narrow", body, rows, 1)
    want = [rows[i ^ 1 if i < 20 else i][0] for i in range(64)]
    assert [line[0] for line in got] == want


def test_what_an_inactive_lane_gives_may_not_be_stored() -> None:
    def body(words: Any) -> Any:
        return [neighbour_in_a_branch(words[0], fx.thread_idx.x % 64, 21)]  # lane 20 reads lane 21

    with pytest.raises(InterpreterError, match="lane 20"):
        run_lanes("off_lane", body, random_rows(64, 1, 7), 1)


# ---------------------------------------------------------------------- matrix instructions


def words_by_lane(*operands: torch.Tensor) -> list[Row]:
    """Operands [1, 1, 64(, n)] as rows of words."""
    flat = []
    for x in operands:
        full = x.expand(1, 1, LANES, *x.shape[3:])
        full = full.unsqueeze(-1) if full.dim() == 3 else full
        flat.append(full.contiguous().view(torch.int32).reshape(LANES, -1))
    return torch.cat(flat, 1).tolist()


def vector_of(words: list[Any], element: Any, n: int) -> Any:
    """Words as a vector of ``n`` elements (0: one scalar)."""
    whole = one("vector.from_elements", words, vector_type(len(words), int_type(32)))
    cast = one("vector.bitcast", [whole], vector_type(max(n, 1), element))
    if n:
        return cast
    return one("vector.extract", [cast], element, static_position="array<i64: 0>")


def result_words(value: Any, n: int) -> list[Any]:
    cast = one("vector.bitcast", [value], vector_type(n, int_type(32)))
    return [
        one("vector.extract", [cast], int_type(32), static_position=f"array<i64: {i}>")
        for i in range(n)
    ]


NO_BROADCAST = {"cbsz": "0 : i32", "abid": "0 : i32", "blgp": "#rocdl<mfma_perm_b none>"}


def matrix_kernel(kind: str, operand: Any, n_words: int, n: int, integer: bool, size: int) -> Any:
    """A body: words of A, of B and of C to D."""

    def body(words: Any) -> Any:
        w = values(words)
        a, b = (vector_of(part, operand(), n) for part in (w[:n_words], w[n_words : 2 * n_words]))
        c_type = int_type(32) if integer else float_type("f32")
        c = vector_of(w[2 * n_words :], c_type, size)
        d = one(kind, [a, b, c], vector_type(size, c_type), **NO_BROADCAST)
        return words_of(result_words(d, size))

    return body


def same_accumulators(got: list[Row], want: list[float], integer: bool) -> bool:
    flat = [v for line in got for v in line]
    return flat == [int(v) if integer else signed(f32_bits(v), 32) for v in want]


@pytest.mark.parametrize(
    ("name", "rows", "share", "codec_a", "codec_b", "dtype", "n"), PLAIN, ids=[p[0] for p in PLAIN]
)
def test_eight_bit_matrix_instruction(
    name: str, rows: int, share: int, codec_a: Codec, codec_b: Codec, dtype: torch.dtype, n: int
) -> None:
    rng = random.Random(name)
    sides, matrices = [], []
    for codec in (codec_a, codec_b):
        codes = [[rng.choice(codec.whole()) for _ in range(share)] for _ in range(LANES)]
        sides.append(tensor_of([packed(c, 8) for c in codes], dtype, n))
        matrices.append(
            {
                (lane % rows, share * (lane // rows) + i): codec.value(code)
                for lane in range(LANES)
                for i, code in enumerate(codes[lane])
            }
        )
    c = small_accumulators(rng, rows)
    integer = name.startswith("i32")
    given = torch.tensor(c).to(torch.int32 if integer else torch.float32).reshape(1, 1, LANES, -1)
    element = (lambda: int_type(64)) if n == 0 else (lambda: int_type(32))
    body = matrix_kernel(f"rocdl.mfma.{name}", element, share // 4, n, integer, len(c[0]))
    got, program = run_lanes("matrix8", body, words_by_lane(*sides, given), len(c[0]))
    assert f"rocdl.mfma.{name}" in program.kinds()
    assert same_accumulators(got, multiply(*matrices, c, rows, share * LANES // rows), integer)


@pytest.mark.parametrize(("name", "rows", "share", "dtype"), HALF, ids=[h[0] for h in HALF])
def test_sixteen_bit_matrix_instruction(
    name: str, rows: int, share: int, dtype: torch.dtype
) -> None:
    rng = random.Random(name)
    sides, matrices = [], []
    for _ in range(2):
        some = [[float(rng.randrange(-8, 9)) for _ in range(share)] for _ in range(LANES)]
        sides.append(torch.tensor(some, dtype=dtype).reshape(1, 1, LANES, share))
        matrices.append(
            {
                (lane % rows, share * (lane // rows) + i): v
                for lane in range(LANES)
                for i, v in enumerate(some[lane])
            }
        )
    c = small_accumulators(rng, rows)
    given = torch.tensor(c).reshape(1, 1, LANES, -1)

    def element() -> Any:
        return int_type(16) if name.endswith("1k") else float_type(
            "bf16" if dtype == torch.bfloat16 else "f16"
        )  # fmt: skip

    body = matrix_kernel(f"rocdl.mfma.{name}", element, share // 2, share, False, len(c[0]))
    got, program = run_lanes("matrix16", body, words_by_lane(*sides, given), len(c[0]))
    assert f"rocdl.mfma.{name}" in program.kinds()
    assert same_accumulators(got, multiply(*matrices, c, rows, share * LANES // rows), False)


PAIRS = [(a, b, 16) for a in CODECS for b in CODECS] + [
    ("fp4_e2m1", "fp8_e4m3", 32), ("fp8_e5m2", "fp6_e2m3", 32), ("fp6_e3m2", "fp4_e2m1", 32),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "rows"), PAIRS)
def test_scaled_matrix_instruction(a: str, b: str, rows: int) -> None:
    rng = random.Random(f"{a}{b}{rows}")
    depth = 32 * LANES // rows
    kind = f"rocdl.mfma.scale.f32.{rows}x{rows}x{depth}.f8f6f4"
    left, scale_a, matrix_a = scaled_side(rng, a, rows, whole=True)
    right, scale_b, matrix_b = scaled_side(rng, b, rows, whole=True)
    c = small_accumulators(rng, rows)
    size = len(c[0])
    given = torch.tensor(c).reshape(1, 1, LANES, -1)
    split = [left.shape[-1], left.shape[-1] + right.shape[-1]]

    def body(words: Any) -> Any:
        w = values(words)
        i32, f32 = int_type(32), float_type("f32")
        x = vector_of(w[: split[0]], i32, split[0])
        y = vector_of(w[split[0] : split[1]], i32, split[1] - split[0])
        z = vector_of(w[split[1] : split[1] + size], f32, size)
        d = one(kind, [x, y, z, w[-2], w[-1]], vector_type(size, f32),
                cbsz=f"#rocdl<matrix_format {a}>", blgp=f"#rocdl<matrix_format {b}>",
                opselA="2 : i32", opselB="2 : i32")  # fmt: skip
        return words_of(result_words(d, size))

    rows_in = words_by_lane(left, right, given, scale_a, scale_b)
    got, program = run_lanes("scaled", body, rows_in, size)
    assert kind in program.kinds()
    assert same_accumulators(got, multiply(matrix_a, matrix_b, c, rows, depth), False)


@gfx950.traced
def matrix_in_a_branch(a: Any, b: Any, c: Any, lane: Any) -> Any:
    d = c
    if lane < 32:
        d = gfx950.mfma_fp8(a, b, c)
    return d


def test_a_matrix_instruction_needs_all_its_lanes() -> None:
    def body(words: Any) -> Any:
        a = fx.Int64(words[0])
        c = fx.Vector.filled(4, 0.0, fx.Float32)
        d = matrix_in_a_branch(a, a, c, fx.thread_idx.x % 64)
        return [gfx950.bitcast_i32(d[i]) for i in range(4)]

    with pytest.raises(PartialMask, match="mfma"):
        run_lanes("half_matrix", body, random_rows(64, 1, 8), 4)
