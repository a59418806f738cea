"""What a request has in its caches: keys, values and index keys, plain and quantized.

A ``KVContext`` is drawn block by block on demand, so that a context of a million keys costs only
the blocks somebody reads. The references read it as it is; ``m3lab.layout.kv_cache`` lays its
blocks out as kernels address them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from m3lab.model import synthetic
from m3lab.model.shapes import ModelShape

BLOCK_TOKENS = 128  # tokens of a sparse block, and of a cache block
HEAD_DIM = 128
# Keys and values are drawn with unit variance, as the QK norm leaves keys.
STATIC_SCALE = 1.0 / synthetic.E4M3_SIGMA


@dataclass(frozen=True)
class KVContext:
    """A request's cache content, plain: E4M3 bytes and fp32 scales, all kv heads of the model.

    ``length`` keys; a block's content is a function of (seed, request, block) alone, and the tail
    block is drawn whole, so a longer context of the same request starts with the same keys.
    ``static``: one scale per cache (``k_scale_static``, ``v_scale_static``) instead of one per
    key and head.
    """

    shape: ModelShape
    length: int
    seed: int = 0
    request: int = 0
    static: bool = False

    def __post_init__(self) -> None:
        synthetic.check_seed(self.seed)
        if not 1 <= self.length <= self.shape.max_context:
            raise ValueError(
                f"a context must have 1..{self.shape.max_context} keys, got {self.length}"
            )

    @property
    def blocks(self) -> int:
        """Blocks of 128 keys, the tail block included."""
        return -(-self.length // BLOCK_TOKENS)

    def valid(self, block: int) -> int:
        """Keys of ``block`` that the context holds: 128, fewer in the tail block."""
        self._check(block)
        return min(BLOCK_TOKENS, self.length - block * BLOCK_TOKENS)

    def k(self, block: int) -> Tensor:
        """uint8 E4M3 [128, kv_heads, 128] keys of a block."""
        return self._bytes("k", block)

    def v(self, block: int) -> Tensor:
        """uint8 E4M3 [128, kv_heads, 128] values of a block."""
        return self._bytes("v", block)

    def k_scale(self, block: int) -> Tensor:
        """fp32 [128, kv_heads] key scales of a block."""
        return self._scales("k", block)

    def v_scale(self, block: int) -> Tensor:
        """fp32 [128, kv_heads] value scales of a block."""
        return self._scales("v", block)

    def index_k(self, block: int) -> Tensor:
        """uint8 E4M3 [128, 128] index keys of a block, unit scale."""
        self._check(block)
        rng = synthetic.generator(self.seed, "index_k", self.request, block)
        return synthetic.e4m3_bytes(rng, (BLOCK_TOKENS, HEAD_DIM), sigma=1.0)

    @property
    def k_scale_static(self) -> float:
        return STATIC_SCALE

    @property
    def v_scale_static(self) -> float:
        return STATIC_SCALE

    def _bytes(self, name: str, block: int) -> Tensor:
        self._check(block)
        rng = synthetic.generator(self.seed, name, self.request, block)
        return synthetic.e4m3_bytes(rng, (BLOCK_TOKENS, self.shape.kv_heads, HEAD_DIM))

    def _scales(self, name: str, block: int) -> Tensor:
        self._check(block)
        if self.static:
            return torch.full((BLOCK_TOKENS, self.shape.kv_heads), STATIC_SCALE)
        rng = synthetic.generator(self.seed, f"{name}_scale", self.request, block)
        return synthetic.scales(rng, (BLOCK_TOKENS, self.shape.kv_heads), STATIC_SCALE)

    def _check(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise ValueError(f"block must be in 0..{self.blocks - 1}, got {block}")


def random_context(
    shape: ModelShape, length: int, *, seed: int = 0, request: int = 0, static: bool = False
) -> KVContext:
    """A request of ``length`` random keys (its step's own new tokens included)."""
    return KVContext(shape, length, seed, request, static)
