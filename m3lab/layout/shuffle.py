"""Byte orders that the kernels' operand loads expect, each with its inverse.

Every function is a pure permutation of bytes of the last two dimensions; leading dimensions (the
expert) are batch. Nothing here knows what the bytes mean. Source of the 16x16 weight layout and
of the scale order: aiter's weight and scale shuffles, as the specification's formats chapter has
them; the MXFP8 tiles are the f8f6f4 MFMA's own k order for 8-bit operands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROW_GROUP = 16  # rows of one MFMA operand
SCALE_ROWS = 32  # a scale dword covers two row groups
SCALE_COLS = 8  # and two 128-k chunks of 4 columns
PAD_SCALE = 0xFF  # NaN: a kernel that used a padding column would show it


def _check(t: Tensor, rows: int, cols: int, what: str) -> None:
    if t.dtype != torch.uint8:
        raise ValueError(f"{what} must be torch.uint8, got {t.dtype}")
    if t.dim() < 2 or t.shape[-2] % rows or t.shape[-1] % cols:
        raise ValueError(
            f"{what} must have rows in multiples of {rows} and columns in multiples of {cols}, "
            f"got {tuple(t.shape)}"
        )


def _permute(t: Tensor, split: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """View the last two dims as ``split`` (-1 for what follows), permute, give t's shape back."""
    lead = t.dim() - 2
    viewed = t.reshape(*t.shape[:-2], *split)
    dims = (*range(lead), *(lead + i for i in order))
    return viewed.permute(dims).reshape(t.shape)


def shuffle_weight(w: Tensor) -> Tensor:
    """The 16x16 layout of a byte table [..., N, K'], K' bytes a row.

    A 512-byte tile holds 16 rows x 32 bytes, and lane l = 16 g + r of a wave reads its 16 bytes
    at the tile pair's base + 16 l: row r, bytes 64 kc + 16 g .. + 16 of the pair kc.
    """
    _check(w, ROW_GROUP, 64, "a weight table")
    n, k = w.shape[-2:]
    return _permute(w, (n // 16, 16, k // 32, 2, 16), (0, 2, 3, 1, 4))


def unshuffle_weight(w: Tensor) -> Tensor:
    """The inverse of ``shuffle_weight``."""
    _check(w, ROW_GROUP, 64, "a weight table")
    n, k = w.shape[-2:]
    return _permute(w, (n // 16, k // 32, 2, 16, 16), (0, 3, 1, 2, 4))


def mxfp8_a_tiles(w: Tensor) -> Tensor:
    """Tiles of 16 rows x 128 k (2048 bytes) of an E4M3 table [..., N, K].

    Tile (row group) * (K/128) + chunk; lane slot 16 g + r of a tile holds row r's bytes
    k = 16 g .. + 16, then 64 + 16 g .. + 16.
    """
    _check(w, ROW_GROUP, 128, "an MXFP8 weight table")
    n, k = w.shape[-2:]
    return _permute(w, (n // 16, 16, k // 128, 2, 4, 16), (0, 2, 4, 1, 3, 5))


def mxfp8_a_untiles(w: Tensor) -> Tensor:
    """The inverse of ``mxfp8_a_tiles``."""
    _check(w, ROW_GROUP, 128, "an MXFP8 weight table")
    n, k = w.shape[-2:]
    return _permute(w, (n // 16, k // 128, 4, 16, 2, 16), (0, 3, 1, 4, 2, 5))


def padded_scale_cols(cols: int) -> int:
    """Columns of a scale table once padded to what the scale shuffle takes (12 -> 16)."""
    return -(-cols // SCALE_COLS) * SCALE_COLS


def pad_scale(s: Tensor) -> Tensor:
    """A scale table [..., rows, cols] with NaN columns up to a multiple of 8.

    Only the down projection of tp 8 (and small test models) needs it: 12 columns there.
    """
    return pad(s, (0, padded_scale_cols(s.shape[-1]) - s.shape[-1]), value=PAD_SCALE)


def shuffle_scale(s: Tensor) -> Tensor:
    """The scale order of an E8M0 table [..., rows, cols], one byte per 32 k, cols = K/32.

    Element (row, col) goes to byte ((((row//32) * (cols//8) + col//8) * 4 + col%4) * 16 + row%16)
    * 4 + 2 * ((col//4) % 2) + (row//16) % 2, so a lane's dword holds its scales of two chunks and
    two row groups.
    """
    _check(s, SCALE_ROWS, SCALE_COLS, "a scale table")
    rows, cols = s.shape[-2:]
    return _permute(s, (rows // 32, 2, 16, cols // 8, 2, 4), (0, 3, 5, 2, 4, 1))


def unshuffle_scale(s: Tensor) -> Tensor:
    """The inverse of ``shuffle_scale``."""
    _check(s, SCALE_ROWS, SCALE_COLS, "a scale table")
    rows, cols = s.shape[-2:]
    return _permute(s, (rows // 32, cols // 8, 4, 16, 2, 2), (0, 5, 3, 1, 4, 2))
