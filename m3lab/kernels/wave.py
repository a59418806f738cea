"""Values across the lanes of a wave and the waves of a CTA: exchanges, reductions, indices.

Built on the moves of ``isa``; knows neither memory nor the model. A reduction's order is the
caller's: it is part of a stage's numerical contract.
"""

import flydsl.expr as fx

from m3lab.kernels import isa
from m3lab.kernels.isa import traced
from m3lab.placement import WAVES

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
        chosen = isa.select(k == i, values[i], chosen)
    return chosen


def xor_lane(x, offset):
    """The value of lane ^ ``offset`` (1..63), for an Int32 or Float32."""
    word = isa.float_bits(x) if isinstance(x, fx.Float32) else x
    lane = fx.thread_idx.x
    for bit, swap in ((32, isa.swap_halves), (16, isa.swap_rows)):
        if offset & bit:
            low, high = swap(word)
            word = isa.select((lane & bit) == 0, high, low)
    if offset & 15:
        word = isa.xor_in_row(word, offset & 15)
    return isa.bits_float(word) if isinstance(x, fx.Float32) else word


def add(x, y):
    return x + y


def butterfly(x, offsets, op=add):
    """``op`` over the lanes that ``offsets`` span, in that order, in every lane."""
    for offset in offsets:
        x = op(*_both(x, offset))
    return x


def _both(x, offset):
    """(x, x of lane ^ offset), or both the other way round: ``op`` commutes."""
    swap = {16: isa.swap_rows, 32: isa.swap_halves}.get(offset)
    if swap is None:
        return x, xor_lane(x, offset)
    if isinstance(x, fx.Float32):
        return tuple(isa.bits_float(word) for word in swap(isa.float_bits(x)))
    return swap(x)


def largest(x, y):
    """Maximum; NaN wins."""
    return fx.max(x, y)


def fold(values, op):
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
        isa.lds_store(ctx.lds.red, ctx.wave, x)
    isa.barrier()
    words = [isa.lds_load(ctx.lds.red, i, 4, fx.Float32) for i in range(0, WAVES, 4)]
    values = [half[i] for half in words for i in range(4)]
    x = values[0]
    for value in values[1:]:
        x = largest(x, value)
    return x
