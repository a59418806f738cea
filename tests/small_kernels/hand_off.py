"""CTA 0 hands CTA 1 pairs of every kind, and bulk words behind a flag; CTA 1 writes what it got."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int32, Int64

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.gfx950 import traced
from m3lab.kernels.device.mailbox import (
    MailboxView,
    PairRange,
    launch_tag,
    poll,
    put,
    put_bf,
    put_words,
)

THREADS = 128  # two waves: with one the barrier would be no instruction
PAIRS, BULK, FLAG = 0, 16384, 20480  # byte offsets of the regions
WORDS, FLOATS = THREADS, 3 * THREADS  # first pairs of the two-word and the bf16 hand-offs


@fx.struct
class SharedMemory:
    row: fx.Array[fx.Int32, THREADS, 16]


@traced
def give(tid, box, flag, buffer, tag, seed, row):
    x = gfx950.f32(tid + seed) * 0.25
    put(tag, box, tid, x)
    put_words(tag, box, WORDS + 2 * tid, [tid * 7, tid - 100])
    put_bf(tag, box, 2 * (FLOATS + 2 * tid), [x, x + 1.0, x + 2.0, x + 3.0])
    gfx950.lds_store(row, tid, tid * 3 + seed)
    gfx950.barrier()
    last = fx.Int32(THREADS - 1) - tid  # another wave's word
    gfx950.store(buffer, last * 4, gfx950.lds_load(row, last), base=BULK, cache=gfx950.DEVICE)
    gfx950.release_stores()
    gfx950.barrier()
    if tid == 0:
        put_words(tag, flag, 0, [seed])


@traced
def take(tid, box, flag, buffer, tag, out):
    got = poll(tag, [PairRange(box, tid), PairRange(box, WORDS + 2 * tid, 2)])
    got += poll(tag, [PairRange(box, FLOATS + 2 * tid, 2)])
    words = [word for request in got for word in request]
    poll(tag, [PairRange(flag, 0)])
    gfx950.acquire()
    words.append(gfx950.load(buffer, tid * 4, base=BULK, cache=gfx950.DEVICE))
    for i in fx.range_constexpr(len(words)):
        gfx950.store(gfx950.buffer(out), (i * THREADS + tid) * 4, words[i])


@traced
def exchange(memory, out, step, layer, seed):
    tid = fx.thread_idx.x
    row = fx.SharedAllocator().allocate(SharedMemory).peek().row.ptr
    buffer = gfx950.buffer(memory)
    box, flag = MailboxView(buffer, PAIRS, gfx950.DEVICE), MailboxView(buffer, FLAG, gfx950.DEVICE)
    tag = launch_tag(step, layer)
    if fx.block_idx.x == 0:
        give(tid, box, flag, buffer, tag, seed, row)
    if fx.block_idx.x == 1:
        take(tid, box, flag, buffer, tag, out)


@flyc.kernel(name="hand_off", known_block_size=[THREADS, 1, 1])
def hand_off(memory: Int64, out: Int64, step: Int32, layer: Int32, seed: Int32):
    exchange(memory, out, step, layer, seed)


@flyc.jit
def launch(
    memory: Int64,
    out: Int64,
    step: Int32,
    layer: Int32,
    seed: Int32,
    stream: fx.Stream = fx.Stream(None),  # noqa: B008
):
    hand_off(memory, out, step, layer, seed).launch(grid=(2,), block=(THREADS,), stream=stream)
