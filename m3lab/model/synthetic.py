"""Random quantized tensors, each a pure function of an integer key.

Bytes are drawn straight from the distribution that quantizing normal values gives, so that a
full-size layer costs a second, not a minute; any part can be drawn alone, in any order. Nothing
here is a quantizer: that is ``formats``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from m3lab.model.formats import e2m1_encode, e2m1_pack, e4m3_encode

E4M3_SIGMA = 104.0  # of 448: a quantized row's largest value is some 4.3 sigma
E2M1_SIGMA = 2.0  # of 6: the largest of a block's 32 is some 2.1 sigma, and rounds to 4 or 6


def check_seed(seed: int) -> int:
    """``seed`` where it is a non-negative integer, else ValueError."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")
    return seed


def generator(seed: int, name: str, *key: int) -> np.random.Generator:
    """The stream of the tensor ``name``'s part ``key`` under ``seed``."""
    sequence = np.random.SeedSequence([check_seed(seed), crc32(name.encode()), *key])
    return np.random.Generator(np.random.SFC64(sequence))


def _normal_quantiles(bits: int) -> Tensor:
    """fp32 [2^bits] midpoints' quantiles of the standard normal distribution."""
    p = (torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits)
    return torch.special.ndtri(p).float()


@lru_cache(maxsize=8)
def _e4m3_table(sigma: float) -> np.ndarray:
    return e4m3_encode(_normal_quantiles(16) * sigma, saturate=True).numpy()


@lru_cache(maxsize=1)
def _e2m1_table() -> np.ndarray:
    code = e2m1_encode(_normal_quantiles(8) * E2M1_SIGMA)
    low, high = code[None, :].expand(256, 256), code[:, None].expand(256, 256)
    return e2m1_pack(torch.stack((low, high), dim=-1)).flatten().numpy()


def _looked_up(table: np.ndarray, rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """One table byte per random 16-bit word."""
    n = int(np.prod(shape))
    words = rng.integers(0, 1 << 64, -(-n // 4), dtype=np.uint64).view(np.uint16)[:n]
    return torch.from_numpy(table[words]).reshape(tuple(shape))


def e4m3_bytes(rng: np.random.Generator, shape: Sequence[int], sigma: float = E4M3_SIGMA) -> Tensor:
    """E4M3 bytes of ``shape``, normal with standard deviation ``sigma``; never NaN."""
    return _looked_up(_e4m3_table(sigma), rng, shape)


def e2m1_bytes(rng: np.random.Generator, shape: Sequence[int]) -> Tensor:
    """Packed E2M1 bytes of ``shape``, elements normal with standard deviation 2."""
    return _looked_up(_e2m1_table(), rng, shape)


def scales(rng: np.random.Generator, shape: Sequence[int], mean: float) -> Tensor:
    """fp32 scales of ``shape`` around ``mean``, log-uniform within a factor of 1.5."""
    spread = rng.uniform(-1, 1, tuple(shape)).astype(np.float32)
    return torch.from_numpy(mean * np.float32(1.5) ** spread).float()


def scale_bytes(rng: np.random.Generator, shape: Sequence[int], mean: float) -> Tensor:
    """E8M0 bytes of ``shape``: the power of two below ``mean``, or half or twice that."""
    middle = 127 + int(np.floor(np.log2(mean)))
    return torch.from_numpy(rng.integers(middle - 1, middle + 2, tuple(shape), dtype=np.uint8))


def normal(rng: np.random.Generator, shape: Sequence[int], sigma: float = 1.0) -> Tensor:
    """fp32 normal values of ``shape``."""
    return torch.from_numpy(rng.standard_normal(tuple(shape), dtype=np.float32)) * sigma
