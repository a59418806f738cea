"""One wave asks every lane xor of ``wave`` and reduces; one CTA takes a maximum over its waves."""

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int64

from m3lab.kernels.device import gfx950, wave

OFFSETS = tuple(range(1, 64))
ORDER = (16, 1, 32, 4, 2, 8)


@fx.struct
class SharedMemory:
    red: fx.Array[fx.Float32, 8, 16]


@flyc.kernel(name="cross_lane", known_block_size=[512, 1, 1])
def cross_lane(words: Int64, floats: Int64, out: Int64, sums: Int64, tops: Int64):
    lds = fx.SharedAllocator().allocate(SharedMemory).peek()
    tid = fx.thread_idx.x
    lane = tid % 64
    ctx = SimpleNamespace(
        lds=SimpleNamespace(red=lds.red.ptr), lane=lane, wave=gfx950.uniform(tid // 64)
    )
    word = gfx950.load(gfx950.buffer(words), tid * 4)
    x = gfx950.bitcast_f32(gfx950.load(gfx950.buffer(floats), tid * 4))
    for i in fx.range_constexpr(len(OFFSETS)):
        gfx950.store(gfx950.buffer(out), (i * 512 + tid) * 4, wave.xor_lane(word, OFFSETS[i]))
    gfx950.store(gfx950.buffer(sums), tid * 4, gfx950.bitcast_i32(wave.butterfly(x, ORDER)))
    gfx950.store(gfx950.buffer(tops), tid * 4, gfx950.bitcast_i32(wave.block_max(x, ctx)))


@flyc.jit
def launch(
    words: Int64,
    floats: Int64,
    out: Int64,
    sums: Int64,
    tops: Int64,
    stream: fx.Stream = fx.Stream(None),  # noqa: B008
):
    cross_lane(words, floats, out, sums, tops).launch(grid=(1,), block=(512,), stream=stream)
