"""A kernel that keeps more values than it has registers: 16 waves a CTA leave 128 VGPRs a lane,
and 300 words are live across a barrier. It must spill."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu, range_constexpr
from flydsl.expr.typing import Int64
from three_loads_stage import pointer

THREADS = 1024
VALUES = 300


@flyc.kernel(name="too_many_values", known_block_size=[THREADS, 1, 1])
def too_many_values(source: Int64, target: Int64):
    offset = Int64(fx.thread_idx.x * 4)
    words = []
    for i in range_constexpr(VALUES):
        words.append(fx.ptr_load(pointer(source + offset + Int64(i * THREADS * 4))))
    gpu.barrier()
    for i in range_constexpr(VALUES):
        place = target + offset + Int64((VALUES - 1 - i) * THREADS * 4)
        fx.generic_store(pointer(place), words[i])


@flyc.jit
def launch(source: Int64, target: Int64, stream: fx.Stream = fx.Stream(None)):  # noqa: B008
    too_many_values(source, target).launch(grid=(1,), block=(THREADS,), stream=stream)
