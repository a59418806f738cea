"""Traced kernels with loops, branches, LDS and buffers, against plain Python loops a thread.

Lanes, waves and CTAs part ways at every level: what each thread ends with is what a scalar program
of that thread alone would compute.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("flydsl")

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int32, Int64
from flykernels import Lds, int_type, one, program_of, run_lanes, values, words_of
from lane_arithmetic import signed

from m3lab.interpreter import Launch, Memory, UninitializedRead, run
from m3lab.kernels.device import gfx950

Row = list[int]
BLOCK, GRID = 128, 3
PLACES = [(b, t) for b in range(GRID) for t in range(BLOCK)]


def place_words() -> tuple[Any, Any, Any, Any]:
    """(CTA, wave, lane, thread) of this thread."""
    thread = fx.thread_idx.x
    return fx.block_idx.x, thread // 64, thread % 64, thread


# ---------------------------------------------------------------------- loops


@gfx950.traced
def triangle(n: Any, word: Any) -> Any:
    """A loop whose trip count is each lane's own, a branch inside."""
    total = fx.Int32(0)
    for i in range(0, n, 1):
        step = fx.Int32(i) * word
        if (step & 1) == 0:
            total = total + step
        else:
            total = total ^ step
    return total


def test_a_for_loop_runs_each_lane_its_own_number_of_times() -> None:
    rng = random.Random(1)
    rows = [[rng.randrange(0, 12), rng.randrange(-50, 50)] for _ in PLACES]

    def body(words: Any) -> Any:
        return [triangle(words[0], words[1])]

    got, program = run_lanes("triangle", body, rows, 1, block=BLOCK, grid=GRID)
    assert {"scf.for", "scf.if"} <= set(program.kinds())
    for (n, word), line in zip(rows, got, strict=True):
        total = 0
        for i in range(n):
            step = i * word
            total = total + step if step & 1 == 0 else total ^ step
        assert line == [signed(total, 32)]


def test_a_loop_that_few_ctas_and_waves_enter_leaves_the_others_alone() -> None:
    """Of 16 CTAs some lanes of CTA 2's wave 1, of CTA 9 and of CTA 15's lane 63 go on looping."""
    rng = random.Random(11)
    rows = []
    for i in range(BLOCK * 16):
        bid, thread = divmod(i, BLOCK)
        loops = {2: thread >= 64 and thread % 3 == 0, 9: thread % 2 == 1, 15: thread == 63}
        rows.append([rng.randrange(3, 9) if loops.get(bid) else 0, rng.randrange(-50, 50)])

    def body(words: Any) -> Any:
        return [kept_through(words[0], words[1])]

    got, _ = run_lanes("few", body, rows, 1, block=BLOCK, grid=16)
    for (n, word), line in zip(rows, got, strict=True):
        total = word
        for i in range(n):
            total = total * 3 + i if total & 1 else total - 7
        assert line == [signed(total, 32)]


@gfx950.traced
def kept_through(n: Any, word: Any) -> Any:
    """A carried value that lanes which leave early, or never enter, must keep."""
    total = word
    for i in range(0, n, 1):
        if (total & 1) == 1:
            total = total * 3 + fx.Int32(i)
        else:
            total = total - 7
    return total


@gfx950.traced
def collatz(start: Any, limit: Any) -> Any:
    x, steps = start, fx.Int32(0)
    while (x > 1) & (steps < limit):
        if x % 2 == 0:
            x = x // 2
        else:
            x = x * 3 + 1
        steps = steps + 1
    return x, steps


def test_a_while_loop_ends_for_each_lane_by_itself() -> None:
    rows = [[1 + i * 7 % 97, 40 if i < 300 else 5] for i in range(BLOCK * GRID)]

    def body(words: Any) -> Any:
        return list(collatz(words[0], words[1]))

    got, program = run_lanes("collatz", body, rows, 2, block=BLOCK, grid=GRID)
    assert "scf.while" in program.kinds()
    for (x, limit), line in zip(rows, got, strict=True):
        steps = 0
        while x > 1 and steps < limit:
            x = x // 2 if x % 2 == 0 else x * 3 + 1
            steps += 1
        assert line == [x, steps]


@gfx950.traced
def nested_loops(outer: Any, word: Any) -> Any:
    """A loop in a loop in a branch; the inner bound depends on the outer index and the wave."""
    total, last = word, fx.Int32(-1)
    if word > 3:
        for i in range(0, outer, 2):
            for j in range(fx.Int32(i), word, 3):
                total = total * 5 + fx.Int32(j)
                if total > 1000:
                    total = total - 1000
                    last = fx.Int32(i)
    return total, last


def test_nested_loops_carry_their_values_outward() -> None:
    rng = random.Random(2)
    rows = [[rng.randrange(0, 7), rng.randrange(0, 20)] for _ in PLACES]

    def body(words: Any) -> Any:
        return list(nested_loops(words[0], words[1]))

    got, _ = run_lanes("nested", body, rows, 2, block=BLOCK, grid=GRID)
    for (outer, word), line in zip(rows, got, strict=True):
        total, last = word, -1
        if word > 3:
            for i in range(0, outer, 2):
                for j in range(i, word, 3):
                    total = signed(total * 5 + j, 32)
                    if total > 1000:
                        total, last = total - 1000, i
        assert line == [total, last]


# ---------------------------------------------------------------------- branches


@gfx950.traced
def decide(bid: Any, wave: Any, lane: Any, word: Any) -> Any:
    """Branches on the CTA, the wave, the lane and the value, each inside the other."""
    got = word
    tag = fx.Int32(0)
    if bid == 1:
        tag = fx.Int32(100)
        if wave == 0:
            got = got + 7
            if lane >= 40:
                got = got * 3
                if (word & 1) == 1:
                    tag = tag + lane
            else:
                got = got - lane
        else:
            tag = tag + 1
    elif lane < 8:
        got = fx.Int32(0) - got
    return got, tag


def test_branches_on_cta_wave_lane_and_value() -> None:
    rng = random.Random(3)
    rows = [[rng.randrange(-1000, 1000)] for _ in PLACES]

    def body(words: Any) -> Any:
        bid, wave, lane, _ = place_words()
        return list(decide(bid, wave, lane, words[0]))

    got, _ = run_lanes("decide", body, rows, 2, block=BLOCK, grid=GRID)
    for (bid, thread), (word,), line in zip(PLACES, rows, got, strict=True):
        wave, lane = divmod(thread, 64)
        value, tag = word, 0
        if bid == 1:
            tag = 100
            if wave == 0:
                value += 7
                if lane >= 40:
                    value *= 3
                    tag += lane if word & 1 else 0
                else:
                    value -= lane
            else:
                tag += 1
        elif lane < 8:
            value = -value
        assert line == [value, tag]


def test_thread_block_and_grid_numbers() -> None:
    def body(words: Any) -> Any:
        from flydsl._mlir import ir

        out = []
        for kind in ("gpu.thread_id", "gpu.block_id", "gpu.block_dim", "gpu.grid_dim"):
            index = one(kind, [], ir.IndexType.get(), dimension="#gpu<dim x>")
            out.append(one("arith.index_cast", [index], int_type(32)))
        return words_of(out)

    got, _ = run_lanes("numbers", body, [[0]] * (BLOCK * GRID), 4, block=BLOCK, grid=GRID)
    assert got == [[t, b, BLOCK, GRID] for b, t in PLACES]


# ---------------------------------------------------------------------- LDS


def launcher_of(kernel: Any, grid: int, block: int) -> Any:
    @flyc.jit
    def launch(
        source: Int64,
        target: Int64,
        n: Int32,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        kernel(source, target, n).launch(grid=(grid,), block=(block,), stream=stream)

    return launch


def run_kernel(kernel: Any, source: torch.Tensor, words: int, n: int = 0) -> list[int]:
    """Run a (source, target, n) kernel; the target's words."""
    program = program_of(launcher_of(kernel, GRID, BLOCK), 3)
    memory = Memory()
    given = memory.upload("source", source)
    target = memory.alloc("target", 4 * words, zero=True)
    run([Launch(program, [given.addr, target.addr, n])], memory)
    return target.read(torch.int32, (words,)).tolist()


@flyc.kernel(name="reverse_in_lds", known_block_size=[BLOCK, 1, 1])
def reverse_in_lds(source: Int64, target: Int64, n: Int32) -> None:
    lds = fx.SharedAllocator().allocate(Lds).peek()
    words = lds.words.ptr
    thread = fx.thread_idx.x
    row = fx.block_idx.x * BLOCK + thread
    gfx950.lds_store(words, thread, gfx950.load(gfx950.buffer(source), row * 4))
    gfx950.barrier()
    other = gfx950.lds_load(words, BLOCK - 1 - thread)
    four = gfx950.lds_load(words, (thread // 4) * 4, 4)
    gfx950.barrier()
    gfx950.lds_store(words, thread, other + four[0] * 2 + four[3])
    gfx950.barrier()
    total = fx.Int32(0)
    for i in range(0, n, 1):
        total = total + gfx950.lds_load(words, (thread + fx.Int32(i)) % BLOCK)
    gfx950.store(gfx950.buffer(target), row * 4, total)


def test_lds_carries_words_across_the_waves_of_a_cta() -> None:
    rng = random.Random(4)
    given = [rng.randrange(1000) for _ in PLACES]
    got = run_kernel(reverse_in_lds, torch.tensor(given, dtype=torch.int32), BLOCK * GRID, 5)
    for b in range(GRID):
        own = given[b * BLOCK : (b + 1) * BLOCK]
        mixed = [
            own[BLOCK - 1 - t] + 2 * own[t // 4 * 4] + own[t // 4 * 4 + 3] for t in range(BLOCK)
        ]
        want = [sum(mixed[(t + i) % BLOCK] for i in range(5)) for t in range(BLOCK)]
        assert got[b * BLOCK : (b + 1) * BLOCK] == want


@flyc.kernel(name="some_ctas", known_block_size=[BLOCK, 1, 1])
def some_ctas(source: Int64, target: Int64, n: Int32) -> None:
    """Only CTAs below n use LDS and the barrier, and only wave 1 writes there."""
    lds = fx.SharedAllocator().allocate(Lds).peek()
    words = lds.words.ptr
    thread = fx.thread_idx.x
    row = fx.block_idx.x * BLOCK + thread
    got = gfx950.load(gfx950.buffer(source), row * 4)
    if fx.block_idx.x < n:
        if thread >= 64:
            gfx950.lds_store(words, thread - 64, got)
        gfx950.barrier()
        got = got + gfx950.lds_load(words, thread % 64)
    gfx950.store(gfx950.buffer(target), row * 4, got)


def test_a_barrier_may_stand_in_a_branch_that_whole_ctas_take() -> None:
    given = [3 * i + 1 for i in range(BLOCK * GRID)]
    got = run_kernel(some_ctas, torch.tensor(given, dtype=torch.int32), BLOCK * GRID, 2)
    want = [
        given[b * BLOCK + t] + (given[b * BLOCK + 64 + t % 64] if b < 2 else 0) for b, t in PLACES
    ]
    assert got == want


@flyc.kernel(name="no_lds", known_block_size=[BLOCK, 1, 1])
def no_lds(source: Int64, target: Int64, n: Int32) -> None:
    row = fx.block_idx.x * BLOCK + fx.thread_idx.x
    gfx950.store(gfx950.buffer(target), row * 4, gfx950.load(gfx950.buffer(source), row * 4) + n)


def test_a_kernel_without_lds_runs() -> None:
    got = run_kernel(no_lds, torch.arange(BLOCK * GRID, dtype=torch.int32), BLOCK * GRID, 9)
    assert got == [i + 9 for i in range(BLOCK * GRID)]


# ---------------------------------------------------------------------- buffers and pointers


@flyc.kernel(name="past_the_end", known_block_size=[BLOCK, 1, 1])
def past_the_end(source: Int64, target: Int64, n: Int32) -> None:
    """Resources of n bytes: words, pairs and quads that lie past or across the end."""
    fx.SharedAllocator().allocate(Lds).peek()
    thread = fx.thread_idx.x
    row = fx.block_idx.x * BLOCK + thread
    given, wanted = gfx950.buffer(source, n), gfx950.buffer(target, n)
    far = gfx950.load(given, thread * 4 + (thread % 3) * 1000000)
    pair = gfx950.load(given, thread * 8, 2)
    quad = gfx950.load(given, thread * 16, 4)
    behind = gfx950.load(given, thread * 4 - 64)
    total = far + pair[0] * 3 + pair[1] * 5 + quad[0] * 7 + quad[3] * 11 + behind * 13
    gfx950.store(wanted, row * 4, total)


def test_a_load_past_the_records_gives_zero_and_a_store_is_dropped() -> None:
    """No more than n bytes belong to the buffers: anything past them is checked memory."""
    n = 4 * 100
    given = [i * i % 991 + 1 for i in range(100)]
    got = run_kernel(past_the_end, torch.tensor(given, dtype=torch.int32), 100, n)

    def at(byte: int) -> int:
        return given[byte // 4] if 0 <= byte <= n - 4 else 0

    want = []
    for t in range(100):
        total = at(t * 4 + t % 3 * 1000000) + at(t * 8) * 3 + at(t * 8 + 4) * 5
        total += at(t * 16) * 7 + at(t * 16 + 12) * 11
        total += at((t * 4 - 64) & 0xFFFFFFFF) * 13
        want.append(total)
    assert got == want


@flyc.kernel(name="by_pointer", known_block_size=[BLOCK, 1, 1])
def by_pointer(source: Int64, target: Int64, n: Int32) -> None:
    fx.SharedAllocator().allocate(Lds).peek()
    row = fx.block_idx.x * BLOCK + fx.thread_idx.x
    here = source + fx.Int64(row * 4)
    word = fx.generic_load(gfx950.global_pointer(here), dtype=fx.Int32)
    fixed = fx.generic_load(gfx950.global_pointer(source + fx.Int64(n * 4)), dtype=fx.Int32)
    gfx950.store_i64(target + fx.Int64(row * 8), fx.Int64(word) * fx.Int64(fixed))


def test_loads_and_stores_by_64_bit_address() -> None:
    given = [signed(i * 0x01234567, 32) for i in range(BLOCK * GRID)]
    got = run_kernel(by_pointer, torch.tensor(given, dtype=torch.int32), 2 * BLOCK * GRID, 17)
    for i, word in enumerate(given):
        product = word * given[17]
        assert [got[2 * i], got[2 * i + 1]] == [signed(product, 32), signed(product >> 32, 32)]


# ---------------------------------------------------------------------- unknown bits on the move


@flyc.kernel(name="unknown_moves", known_block_size=[BLOCK, 1, 1])
def unknown_moves(source: Int64, target: Int64, n: Int32) -> None:
    """A word of unwritten memory goes through a move, or says where from, before a store."""
    fx.SharedAllocator().allocate(Lds).peek()
    thread = fx.thread_idx.x
    row = fx.block_idx.x * BLOCK + thread
    word = gfx950.load(gfx950.buffer(source), row * 4)
    known = thread * 4
    got = known
    if n == 3:
        got = fx.Int32(fx.rocdl.ds_bpermute(fx.typing.T.i32, word, known + 1))
    if n == 0:
        got = fx.Int32(fx.rocdl.ds_bpermute(fx.typing.T.i32, known, word))
    if n == 1:
        got = gfx950.swap_rows(word)[1]
    if n == 2:
        got = gfx950.xor_in_row(word, 5)
    gfx950.store(gfx950.buffer(target), row * 4, got)


@pytest.mark.parametrize("move", range(3), ids=["bpermute", "swap", "dpp"])
def test_unwritten_memory_is_not_laundered_by_a_move_between_lanes(move: int) -> None:
    program = program_of(launcher_of(unknown_moves, GRID, BLOCK), 3)
    memory = Memory()
    source = memory.alloc("source", 4 * BLOCK * GRID)
    target = memory.alloc("target", 4 * BLOCK * GRID, zero=True)
    with pytest.raises(UninitializedRead):
        run([Launch(program, [source.addr, target.addr, move])], memory)


def test_a_move_from_a_lane_that_unwritten_memory_names_is_noticed() -> None:
    program = program_of(launcher_of(unknown_moves, GRID, BLOCK), 3)
    memory = Memory()
    source = memory.alloc("source", 4 * BLOCK * GRID)
    target = memory.alloc("target", 4 * BLOCK * GRID, zero=True)
    with pytest.raises(UninitializedRead):
        run([Launch(program, [source.addr, target.addr, 3])], memory)


@flyc.kernel(name="swap_of_two", known_block_size=[BLOCK, 1, 1])
def swap_of_two(source: Int64, target: Int64, n: Int32) -> None:
    fx.SharedAllocator().allocate(Lds).peek()
    thread = fx.thread_idx.x
    row = fx.block_idx.x * BLOCK + thread
    word = gfx950.load(gfx950.buffer(source), row * 4)
    first, second = swapped(thread, word)
    gfx950.store(gfx950.buffer(target), row * 4, (n == 0).select(first, second))


def swapped(old: Any, word: Any) -> Any:
    from flydsl._mlir import ir

    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    got = one("rocdl.permlane32.swap", values([old, word]), pair, fi="false", boundControl="false")
    return words_of(
        [one("llvm.extractvalue", [got], int_type(32), position=f"array<i64: {i}>") for i in (0, 1)]
    )


def test_unwritten_memory_in_a_swap_s_second_operand_is_noticed() -> None:
    program = program_of(launcher_of(swap_of_two, GRID, BLOCK), 3)
    memory = Memory()
    source = memory.alloc("source", 4 * BLOCK * GRID)
    target = memory.alloc("target", 4 * BLOCK * GRID, zero=True)
    with pytest.raises(UninitializedRead):
        run([Launch(program, [source.addr, target.addr, 0])], memory)
