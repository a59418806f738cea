"""Each shuffle against its scalar definition, as a lane of the kernel addresses it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3lab.layout import shuffle as sh

PAIRS = {
    "weight": (sh.shuffle_weight, sh.unshuffle_weight, 16, 64),
    "tiles": (sh.mxfp8_a_tiles, sh.mxfp8_a_untiles, 16, 128),
    "scale": (sh.shuffle_scale, sh.unshuffle_scale, 32, 8),
}


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5), k=st.integers(1, 5), batch=st.lists(st.integers(1, 3), max_size=2))
def test_a_shuffle_and_its_inverse_give_random_bytes_back(name, n, k, batch):
    forward, backward, rows, cols = PAIRS[name]
    table = random_bytes(*batch, n * rows, k * cols)
    shuffled = forward(table)
    assert shuffled.shape == table.shape
    assert torch.equal(backward(shuffled), table)
    assert torch.equal(forward(backward(table)), table)
    assert torch.equal(shuffled.flatten().sort().values, table.flatten().sort().values)


def test_a_lane_finds_its_16_bytes_of_an_e4m3_row():
    n, k = 48, 256
    w = random_bytes(n, k)
    flat = sh.shuffle_weight(w).flatten()
    for rg in range(n // 16):
        for kc in range(k // 64):
            base = (rg * (k // 32) + kc * 2) * 512  # stage o's address of 64-k chunk kc
            for lane in range(64):
                g, r = divmod(lane, 16)
                want = w[16 * rg + r, 64 * kc + 16 * g : 64 * kc + 16 * g + 16]
                assert torch.equal(flat[base + 16 * lane : base + 16 * lane + 16], want)


def test_a_lane_finds_its_32_elements_of_a_packed_e2m1_row():
    n, k = 32, 512  # k elements, k / 2 bytes
    code = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    flat = sh.shuffle_weight(code[:, 0::2] | code[:, 1::2] << 4).flatten()
    for rg in range(n // 16):
        for kc in range(k // 128):
            base = (rg * (k // 64) + kc * 2) * 512  # w_tile's address of 128-k chunk kc
            for lane in range(64):
                g, r = divmod(lane, 16)
                got = flat[base + 16 * lane : base + 16 * lane + 16]
                low = code[16 * rg + r, 128 * kc + 32 * g : 128 * kc + 32 * g + 32 : 2]
                assert torch.equal(got & 0xF, low)
                high = code[16 * rg + r, 128 * kc + 32 * g + 1 : 128 * kc + 32 * g + 32 : 2]
                assert torch.equal(got >> 4, high)


def test_a_lane_slot_of_an_mxfp8_tile_holds_both_its_k_runs():
    n, k = 32, 384
    w = random_bytes(n, k)
    flat = sh.mxfp8_a_tiles(w).flatten()
    for rg in range(n // 16):
        for chunk in range(k // 128):
            base = (rg * (k // 128) + chunk) * 2048
            for slot in range(64):
                g, r = divmod(slot, 16)
                row = w[16 * rg + r, 128 * chunk : 128 * chunk + 128]
                want = torch.cat([row[16 * g : 16 * g + 16], row[64 + 16 * g : 80 + 16 * g]])
                assert torch.equal(flat[base + 32 * slot : base + 32 * slot + 32], want)


def test_a_scale_goes_where_the_index_formula_says():
    rows, cols = 96, 24
    s = random_bytes(rows, cols)
    flat = sh.shuffle_scale(s).flatten()
    for row in range(rows):
        for col in range(cols):
            at = (((row // 32) * (cols // 8) + col // 8) * 4 + col % 4) * 16 + row % 16
            at = at * 4 + 2 * ((col // 4) % 2) + (row // 16) % 2
            assert flat[at] == s[row, col]


def test_a_lane_finds_its_scale_in_an_experts_table():
    experts, rows, cols = 3, 64, 16
    s = random_bytes(experts, rows, cols)
    flat = sh.shuffle_scale(s).flatten()
    for expert in range(experts):
        for rg in range(rows // 16):
            for kc in range(cols // 4):
                base = (expert * (rows // 32) + rg // 2) * (cols // 8) + kc // 2
                for lane in range(64):
                    g, r = divmod(lane, 16)
                    byte = (base * 64 + lane) * 4 + (kc % 2) * 2 + rg % 2
                    assert flat[byte] == s[expert, 16 * rg + r, 4 * kc + g]


@pytest.mark.parametrize(("cols", "padded"), [(4, 8), (8, 8), (12, 16), (24, 24)])
def test_scale_columns_are_padded_with_nan_to_a_multiple_of_8(cols, padded):
    s = random_bytes(2, 32, cols)
    wide = sh.pad_scale(s)
    assert wide.shape == (2, 32, padded)
    assert sh.padded_scale_cols(cols) == padded
    assert torch.equal(wide[..., :cols], s)
    assert bool((wide[..., cols:] == 0xFF).all())


@pytest.mark.parametrize("name", PAIRS)
def test_a_table_that_does_not_tile_is_refused(name):
    forward, backward, rows, cols = PAIRS[name]
    for f in (forward, backward):
        with pytest.raises(ValueError, match="in multiples of"):
            f(random_bytes(rows + 8, cols))
        with pytest.raises(ValueError, match="in multiples of"):
            f(random_bytes(rows, cols + 4))
        with pytest.raises(ValueError, match=r"torch\.uint8"):
            f(torch.zeros(rows, cols))
