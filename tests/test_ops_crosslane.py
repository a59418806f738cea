"""Moves between lanes: each lane map spelled out lane by lane, results and source maps alike."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from lane_arithmetic import make_op, signed
from scalar_rules import DPP

from m3lab.interpreter.ops import CROSS
from m3lab.interpreter.ops.crosslane import MOVES

LANES = 64


def cross(
    kind: str, *operands: torch.Tensor, mask: torch.Tensor | None = None, **attrs: object
) -> tuple[object, torch.Tensor | None]:
    return CROSS[kind](make_op(kind, **attrs), *operands, mask=mask)


def lanes(values: list[int] | range, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype).reshape(1, 1, -1)


def some(c: int, w: int, seed: int = 0) -> torch.Tensor:
    """[c, w, 64] i32, all different."""
    order = list(range(c * w * LANES))
    random.Random(seed).shuffle(order)
    return torch.tensor(order, dtype=torch.int32).reshape(c, w, LANES)


def uniform(value: int) -> torch.Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.int32)


def check_map(got: object, source: torch.Tensor | None, x: torch.Tensor, want: list[int]) -> None:
    """Result and source map say the same: lane l read lane want[l]."""
    assert isinstance(got, torch.Tensor)
    assert source is not None
    assert source.expand(1, 1, LANES).flatten().tolist() == want
    for c in range(x.shape[0]):
        for w in range(x.shape[1]):
            row = x[c, w].tolist()
            assert got.expand(*x.shape[:2], LANES)[c, w].tolist() == [row[s] for s in want]


# ---------------------------------------------------------------------- shuffles


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16, 31, 32, 47, 63])
def test_shuffle_xor_reads_the_lane_with_those_bits_flipped(offset: int) -> None:
    x = some(2, 3)
    (got, valid), source = cross(
        "gpu.shuffle", x, uniform(offset), uniform(64), mode="#gpu<shuffle_mode xor>"
    )
    check_map(got, source, x, [lane ^ offset for lane in range(LANES)])
    assert bool(valid.all())


@pytest.mark.parametrize("width", [64, 32, 16])
@pytest.mark.parametrize("offset", [0, 1, 5, 15])
def test_shuffle_down_stops_at_the_group_s_end(offset: int, width: int) -> None:
    x = some(1, 2)
    (got, valid), source = cross(
        "gpu.shuffle", x, uniform(offset), uniform(width), mode="#gpu<shuffle_mode down>"
    )
    inside = [lane + offset < (lane // width + 1) * width for lane in range(LANES)]
    check_map(got, source, x, [lane + offset * ok for lane, ok in enumerate(inside)])
    assert valid.flatten().tolist() == inside


def test_shuffle_up_and_idx() -> None:
    x = some(1, 2)
    (got, _), source = cross(
        "gpu.shuffle", x, uniform(3), uniform(64), mode="#gpu<shuffle_mode up>"
    )
    check_map(got, source, x, [(lane - 3) % 64 for lane in range(LANES)])
    (got, _), source = cross(
        "gpu.shuffle", x, uniform(9), uniform(64), mode="#gpu<shuffle_mode idx>"
    )
    check_map(got, source, x, [9] * LANES)
    each = lanes([(7 * lane + 3) % 64 for lane in range(LANES)])
    (got, _), source = cross("gpu.shuffle", x, each, uniform(64), mode="#gpu<shuffle_mode idx>")
    check_map(got, source, x, each.flatten().tolist())


def test_shuffle_moves_floats_and_vectors_by_their_bits() -> None:
    x = torch.arange(LANES, dtype=torch.float32).reshape(1, 1, LANES)
    (got, _), _ = cross("gpu.shuffle", x, uniform(1), uniform(64), mode="xor")
    assert got.flatten().tolist() == [float(lane ^ 1) for lane in range(LANES)]
    pair = torch.stack((x, -x), -1)
    each = lanes([63 - lane for lane in range(LANES)]).expand(2, 1, LANES)
    (got, _), _ = cross("gpu.shuffle", pair, each, uniform(64), mode="idx")
    assert got.shape == (2, 1, LANES, 2)
    assert got[1, 0].tolist() == [[float(63 - n), -float(63 - n)] for n in range(LANES)]


def test_a_uniform_value_stays_one_lane_wide() -> None:
    (got, _), source = cross("gpu.shuffle", uniform(5), uniform(1), uniform(64), mode="xor")
    assert got.shape == (1, 1, 1)
    assert source is not None


# ---------------------------------------------------------------------- by address


def test_ds_bpermute_takes_a_byte_address_modulo_the_wave() -> None:
    x = some(2, 1)
    wanted = [(11 * lane + 5) % 64 for lane in range(LANES)]
    index = lanes([4 * s + 256 * (i % 3) + i % 4 for i, s in enumerate(wanted)])
    got, source = cross("rocdl.ds_bpermute", index, x)
    check_map(got, source, x, wanted)
    both = torch.stack((index, index.roll(1, 2)), 0).reshape(2, 1, LANES)
    got, _ = cross("rocdl.ds_bpermute", both, some(1, 1))
    row = some(1, 1).flatten().tolist()
    assert got[1, 0].tolist() == [row[wanted[lane - 1]] for lane in range(LANES)]
    assert MOVES["rocdl.ds_bpermute"] == (1,)


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        (0x041F, lambda low: low ^ 1),
        (0x401F, lambda low: low ^ 16),
        (0x7C1F, lambda low: low ^ 31),
        (0x0010, lambda low: low & 16),
        (0x00E3, lambda low: (low & 3) | 7),
        (0x2D55, lambda low: ((low & 21) | 10) ^ 11),
    ],
)
def test_ds_swizzle_bit_mode(pattern: int, rule: Callable[[int], int]) -> None:
    x = some(1, 2)
    got, source = cross("rocdl.ds_swizzle", x, uniform(pattern))
    check_map(got, source, x, [lane & 32 | rule(lane & 31) for lane in range(LANES)])


def test_ds_swizzle_quad_mode() -> None:
    x = some(1, 1)
    got, source = cross("rocdl.ds_swizzle", x, uniform(0x8000 | 0b01_11_10_00))
    picks = [0, 2, 3, 1]
    check_map(got, source, x, [lane & ~3 | picks[lane & 3] for lane in range(LANES)])


def test_readlane_gives_the_wave_one_lane_s_value() -> None:
    x = some(2, 2)
    got, source = cross("rocdl.readlane", x, uniform(17))
    assert got.shape == (2, 2, 1)
    check_map(got, source, x, [17] * LANES)
    per_wave = torch.tensor([3, 70], dtype=torch.int32).reshape(1, 2, 1)
    got, source = cross("rocdl.readlane", x, per_wave)
    assert got[1].flatten().tolist() == [int(x[1, 0, 3]), int(x[1, 1, 6])]
    assert source.flatten().tolist() == [3, 6]


def mask_of(rows: list[list[int]]) -> torch.Tensor:
    """One wave a row, the lanes named active: [1, waves, 64]."""
    return torch.tensor([[lane in row for lane in range(LANES)] for row in rows]).unsqueeze(0)


def test_readfirstlane_reads_the_first_active_lane() -> None:
    x = some(1, 3)
    mask = mask_of([[5, 9], list(range(LANES)), [63]])
    got, _ = cross("rocdl.readfirstlane", x, mask=mask)
    assert got.flatten().tolist() == [int(x[0, 0, 5]), int(x[0, 1, 0]), int(x[0, 2, 63])]
    got, _ = cross("rocdl.readfirstlane", x)
    assert got.flatten().tolist() == x[0, :, 0].tolist()
    by_cta = torch.tensor([True]).reshape(1, 1, 1)
    got, _ = cross("rocdl.readfirstlane", x, mask=by_cta)
    assert got.flatten().tolist() == x[0, :, 0].tolist()


def test_ballot_sets_the_bits_of_active_lanes_that_vote_yes() -> None:
    rng = random.Random(9)
    votes = [[rng.random() < 0.4 for _ in range(LANES)] for _ in range(4)]
    on = [[rng.random() < 0.7 for _ in range(LANES)] for _ in range(4)]
    predicate = torch.tensor(votes).reshape(2, 2, LANES)
    mask = torch.tensor(on).reshape(2, 2, LANES)
    got, _ = cross("rocdl.ballot", predicate, mask=mask)
    assert got.dtype == torch.int64
    assert got.shape == (2, 2, 1)
    want = [
        signed(sum(1 << i for i in range(LANES) if v[i] and o[i]), 64)
        for v, o in zip(votes, on, strict=True)
    ]
    assert got.flatten().tolist() == want
    got, _ = cross("rocdl.ballot", predicate)
    assert got.flatten().tolist() == [
        signed(sum(1 << i for i in range(LANES) if v[i]), 64) for v in votes
    ]


def test_ballot_of_a_uniform_vote() -> None:
    yes = torch.tensor([True, False]).reshape(2, 1, 1)
    got, _ = cross("rocdl.ballot", yes)
    assert got.flatten().tolist() == [-1, 0]
    got, _ = cross("rocdl.ballot", yes, mask=mask_of([[0, 3, 63]]))
    assert got.flatten().tolist() == [signed(1 | 8 | 1 << 63, 64), 0]


# ---------------------------------------------------------------------- DPP


@pytest.mark.parametrize(("control", "rule"), DPP, ids=[hex(c) for c, _ in DPP])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize(("row_mask", "bank_mask"), [(15, 15), (0xA, 15), (15, 0x5), (0x6, 0x3)])
def test_dpp_moves_by_its_control(
    control: int, rule: Callable[[int], int | None], bound: bool, row_mask: int, bank_mask: int
) -> None:
    x, old = some(1, 2), -1 - some(1, 2, seed=1)
    got, source = cross(
        "rocdl.update.dpp", old, x, dppCtrl=control, rowMask=row_mask, bankMask=bank_mask,
        boundCtrl=bound,
    )  # fmt: skip
    assert isinstance(got, torch.Tensor)
    assert source is not None
    for w in range(2):
        want, read = [], []
        for n in range(LANES):
            enabled = (row_mask >> (n // 16)) & 1 and (bank_mask >> (n % 16 // 4)) & 1
            s = rule(n)
            read.append(s if enabled and s is not None else n)
            if not enabled or (s is None and not bound):
                want.append(int(old[0, w, n]))
            else:
                want.append(0 if s is None else int(x[0, w, s]))
        assert got[0, w].tolist() == want
        assert source.flatten().tolist() == read


def test_the_dpp_intrinsic_has_its_immediates_as_operands() -> None:
    x, old = some(1, 1), uniform(-1)
    no = torch.zeros(1, 1, 1, dtype=torch.bool)
    args = (uniform(0x111), uniform(15), uniform(15), no)
    got, _ = cross("llvm.call_intrinsic:llvm.amdgcn.update.dpp.i32", old, x, *args)
    row = x.flatten().tolist()
    assert got.flatten().tolist() == [-1 if n % 16 == 0 else row[n - 1] for n in range(LANES)]
    got, _ = cross("llvm.call_intrinsic:llvm.amdgcn.mov.dpp.i32", x, *args)
    assert got.flatten().tolist() == [row[n] if n % 16 == 0 else row[n - 1] for n in range(LANES)]


def test_a_control_word_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="0x110"):
        cross("rocdl.update.dpp", some(1, 1), some(1, 1), dppCtrl=0x110, rowMask=15, bankMask=15,
              boundCtrl=True)  # fmt: skip


# ---------------------------------------------------------------------- permlane swaps


@pytest.mark.parametrize(("half", "kind"), [(16, "permlane16"), (32, "permlane32")])
def test_permlane_swap_exchanges_odd_groups_with_even_ones(half: int, kind: str) -> None:
    a, b = some(2, 1), -1 - some(1, 3, seed=1)
    (first, second), source = cross(f"rocdl.{kind}.swap", a, b, fi=False, boundControl=False)
    assert first.shape == second.shape == (2, 3, LANES)
    for c in range(2):
        for w in range(3):
            x, y = a[c, 0].tolist(), b[0, w].tolist()
            swapped_x, swapped_y = list(x), list(y)
            for n in range(LANES):
                if n // half % 2:
                    swapped_x[n], swapped_y[n - half] = y[n - half], x[n]
            assert first[c, w].tolist() == swapped_x
            assert second[c, w].tolist() == swapped_y
    assert source.flatten().tolist() == [n ^ half for n in range(LANES)]


def test_permlane_swap_of_uniform_values() -> None:
    (first, second), _ = cross("rocdl.permlane32.swap", uniform(1), uniform(2))
    assert first.flatten().tolist() == [1] * 32 + [2] * 32
    assert second.flatten().tolist() == [1] * 32 + [2] * 32


def test_every_cross_lane_kind_says_which_operands_move() -> None:
    assert set(MOVES) == set(CROSS)
