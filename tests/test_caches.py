"""Cached bytes lie where kernels look for them, and the rows of a step point at them."""

from dataclasses import replace

import pytest
import torch

from m3lab.interpreter.memory import BASE, Memory
from m3lab.layout import kv_cache as c
from m3lab.model.context import random_context
from m3lab.model.formats import e4m3_decode
from m3lab.model.shapes import CacheLayout, ModelShape, RankShape

MODEL = ModelShape()
STRIDES = (8, 16)


@pytest.fixture
def memory() -> Memory:
    return Memory(capacity=1 << 24)


def byte_at(memory: Memory, addr: int, dtype: torch.dtype = torch.uint8) -> object:
    """The value at a device address, by arithmetic on addresses as a kernel does it."""
    n = dtype.itemsize
    return memory.data[addr - BASE : addr - BASE + n].view(dtype)[0]


def written(memory: Memory, addr: int, n: int = 1) -> bool:
    return bool((memory.defined[addr - BASE : addr - BASE + n] == 0xFF).all())


# --------------------------------------------------------------------------------- KVContext


def test_a_blocks_content_depends_on_seed_request_and_block_alone():
    ctx = random_context(MODEL, 300, seed=1, request=2)
    longer = replace(ctx, length=1 << 20)
    assert torch.equal(ctx.k(2), longer.k(2))
    assert torch.equal(ctx.v_scale(1), longer.v_scale(1))
    assert torch.equal(ctx.index_k(0), longer.index_k(0))
    for other in (replace(ctx, seed=2), replace(ctx, request=3)):
        assert not torch.equal(ctx.k(0), other.k(0))
        assert not torch.equal(ctx.index_k(0), other.index_k(0))
    assert not torch.equal(ctx.k(0), ctx.k(1))
    assert not torch.equal(ctx.k(0), ctx.v(0))


def test_keys_have_unit_variance_and_no_nan():
    ctx = random_context(MODEL, 1 << 20)
    k = e4m3_decode(ctx.k(8191)) * ctx.k_scale(8191)[..., None]
    assert k.shape == (128, 4, 128)
    assert k.std() == pytest.approx(1.0, abs=0.15)
    assert bool(k.isfinite().all())
    assert e4m3_decode(ctx.index_k(5000)).std() == pytest.approx(1.0, abs=0.05)


def test_a_static_context_has_one_scale():
    ctx = random_context(MODEL, 200, static=True)
    assert bool((ctx.k_scale(1) == ctx.k_scale_static).all())
    assert ctx.v_scale(0).unique().tolist() == pytest.approx([ctx.v_scale_static])


@pytest.mark.parametrize(("length", "blocks", "tail"), [(1, 1, 1), (128, 1, 128), (129, 2, 1)])
def test_the_tail_block_holds_what_is_left(length, blocks, tail):
    ctx = random_context(MODEL, length)
    assert ctx.blocks == blocks
    assert ctx.valid(blocks - 1) == tail
    with pytest.raises(ValueError, match=rf"block must be in 0\.\.{blocks - 1}, got {blocks}"):
        ctx.k(blocks)


@pytest.mark.parametrize("length", [0, -1, (1 << 20) + 1])
def test_a_context_out_of_range_is_refused(length):
    with pytest.raises(ValueError, match=r"1\.\.1048576 keys, got"):
        random_context(MODEL, length)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be a non-negative integer, got -1"):
        random_context(MODEL, 1, seed=-1)


# ------------------------------------------------------------------------------- PagedCaches


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 2), (8, 5)])
def test_a_kernel_finds_every_byte_where_its_address_formula_says(memory, tp, rank, stride):
    shape = RankShape(tp=tp)
    cache = c.PagedCaches(shape, CacheLayout(stride), memory, rank, n_blocks=6)
    ctx = random_context(MODEL, 384, seed=3)
    cache.fill(ctx, [0, 2], [4, 1])
    heads, gen = shape.kv_heads, torch.Generator().manual_seed(0)
    for block, block_id in ((0, 4), (2, 1)):
        k, v, index = ctx.k(block), ctx.v(block), ctx.index_k(block)
        for _ in range(200):
            token, h, dim = (int(torch.randint(n, (1,), generator=gen)) for n in (128, heads, 128))
            model_head = list(shape.kv_range(rank))[h]
            page, t = block_id * stride + token // 16, token % 16
            # the split's addresses: K page [dim/16][token][dim%16], V page [dim][token]
            at = (page * heads + h) * 2048
            k_byte = byte_at(memory, cache.k_addr + at + (dim // 16) * 256 + t * 16 + dim % 16)
            assert k_byte == k[token, model_head, dim]
            assert byte_at(memory, cache.v_addr + at + dim * 16 + t) == v[token, model_head, dim]
            word = 4 * ((page * heads + h) * 16 + t)
            k_scale = byte_at(memory, cache.k_scale_addr + word, torch.float32)
            v_scale = byte_at(memory, cache.v_scale_addr + word, torch.float32)
            assert k_scale == ctx.k_scale(block)[token, model_head]
            assert v_scale == ctx.v_scale(block)[token, model_head]
            i_byte = byte_at(memory, cache.index_addr + (block_id * 128 + token) * 128 + dim)
            assert i_byte == index[token, dim]


def test_stride_16_puts_a_blocks_v_pages_behind_its_k_pages(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(16), memory, 0, n_blocks=3)
    assert cache.v_addr - cache.k_addr == 8 * 2048
    assert cache.v_scale_addr - cache.k_scale_addr == 8 * 16 * 4
    last_v_page = cache.v_addr + (2 * 16 + 7) * 2048
    assert memory.at(last_v_page + 2047 - BASE) is memory.at(cache.k_addr - BASE)
    assert memory.at(last_v_page + 2048 - BASE) is None


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("static", [False, True])
def test_reading_a_block_gives_back_what_filled_it(memory, stride, static):
    shape = RankShape(tp=2)
    cache = c.PagedCaches(shape, CacheLayout(stride, static), memory, 1, n_blocks=4)
    ctx = random_context(MODEL, 256, static=static)
    cache.fill(ctx, [1], [3])
    block = cache.read_block(3)
    assert torch.equal(block.k, ctx.k(1)[:, 2:])
    assert torch.equal(block.v, ctx.v(1)[:, 2:])
    assert torch.equal(block.k_scale, ctx.k_scale(1)[:, 2:])
    assert torch.equal(block.v_scale, ctx.v_scale(1)[:, 2:])
    assert torch.equal(block.index_k, ctx.index_k(1))


@pytest.mark.parametrize("tail", [1, 15, 16, 37, 127])
@pytest.mark.parametrize("stride", STRIDES)
def test_only_the_tails_valid_keys_are_written(memory, tail, stride):
    cache = c.PagedCaches(RankShape(), CacheLayout(stride), memory, 0, n_blocks=3)
    cache.fill(random_context(MODEL, 128 + tail), [1], [2])
    for token in range(128):
        page, t = 2 * stride + token // 16, token % 16
        valid = token < tail
        for dim in (0, 16, 127):
            k = cache.k_addr + page * 2048 + (dim // 16) * 256 + t * 16 + dim % 16
            assert written(memory, k) == valid
            assert written(memory, cache.v_addr + page * 2048 + dim * 16 + t) == valid
        assert written(memory, cache.k_scale_addr + 4 * (page * 16 + t), 4) == valid
        assert written(memory, cache.v_scale_addr + 4 * (page * 16 + t), 4) == valid
        assert written(memory, cache.index_addr + (2 * 128 + token) * 128, 128) == valid
    block = cache.read_block(2)
    ctx = random_context(MODEL, 128 + tail)
    assert torch.equal(block.v[:tail], ctx.v(1)[:tail, :1])
    assert torch.equal(block.k[:tail], ctx.k(1)[:tail, :1])


def test_nothing_is_written_outside_the_named_blocks(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(8), memory, 0, n_blocks=3)
    cache.fill(random_context(MODEL, 128), [0], [1])
    for block_id in (0, 2):
        assert not bool(memory.defined[cache.k_addr - BASE + block_id * 16384 :][:16384].any())
        assert not bool(memory.defined[cache.v_addr - BASE + block_id * 16384 :][:16384].any())


def test_poison_makes_the_tails_other_keys_nan(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(8), memory, 0, n_blocks=2)
    cache.fill(random_context(MODEL, 20), [0], [1], poison=0xFF)
    block = cache.read_block(1)
    for part in (block.k, block.v, block.index_k):
        assert bool((part[20:] == 0xFF).all())
        assert not bool((part[:20] == 0xFF).any())
    assert bool(block.v_scale[20:].isnan().all())
    assert bool(block.k_scale[:20].isfinite().all())


def test_a_step_can_write_its_own_token_into_a_started_block(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(16), memory, 0, n_blocks=2)
    ctx = random_context(MODEL, 128)
    cache.fill(replace(ctx, length=50), [0], [1])
    cache.write_kv(
        1,
        ctx.k(0)[50:53, :1],
        ctx.v(0)[50:53, :1],
        ctx.k_scale(0)[50:53, :1],
        ctx.v_scale(0)[50:53, :1],
        first=50,
    )
    cache.write_index(1, ctx.index_k(0)[50:53], first=50)
    block = cache.read_block(1)
    assert torch.equal(block.k[:53], ctx.k(0)[:53, :1])
    assert torch.equal(block.v[:53], ctx.v(0)[:53, :1])
    assert torch.equal(block.v_scale[:53], ctx.v_scale(0)[:53, :1])
    assert torch.equal(block.index_k[:53], ctx.index_k(0)[:53])
    assert not written(memory, cache.index_addr + (128 + 53) * 128)


def test_two_ranks_of_tp_8_hold_the_same_kv_head(memory):
    shape, layout = RankShape(tp=8), CacheLayout(8)
    ctx = random_context(MODEL, 128)
    blocks = []
    for rank in (4, 5, 6):
        cache = c.PagedCaches(shape, layout, memory, rank, n_blocks=1)
        cache.fill(ctx, [0], [0])
        blocks.append(cache.read_block(0).k)
    assert torch.equal(blocks[0], blocks[1])
    assert not torch.equal(blocks[1], blocks[2])


def test_a_static_cache_refuses_a_second_scale(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(8, True), memory, 0, n_blocks=2)
    cache.fill(random_context(MODEL, 128, static=True), [0], [0])
    kv = torch.zeros(1, 1, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match="one scale per cache"):
        cache.write_kv(1, kv, kv, torch.ones(1, 1), torch.ones(1, 1))


def test_what_does_not_fit_is_refused(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(8), memory, 0, n_blocks=2)
    ctx = random_context(MODEL, 256)
    with pytest.raises(ValueError, match=r"block id must be in 0\.\.1, got 2"):
        cache.fill(ctx, [0], [2])
    with pytest.raises(ValueError, match="needs one block id, got 2 and 1"):
        cache.fill(ctx, [0, 1], [0])
    with pytest.raises(ValueError, match="static False"):
        cache.fill(replace(ctx, static=True), [0], [0])
    kv, scale = torch.zeros(2, 1, 128, dtype=torch.uint8), torch.ones(2, 1)
    with pytest.raises(ValueError, match="at most 128 keys"):
        cache.write_kv(0, kv, kv, scale, scale, first=127)
    with pytest.raises(ValueError, match="at least one block"):
        c.PagedCaches(RankShape(), CacheLayout(8), memory, 0, n_blocks=0)
    with pytest.raises(ValueError, match="32-bit offsets"):
        c.PagedCaches(RankShape(), CacheLayout(16), memory, 0, n_blocks=(1 << 17) + 1)


def test_freed_caches_stay_freed(memory):
    cache = c.PagedCaches(RankShape(), CacheLayout(16), memory, 0, n_blocks=2)
    cache.free()
    cache.free()
    with pytest.raises(ValueError, match="was freed"):
        cache.read_block(0)


# --------------------------------------------------------------------------------- decode rows
