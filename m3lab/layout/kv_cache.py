"""Paged K, V and index caches as kernels address them.

``PagedCaches`` writes a request's plain blocks (``m3lab.model.context``) into pages: the references
read the context, the kernels the pages, both are the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3lab.layout.buffers import Allocation, Memory
from m3lab.model.context import BLOCK_TOKENS, HEAD_DIM, KVContext
from m3lab.model.shapes import PAGE_TOKENS, CacheLayout, RankShape

BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
DIM_GROUP = 16  # consecutive dims that lie together in a K page
PAGE_BYTES = PAGE_TOKENS * HEAD_DIM  # of one kv head
MAX_VIEW_BYTES = 1 << 32  # kernels address a cache with unsigned 32-bit byte offsets
NAN_BYTE = 0xFF  # a NaN in E4M3, and in fp32 when all four bytes are


# -------------------------------------------------------------------------------------- the pages


def k_pages(k: Tensor) -> Tensor:
    """uint8 [128, heads, 128] keys -> a block's 8 K pages [8, heads, 8 groups, 16 tokens, 16]."""
    pages = k.unflatten(2, (-1, DIM_GROUP)).unflatten(0, (BLOCK_PAGES, PAGE_TOKENS))
    return pages.permute(0, 2, 3, 1, 4).contiguous()


def k_unpages(pages: Tensor) -> Tensor:
    """The inverse of ``k_pages``."""
    return pages.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(2)


def v_pages(v: Tensor) -> Tensor:
    """uint8 [128, heads, 128] values -> a block's 8 V pages [8, heads, 128 dims, 16 tokens]."""
    return v.unflatten(0, (BLOCK_PAGES, PAGE_TOKENS)).permute(0, 2, 3, 1).contiguous()


def v_unpages(pages: Tensor) -> Tensor:
    """The inverse of ``v_pages``."""
    return pages.permute(0, 3, 1, 2).flatten(0, 1).contiguous()


def scale_pages(scale: Tensor) -> Tensor:
    """fp32 [128, heads] scales -> a block's 8 pages [8, heads, 16 tokens]."""
    return scale.unflatten(0, (BLOCK_PAGES, PAGE_TOKENS)).permute(0, 2, 1).contiguous()


def scale_unpages(pages: Tensor) -> Tensor:
    """The inverse of ``scale_pages``."""
    return pages.permute(0, 2, 1).flatten(0, 1).contiguous()


@dataclass
class CacheBlock:
    """A cache block's content, plain, of one rank's kv heads.

    ``k``, ``v`` uint8 [128, heads, 128]; ``k_scale``, ``v_scale`` fp32 [128, heads] (the one
    scale everywhere in a static cache); ``index_k`` uint8 [128, 128].
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    index_k: Tensor


class PagedCaches:
    """One rank's K, V, scale and index caches of ``n_blocks`` blocks, as kernels address them.

    Block id p covers page ids p * stride + 0..7. With stride 8 K and V have planes of their own;
    with stride 16 they share one allocation, a block's 8 K pages then its 8 V pages, and the V
    view starts 8 pages in. A page id's bytes are [kv heads][2048]; scales [kv heads][16] fp32
    lie by page id alike, gaps included, or are one fp32 per cache. Nothing is written until a
    ``fill``. Page 0 must be finite before padding rows (zero block-table rows) may run.
    """

    def __init__(
        self,
        shape: RankShape,
        layout: CacheLayout,
        memory: Memory,
        rank: int,
        n_blocks: int,
    ) -> None:
        if n_blocks < 1:
            raise ValueError(f"a cache needs at least one block, got {n_blocks}")
        self.shape, self.layout, self.rank, self.n_blocks = shape, layout, rank, n_blocks
        self.heads = shape.kv_heads
        self._page = self.heads * PAGE_BYTES  # bytes from one page id to the next
        self._scale_page = self.heads * PAGE_TOKENS * 4  # and of the scales
        view = n_blocks * layout.page_stride * self._page
        if view > MAX_VIEW_BYTES:
            raise ValueError(
                f"a cache view must be at most {MAX_VIEW_BYTES} bytes (32-bit offsets), "
                f"got {view} for {n_blocks} blocks"
            )
        self._allocations: list[Allocation] = []
        self._memory = memory
        try:
            self._k, self._v, self._v_at = self._planes("cache", self._page)
            if layout.static_scale:
                self._ks, self._vs, self._vs_at = self._static_scales()
            else:
                self._ks, self._vs, self._vs_at = self._planes("scale", self._scale_page)
            self._index = self._alloc("index_cache", n_blocks * BLOCK_TOKENS * HEAD_DIM)
        except BaseException:
            self.free()
            raise
        self._static: tuple[float, float] | None = None

    def _alloc(self, name: str, nbytes: int) -> Allocation:
        allocation = self._memory.alloc(name, nbytes, rank=self.rank)
        self._allocations.append(allocation)
        return allocation

    def _planes(self, name: str, page: int) -> tuple[Allocation, Allocation, int]:
        """(K's allocation, V's allocation, where V's view starts in it)."""
        nbytes = self.n_blocks * self.layout.page_stride * page
        if self.layout.page_stride == BLOCK_PAGES:
            return self._alloc(f"k_{name}", nbytes), self._alloc(f"v_{name}", nbytes), 0
        both = self._alloc(f"kv_{name}", nbytes)
        return both, both, BLOCK_PAGES * page

    def _static_scales(self) -> tuple[Allocation, Allocation, int]:
        return self._alloc("k_scale", 4), self._alloc("v_scale", 4), 0

    @property
    def k_addr(self) -> int:
        return self._k.addr

    @property
    def v_addr(self) -> int:
        return self._v.addr + self._v_at

    @property
    def k_scale_addr(self) -> int:
        return self._ks.addr

    @property
    def v_scale_addr(self) -> int:
        return self._vs.addr + self._vs_at

    @property
    def index_addr(self) -> int:
        return self._index.addr

    def fill(
        self,
        ctx: KVContext,
        blocks: Sequence[int],
        block_ids: Sequence[int],
        *,
        parts: Sequence[str] = ("kv", "index"),
        poison: int | None = None,
    ) -> None:
        """Write the context's ``blocks`` into the cache blocks ``block_ids``.

        Of the tail block only the valid keys are written; ``poison`` (a byte; 0xFF makes NaNs)
        also writes the rest. ``parts``: "kv" (keys, values and scales), "index" (index keys).
        """
        if len(blocks) != len(block_ids):
            raise ValueError(
                f"every block needs one block id, got {len(blocks)} and {len(block_ids)}"
            )
        if ctx.static != self.layout.static_scale:
            raise ValueError(
                f"the context's scales must be as the cache's (static {self.layout.static_scale}),"
                f" got static {ctx.static}"
            )
        kv = self.shape.kv_range(self.rank)
        for block, block_id in zip(blocks, block_ids, strict=True):
            n = ctx.valid(block)
            if "kv" in parts:
                self.write_kv(
                    block_id,
                    ctx.k(block)[:n, kv.start : kv.stop],
                    ctx.v(block)[:n, kv.start : kv.stop],
                    ctx.k_scale(block)[:n, kv.start : kv.stop],
                    ctx.v_scale(block)[:n, kv.start : kv.stop],
                    poison=poison,
                )
            if "index" in parts:
                self.write_index(block_id, ctx.index_k(block)[:n], poison=poison)

    def write_kv(
        self,
        block_id: int,
        k: Tensor,
        v: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        *,
        first: int = 0,
        poison: int | None = None,
    ) -> None:
        """Write keys ``first`` .. of a block: k, v uint8 [n, heads, 128], scales fp32 [n, heads].

        A static cache takes its one scale from ``k_scale[0, 0]`` and ``v_scale[0, 0]``.
        """
        self._check_block(block_id)
        n = k.shape[0]
        want = (n, self.heads, HEAD_DIM)
        if tuple(k.shape) != want or tuple(v.shape) != want or n + first > BLOCK_TOKENS:
            raise ValueError(
                f"a block takes at most {BLOCK_TOKENS} keys [n, {self.heads}, {HEAD_DIM}], "
                f"got {tuple(k.shape)} and {tuple(v.shape)} from key {first}"
            )
        if n == 0:
            return
        if self.layout.static_scale:
            self._write_static(float(k_scale[0, 0]), float(v_scale[0, 0]))
        byte = torch.tensor([poison or 0], dtype=torch.uint8)
        k, v = (_padded(t, first, byte) for t in (k, v))
        scale = byte.repeat(4).view(torch.float32)
        k_scale, v_scale = (_padded(t.float(), first, scale) for t in (k_scale, v_scale))
        if poison is not None:
            first, n = 0, BLOCK_TOKENS
        self._write_pages(self._k, block_id, 0, k_pages(k), first, n)
        self._write_pages(self._v, block_id, self._v_at, v_pages(v), first, n)
        if not self.layout.static_scale:
            self._write_pages(self._ks, block_id, 0, scale_pages(k_scale), first, n)
            self._write_pages(self._vs, block_id, self._vs_at, scale_pages(v_scale), first, n)

    def _write_pages(
        self,
        allocation: Allocation,
        block_id: int,
        start: int,
        pages: Tensor,
        first: int,
        count: int,
    ) -> None:
        """Write tokens ``first`` .. + ``count`` of a block's 8 ``pages``.

        Whole pages go together, a partial page run by run, so that bytes of tokens that are not
        written stay as they are. A page is [..., 16 tokens, bytes of a token's run].
        """
        page_bytes = pages[0].numel() * pages.element_size()
        base = start + block_id * self.layout.page_stride * page_bytes
        runs = _token_runs(pages)
        run_bytes = page_bytes // runs.shape[1]
        for p in range(first // PAGE_TOKENS, -(-(first + count) // PAGE_TOKENS)):
            lo = max(first - p * PAGE_TOKENS, 0)
            hi = min(first + count - p * PAGE_TOKENS, PAGE_TOKENS)
            if (lo, hi) == (0, PAGE_TOKENS):
                allocation.write(pages[p], base + p * page_bytes)
                continue
            for i in range(runs.shape[1]):
                at = i * run_bytes + lo * run_bytes // PAGE_TOKENS
                allocation.write(runs[p, i, lo:hi], base + p * page_bytes + at)

    def _write_static(self, k_scale: float, v_scale: float) -> None:
        if self._static not in (None, (k_scale, v_scale)):
            raise ValueError(
                f"a static cache has one scale per cache, {self._static}, got {(k_scale, v_scale)}"
            )
        self._static = (k_scale, v_scale)
        self._ks.write(torch.tensor([k_scale], dtype=torch.float32))
        self._vs.write(torch.tensor([v_scale], dtype=torch.float32))

    def write_index(
        self, block_id: int, index_k: Tensor, *, first: int = 0, poison: int | None = None
    ) -> None:
        """Write index keys ``first`` .. of a block: uint8 [n, 128]."""
        self._check_block(block_id)
        n = index_k.shape[0]
        if tuple(index_k.shape) != (n, HEAD_DIM) or n + first > BLOCK_TOKENS:
            raise ValueError(
                f"a block takes at most {BLOCK_TOKENS} index keys [n, {HEAD_DIM}], "
                f"got {tuple(index_k.shape)} from key {first}"
            )
        if poison is not None:
            index_k = _padded(index_k, first, torch.tensor([poison], dtype=torch.uint8))
            first = 0
        self._index.write(index_k, (block_id * BLOCK_TOKENS + first) * HEAD_DIM)

    def read_block(self, block_id: int) -> CacheBlock:
        """A block's content, unpaged: what a host sees of what a kernel inserted."""
        self._check_block(block_id)
        heads, page = self.heads, block_id * self.layout.page_stride
        kv = (BLOCK_PAGES, heads, HEAD_DIM // DIM_GROUP, PAGE_TOKENS, DIM_GROUP)
        k = self._k.read(torch.uint8, kv, page * self._page)
        v = self._v.read(
            torch.uint8,
            (BLOCK_PAGES, heads, HEAD_DIM, PAGE_TOKENS),
            self._v_at + page * self._page,
        )
        index = self._index.read(
            torch.uint8, (BLOCK_TOKENS, HEAD_DIM), block_id * BLOCK_TOKENS * HEAD_DIM
        )
        k_scale = self._read_scale(self._ks, page * self._scale_page)
        v_scale = self._read_scale(self._vs, self._vs_at + page * self._scale_page)
        return CacheBlock(k_unpages(k), v_unpages(v), k_scale, v_scale, index)

    def _read_scale(self, allocation: Allocation, offset: int) -> Tensor:
        if self.layout.static_scale:
            return allocation.read(torch.float32, (1,)).expand(BLOCK_TOKENS, self.heads)
        shape = (BLOCK_PAGES, self.heads, PAGE_TOKENS)
        return scale_unpages(allocation.read(torch.float32, shape, offset))

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.n_blocks:
            raise ValueError(f"block id must be in 0..{self.n_blocks - 1}, got {block_id}")

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        for allocation in self._allocations:
            allocation.free()


def _token_runs(pages: Tensor) -> Tensor:
    """Any kind of pages as [8, runs, 16 tokens, elements of a token in a run]."""
    if pages.dim() == 5:  # K: a run per head and group of dims
        return pages.flatten(1, 2)
    return pages.flatten(1, -2).unsqueeze(-1)  # V: per head and dim; scales: per head


def _padded(t: Tensor, first: int, value: Tensor) -> Tensor:
    """``t`` [n, ...] at rows ``first`` .. of a whole block whose other rows hold ``value``."""
    whole = value.to(t.dtype).expand(BLOCK_TOKENS, *t.shape[1:]).clone()
    whole[first : first + t.shape[0]] = t
    return whole
