"""One wave asks every lane xor of ``wave`` and reduces; one CTA takes a maximum over its waves."""

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int64

from m3lab.kernels import isa, wave

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
        lds=SimpleNamespace(red=lds.red.ptr), lane=lane, wave=isa.uniform(tid // 64)
    )
    word = isa.load(isa.buffer(words), tid * 4)
    x = isa.bits_float(isa.load(isa.buffer(floats), tid * 4))
    for i in fx.range_constexpr(len(OFFSETS)):
        isa.store(isa.buffer(out), (i * 512 + tid) * 4, wave.xor_lane(word, OFFSETS[i]))
    isa.store(isa.buffer(sums), tid * 4, isa.float_bits(wave.butterfly(x, ORDER)))
    isa.store(isa.buffer(tops), tid * 4, isa.float_bits(wave.block_max(x, ctx)))


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
