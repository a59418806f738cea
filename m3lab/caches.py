"""Paged K, V and index caches, what a request has in them, and the step's rows over them.

``KVContext`` is a request's keys, plain and quantized, drawn block by block on demand, so that a
context of a million keys costs only the blocks somebody reads. ``PagedCaches`` lays blocks out as
kernels address them; ``decode_rows`` makes block tables, lengths, positions and slots. The
references read the context, the kernels the pages: both are the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from m3lab import draws
from m3lab.memory import Allocation, Memory
from m3lab.shapes import MAX_TOKENS, PAGE_TOKENS, CacheLayout, ModelShape, RankShape

BLOCK_TOKENS = 128  # tokens of a sparse block, and of a cache block
BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
HEAD_DIM = 128
DIM_GROUP = 16  # consecutive dims that lie together in a K page
PAGE_BYTES = PAGE_TOKENS * HEAD_DIM  # of one kv head
MAX_VIEW_BYTES = 1 << 32  # kernels address a cache with unsigned 32-bit byte offsets
NAN_BYTE = 0xFF  # a NaN in E4M3, and in fp32 when all four bytes are

# Keys and values are drawn with unit variance, as the QK norm leaves keys.
STATIC_SCALE = 1.0 / draws.E4M3_SIGMA


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
        draws.check_seed(self.seed)
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
        rng = draws.generator(self.seed, "index_k", self.request, block)
        return draws.e4m3_bytes(rng, (BLOCK_TOKENS, HEAD_DIM), sigma=1.0)

    @property
    def k_scale_static(self) -> float:
        return STATIC_SCALE

    @property
    def v_scale_static(self) -> float:
        return STATIC_SCALE

    def _bytes(self, name: str, block: int) -> Tensor:
        self._check(block)
        rng = draws.generator(self.seed, name, self.request, block)
        return draws.e4m3_bytes(rng, (BLOCK_TOKENS, self.shape.kv_heads, HEAD_DIM))

    def _scales(self, name: str, block: int) -> Tensor:
        self._check(block)
        if self.static:
            return torch.full((BLOCK_TOKENS, self.shape.kv_heads), STATIC_SCALE)
        rng = draws.generator(self.seed, f"{name}_scale", self.request, block)
        return draws.scales(rng, (BLOCK_TOKENS, self.shape.kv_heads), STATIC_SCALE)

    def _check(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise ValueError(f"block must be in 0..{self.blocks - 1}, got {block}")


def random_context(
    shape: ModelShape, length: int, *, seed: int = 0, request: int = 0, static: bool = False
) -> KVContext:
    """A request of ``length`` random keys (its step's own new tokens included)."""
    return KVContext(shape, length, seed, request, static)


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


# ----------------------------------------------------------------------------------- a step's rows


@dataclass
class DecodeRows:
    """Per-row integers of a step, as kernels take them.

    ``block_table`` int32 [tokens, width] of block ids; ``seq_lens`` int32 [tokens], the keys that
    row sees; ``positions`` int64 [tokens] of the row's own token; ``slots`` int64 [tokens], where
    its key goes. A padding row has length 0, a zero table row, position 0 and slot -1.
    """

    block_table: Tensor
    seq_lens: Tensor
    positions: Tensor
    slots: Tensor


def slot_of(block_ids: Sequence[int], position: int) -> int:
    """block id * 128 + token in block of a request's ``position``."""
    return block_ids[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


def decode_rows(
    contexts: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    *,
    q_len: int = 1,
    tokens: int | None = None,
    width: int | None = None,
) -> DecodeRows:
    """The rows of requests with ``contexts`` keys each (own new tokens included), in order.

    Row j of a request of ``q_len`` rows sees n - (q_len - 1 - j) of its n keys. ``block_ids``: a
    request's cache blocks, at least ceil(n / 128). Rows up to ``tokens`` are padding.
    """
    rows = len(contexts) * q_len
    tokens = rows if tokens is None else tokens
    if q_len < 1 or not rows <= tokens <= MAX_TOKENS or tokens % q_len or tokens < 1:
        raise ValueError(
            f"a step has 1..{MAX_TOKENS} rows in multiples of q_len and at least {rows} for its "
            f"requests, got {tokens} with q_len {q_len}"
        )
    if len(block_ids) != len(contexts):
        raise ValueError(
            f"every request needs its block ids, got {len(block_ids)} for {len(contexts)}"
        )
    needed = [-(-n // BLOCK_TOKENS) for n in contexts]
    width = max([1, *needed]) if width is None else width
    out = DecodeRows(
        torch.zeros(tokens, width, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
        torch.full((tokens,), -1, dtype=torch.int64),
    )
    for i, (n, ids) in enumerate(zip(contexts, block_ids, strict=True)):
        if n < q_len:
            raise ValueError(f"a context counts its {q_len} new tokens, got {n}")
        if len(ids) < needed[i] or needed[i] > width:
            raise ValueError(
                f"request {i} has {needed[i]} blocks, got {len(ids)} block ids and "
                f"{width} table columns"
            )
        for j in range(q_len):
            row, seen = i * q_len + j, n - (q_len - 1 - j)
            out.block_table[row, : needed[i]] = torch.tensor(ids[: needed[i]], dtype=torch.int32)
            out.seq_lens[row] = seen
            out.positions[row] = seen - 1
            out.slots[row] = slot_of(ids, seen - 1)
    return out


def assign_blocks(contexts: Sequence[int], n_blocks: int, seed: int = 0) -> list[list[int]]:
    """Distinct shuffled block ids for requests of ``contexts`` keys; id 0 stays the padding's."""
    needed = [-(-n // BLOCK_TOKENS) for n in contexts]
    if sum(needed) > n_blocks - 1:
        raise ValueError(
            f"the requests need {sum(needed)} blocks besides block 0, the cache has {n_blocks}"
        )
    order = draws.generator(seed, "blocks").permutation(n_blocks - 1) + 1
    ids, start = [], 0
    for n in needed:
        ids.append([int(b) for b in order[start : start + n]])
        start += n
    return ids
