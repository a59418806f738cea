"""Values across the lanes of a wave and the waves of a CTA: exchanges, reductions, indices.

Built on the moves of ``isa``; knows neither memory nor the model. A reduction's order is the
caller's: it is part of a stage's numerical contract.
"""

import flydsl.expr as fx

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.gfx950 import traced
from m3lab.kernels.plan import WAVES

WHOLE_WAVE = (32, 16, 8, 4, 2, 1)


def div(x, n):
    """x // n of a nonnegative traced ``x``: a shift where ``n`` is a power of two (a signed floor
    division costs extra instructions)."""
    return x >> (n.bit_length() - 1) if n & (n - 1) == 0 else x // n


def mod(x, n):
    """x % n of a nonnegative traced ``x``."""
    return x & (n - 1) if n & (n - 1) == 0 else x % n


def pick(values, k):
    """``values[k]`` of a traced, uniform index ``k``."""
    chosen = values[0]
    for i in range(1, len(values)):
        chosen = gfx950.select(k == i, values[i], chosen)
    return chosen


def xor_lane(x, offset):
    """The value of lane ^ ``offset`` (1..63), for an Int32 or Float32."""
    word = gfx950.bitcast_i32(x) if isinstance(x, fx.Float32) else x
    lane = fx.thread_idx.x
    for bit, swap in ((32, gfx950.swap_halves), (16, gfx950.swap_rows)):
        if offset & bit:
            low, high = swap(word)
            word = gfx950.select((lane & bit) == 0, high, low)
    if offset & 15:
        word = gfx950.xor_in_row(word, offset & 15)
    return gfx950.bitcast_f32(word) if isinstance(x, fx.Float32) else word


def add(x, y):
    return x + y


def butterfly(x, offsets, op=add):
    """``op`` over the lanes that ``offsets`` span, in that order, in every lane."""
    for offset in offsets:
        x = op(*_both(x, offset))
    return x


def _both(x, offset):
    """(x, x of lane ^ offset), or both the other way round: ``op`` commutes."""
    swap = {16: gfx950.swap_rows, 32: gfx950.swap_halves}.get(offset)
    if swap is None:
        return x, xor_lane(x, offset)
    if isinstance(x, fx.Float32):
        return tuple(gfx950.bitcast_f32(word) for word in swap(gfx950.bitcast_i32(x)))
    return swap(x)


def largest(x, y):
    """Maximum; NaN wins."""
    return fx.max(x, y)


def reduce(values, op):
    total = values[0]
    for value in values[1:]:
        total = op(total, value)
    return total


@traced
def block_max(x, ctx):
    """The CTA's maximum of a Float32, in every thread.

    ``ctx.lds.red`` must be free (a barrier since its last use) and is free again after the next
    barrier.
    """
    x = butterfly(x, WHOLE_WAVE, largest)
    if ctx.lane == 0:
        gfx950.lds_store(ctx.lds.red, ctx.wave, x)
    gfx950.barrier()
    words = [gfx950.lds_load(ctx.lds.red, i, 4, fx.Float32) for i in range(0, WAVES, 4)]
    values = [half[i] for half in words for i in range(4)]
    x = values[0]
    for value in values[1:]:
        x = largest(x, value)
    return x
