"""The kernels' building blocks alone: lane exchanges, reductions, the mailbox protocol."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from m3lab.compile.trace import build
from m3lab.interpreter import Launch, Memory, run
from m3lab.layout.buffers import PeerBuffers

SMALL = Path(__file__).parent / "small_kernels"


def small_kernel(name):
    sys.path.insert(0, str(SMALL))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(SMALL))


@pytest.fixture(scope="module")
def lanes():
    kernel = small_kernel("cross_lane")
    made = build(kernel.launch, [256] * 5, emit=("program",))
    gen = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (512,), generator=gen, dtype=torch.int32)
    floats = torch.randn(512, generator=gen)
    floats[500] = 10.0  # the last wave's
    memory = Memory()
    a, b = memory.upload("words", words), memory.upload("floats", floats)
    out, sums, tops = (memory.alloc(n, 4 * 512 * k) for n, k in (("o", 63), ("s", 1), ("t", 1)))
    run([Launch(made.program, [x.addr for x in (a, b, out, sums, tops)])], memory)
    return (
        words.view(8, 64),
        floats.view(8, 64),
        out.read(torch.int32, (63, 8, 64)),
        sums.read(torch.float32, (8, 64)),
        tops.read(torch.float32, (512,)),
        kernel,
    )


def test_every_lane_xor_gives_that_lanes_word(lanes):
    words, _, out, _, _, kernel = lanes
    for i, offset in enumerate(kernel.OFFSETS):
        want = torch.stack([words[:, lane ^ offset] for lane in range(64)], 1)
        assert torch.equal(out[i], want), offset


def test_a_butterfly_adds_in_the_given_order(lanes):
    _, floats, _, sums, _, kernel = lanes
    x = floats.clone()
    for offset in kernel.ORDER:
        x = x + torch.stack([x[:, lane ^ offset] for lane in range(64)], 1)
    assert torch.equal(sums, x)


def test_block_max_is_the_maximum_over_all_waves_in_every_thread(lanes):
    floats, tops = lanes[1], lanes[4]
    assert floats.max() == 10.0
    assert torch.equal(tops, torch.full((512,), 10.0))


@pytest.fixture(scope="module")
def hand_off():
    return build(small_kernel("hand_off").launch, [256, 256, 1, 1, 1], emit=("program", "asm"))


def exchange(program, memory, region, step, value, **options):
    out = memory.alloc("out", 4 * 128 * 6)
    args = [region.addr, out.addr, step, 5, value]
    run([Launch(program, args)], memory, **options)
    return out.read(torch.int32, (6, 128))


@pytest.mark.parametrize(
    "options", [{}, {"cta_groups": 2, "seed": 3}, {"cta_groups": 2, "seed": 8}]
)
def test_pairs_and_flagged_words_arrive_as_they_were_put(hand_off, options):
    memory = Memory()
    region = memory.alloc("region", 24576, zero=True)
    for step, value in ((1, 11), (2, 40)):  # the second step finds the first one's pairs
        got = exchange(hand_off.program, memory, region, step, value, **options)
        tid = torch.arange(128, dtype=torch.int32)
        x = (tid + value).float() * 0.25
        assert torch.equal(got[0].view(torch.float32), x)
        assert torch.equal(got[1], tid * 7)
        assert torch.equal(got[2], tid - 100)
        bf16 = torch.stack([x, x + 1, x + 2, x + 3], 1).bfloat16().view(torch.int32)
        assert torch.equal(got[3], bf16[:, 0])
        assert torch.equal(got[4], bf16[:, 1])
        assert torch.equal(got[5], tid * 3 + value)


def instructions(asm):
    """[(mnemonic, operands)] of a kernel, labels as ("label", name)."""
    body = asm[: asm.index(".Lfunc_end0")]
    out = []
    for line in body.splitlines():
        label = re.match(r"^\.(LBB\w+):", line)
        if label:
            out.append(("label", label.group(1)))
        elif re.match(r"^\t[a-z]", line):
            name, *rest = line.split(None, 1)
            out.append((name, rest[0] if rest else ""))
    return out


def reaches_itself(code, start, without):
    """Whether control can come back to ``start``, never through an instruction in ``without``."""
    labels = {name: i for i, (kind, name) in enumerate(code) if kind == "label"}
    seen, todo = set(), [start + 1]
    while todo:
        at = todo.pop()
        if at == start:
            return True
        if at >= len(code) or at in seen or at in without:
            continue
        seen.add(at)
        name, operands = code[at]
        if name.startswith(("s_branch", "s_cbranch")):
            todo.append(labels[operands.split(";")[0].strip().lstrip(".")])
        if name != "s_branch":
            todo.append(at + 1)
    return False


def test_a_flag_leaves_only_after_its_words_are_out(hand_off):
    """In the machine code: between the plain store and the barrier, a wait for stores."""
    code = instructions(hand_off.asm)
    plain = code.index(next(c for c in code if c[0] == "buffer_store_dword" and "sc1" in c[1]))
    barrier = next(i for i in range(plain, len(code)) if code[i][0] == "s_barrier")
    assert ("s_waitcnt", "vmcnt(0)") in code[plain:barrier]


def test_a_poll_reads_again_on_every_try(hand_off):
    """In the machine code: no way back to a poll's sleep that does not pass its loads."""
    code = instructions(hand_off.asm)
    sleeps = [i for i, c in enumerate(code) if c == ("s_sleep", "1")]
    loads = {i for i, c in enumerate(code) if c[0].startswith("buffer_load") and "sc1" in c[1]}
    assert len(sleeps) == 3
    for sleep in sleeps:
        assert reaches_itself(code, sleep, without=set())
        assert not reaches_itself(code, sleep, without=loads)


def test_ranks_are_summed_in_rank_order_in_fp32():
    """2**24 swallows a 1 added to it, so the order of the four partials shows in the sum."""
    kernel = small_kernel("rank_sum")
    program = build(kernel.launch, [256, 256, 256, 256, 0, 1], emit=("program",)).program
    memory = Memory()
    peers = PeerBuffers(kernel.SHAPE, memory, 4)
    big = 2.0**24
    rows = [[big, 1.0], [1.0, 1.0], [1.0, big], [-big, -big]]
    partials = torch.tensor(rows)[:, None].repeat(1, 64, 1)
    partials[:, 1:] += torch.arange(1.0, 64.0)[None, :, None]
    partials = partials.bfloat16().float()
    outs = [memory.alloc("out", 512, rank=r) for r in range(4)]
    launches = []
    for rank, (values, out) in enumerate(zip(partials, outs, strict=True)):
        mine = memory.upload("mine", values, rank=rank)
        args = [mine.addr, out.addr, peers.addr(rank), peers.table_addr(rank), rank, 1]
        launches.append(Launch(program, args, rank))
    run(launches, memory)
    want = torch.zeros(64, 2)
    for values in partials:
        want = want + values
    assert want[0].tolist() == [0.0, 2.0]
    for out in outs:
        assert torch.equal(out.read(torch.float32, (64, 2)), want)
