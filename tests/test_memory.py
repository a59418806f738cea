"""Regions hold what was published under their tag, and buffers free once."""

import pytest
import torch

from m3lab.interpreter.memory import Memory
from m3lab.layout import buffers as mm
from m3lab.model.shapes import ModelShape, RankShape

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512, max_context=1 << 16), 4)


@pytest.fixture
def memory() -> Memory:
    return Memory(capacity=1 << 24)


@pytest.fixture
def scratch(memory: Memory) -> mm.Scratch:
    return mm.Scratch(SMALL, memory)


def test_nothing_is_published_in_fresh_scratch(scratch):
    values, mask = scratch.view("sp_m", step=0, layer=0)
    assert values.shape == (16, 8, 16)
    assert not bool(mask.any())
    assert bool(values.isnan().all())


def test_a_put_is_seen_under_its_own_step_and_layer_only(scratch):
    scores = torch.randn(40)
    scratch.put("iscore", 3, scores, step=5, layer=7)
    values, mask = scratch.view("iscore", step=5, layer=7)
    assert torch.equal(values[3, 0, :40], scores)
    assert mask.sum() == 40
    assert bool(mask[3, 0, :40].all())
    for step, layer in ((5, 6), (4, 7), (6, 7)):
        assert not bool(scratch.view("iscore", step=step, layer=layer)[1].any())


def test_a_pair_lies_as_value_word_then_tag_word(memory, scratch):
    scratch.put("sp_l", (2, 1, 4), torch.tensor([1.5]), step=9, layer=3)
    region = scratch.region("sp_l")
    at = region.offset + 8 * ((2 * 8 + 1) * 16 + 4)
    raw = memory.at(scratch.addr - memory_base(memory)).read(torch.int32, (2,), at)
    assert raw.tolist() == [torch.tensor(1.5).view(torch.int32).item(), 9 * 128 + 3 + 1]


def memory_base(memory: Memory) -> int:
    probe = memory.alloc("probe", 16)
    return probe.addr - probe.offset


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("sp_o", (16, 8, 16, 128), torch.bfloat16),
        ("a", (16, 2048), torch.bfloat16),
        ("xn8", (16, 2048), torch.uint8),
        ("scores", (8, 16, 128, 2), torch.int32),
        ("mid", (16, 5, 128), torch.bfloat16),
        ("sel", (16, 2, 5), torch.int32),
        ("ugdone", (65, 4), torch.int32),
    ],
)
def test_a_view_has_the_values_type_and_shape(scratch, name, shape, dtype):
    values, mask = scratch.view(name, step=1, layer=0)
    assert (values.shape, values.dtype) == (shape, dtype)
    assert mask.shape == shape


def test_packed_values_come_back_in_order(scratch):
    row = torch.randn(2048).bfloat16()
    scratch.put("a", 1, row, step=1, layer=0)
    assert torch.equal(scratch.view("a", step=1, layer=0)[0][1], row)
    codes = torch.randint(0, 256, (2048,), dtype=torch.uint8)
    scratch.put("xn8", 15, codes, step=1, layer=0)
    assert torch.equal(scratch.view("xn8", step=1, layer=0)[0][15], codes)


def test_a_view_of_some_tokens_cuts_the_token_axis(scratch):
    key = torch.arange(256, dtype=torch.int32)
    scratch.put("scores", (7, 2), key, step=1, layer=0)
    values, mask = scratch.view("scores", step=1, layer=0, tokens=3)
    assert values.shape == mask.shape == (8, 3, 128, 2)
    assert torch.equal(values[7, 2].flatten(), key)
    assert scratch.view("ugdone", step=1, layer=0, tokens=3)[0].shape == (65, 4)


def test_plain_words_carry_no_mask(scratch):
    values, mask = scratch.view("sparse_table", tokens=2)
    assert mask is None
    assert values.shape == (2, 1, 130)
    assert values.dtype == torch.int32


@pytest.mark.parametrize(
    ("index", "values", "message"),
    [
        (16, torch.zeros(1), "outside region sp_m"),
        ((0, 0, 16), torch.zeros(1), "outside region sp_m"),
        ((0, 7, 0, 0), torch.zeros(1), "outside region sp_m"),
        ((0, 7, 15), torch.zeros(2), "holds 1 units, got 2"),
        (0, torch.zeros(1, dtype=torch.int32), r"holds torch\.float32, got torch\.int32"),
    ],
)
def test_a_put_outside_its_region_is_refused(scratch, index, values, message):
    with pytest.raises(ValueError, match=message):
        scratch.put("sp_m", index, values, step=1, layer=0)


def test_an_unknown_region_and_a_missing_step_are_refused(scratch):
    with pytest.raises(ValueError, match="no region 'sp_x'; there are iscore"):
        scratch.view("sp_x", step=1, layer=0)
    with pytest.raises(ValueError, match="needs a step and a layer"):
        scratch.view("sp_m")
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.16, got 17"):
        scratch.view("sp_m", step=1, layer=0, tokens=17)


def test_every_rank_holds_every_peers_address(memory):
    peers = mm.PeerBuffers(SMALL, memory, 4)
    base = memory_base(memory)
    addresses = [peers.addr(r) for r in range(4)]
    assert len(set(addresses)) == 4
    for rank in range(4):
        table = memory.at(peers.table_addr(rank) - base)
        assert table.rank == rank
        assert table.read(torch.int64, (4,)).tolist() == addresses
        assert memory.at(peers.addr(rank) - base).rank == rank


def test_a_push_is_seen_at_its_source_and_token(memory):
    peers = mm.PeerBuffers(SMALL, memory, 2)
    row = torch.randn(2048).bfloat16()
    peers.put(1, "attn", (0, 3), row, step=2, layer=4)
    values, mask = peers.view(1, "attn", step=2, layer=4, tokens=4)
    assert values.shape == (2, 4, 2048)
    assert torch.equal(values[0, 3], row)
    assert mask.sum() == 2048
    assert not bool(peers.view(0, "attn", step=2, layer=4)[1].any())


def test_a_solo_rank_is_its_own_only_peer(memory):
    peers = mm.PeerBuffers(SMALL, memory, 1)
    table = memory.at(peers.table_addr(0) - memory_base(memory))
    assert table.read(torch.int64, (1,)).tolist() == [peers.addr(0)]
    assert peers.regions["attn"].shape[0] == 1


def test_a_failed_peer_allocation_frees_the_ones_before_it(memory):
    made = []

    class Short:
        def alloc(self, name, nbytes, *, rank=0, zero=False, uncached=False):
            assert zero
            assert uncached
            if rank == 2:
                raise MemoryError("no room")
            made.append(memory.alloc(name, nbytes, rank=rank, zero=zero))
            return made[-1]

    with pytest.raises(MemoryError, match="no room"):
        mm.PeerBuffers(SMALL, Short(), 4)
    assert [a.freed for a in made] == [True, True]


def test_buffers_free_once_and_stay_freed(memory):
    with mm.Scratch(SMALL, memory) as scratch:
        pass
    scratch.free()
    with pytest.raises(ValueError, match="was freed"):
        scratch.view("sp_m", step=1, layer=0)
    peers = mm.PeerBuffers(SMALL, memory, 2)
    peers.free()
    peers.free()


def test_the_step_counter_counts_on_the_device(memory):
    counter = mm.StepCounter(memory, rank=1)
    assert counter.value == 0
    assert counter.increment() == 1
    counter.set(41)
    assert counter.increment() == 42
    device = memory.at(counter.addr - memory_base(memory))
    assert device.read(torch.int32, (1,)).item() == 42
    with pytest.raises(ValueError, match="step must be in"):
        counter.set(1 << 24)
