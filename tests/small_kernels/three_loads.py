"""A kernel whose instructions can be counted by hand: 2 CTAs of 2 waves, 3 buffer loads, one LDS
write, one barrier, one LDS read, one store. Its loads are written in another file, as a stage's."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import gpu
from flydsl.expr.typing import Int32, Int64
from three_loads_stage import pointer, sum_of_three

THREADS = 128


@fx.struct
class Lds:
    row: fx.Array[fx.Int32, THREADS, 16]


@flyc.kernel(name="three_loads", known_block_size=[THREADS, 1, 1])
def three_loads(source: Int64, target: Int64):
    tid = fx.thread_idx.x
    row = fx.SharedAllocator().allocate(Lds).peek().row.ptr
    fx.ptr_store(sum_of_three(source, tid), row + tid)
    gpu.barrier()
    fx.generic_store(
        pointer(target + Int64(tid * 4)), fx.ptr_load(row + (Int32(THREADS - 1) - tid))
    )


@flyc.jit
def launch(source: Int64, target: Int64, stream: fx.Stream = fx.Stream(None)):  # noqa: B008
    three_loads(source, target).launch(grid=(2,), block=(THREADS,), stream=stream)
