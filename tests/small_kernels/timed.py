"""Kernels whose modelled time can be told by hand: ``BODIES[name](**options)`` is a body.

A body takes (a, b, n, lds) as in ``faults``: 4 CTAs of 128 threads (two waves). ``stamp`` writes a
wave's clock reading to b, int64 [8 CTA + 2 place + wave].
"""

import flydsl.expr as fx
from flydsl.expr import range_constexpr
from small_kernels.faults import LDS_WORDS, everyone, put, wait_for, word_of

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.gfx950 import const_expr, traced
from m3lab.kernels.marks import in_stage

STAMPS = 0  # byte offset in b
WORDS = 1024  # first word that the bodies use otherwise
STEPS = 2  # multiply and add: operations of one step of ``work``
BODIES = {}

__all__ = ["BODIES", "LDS_WORDS", "STEPS", "WORDS"]


def body(make):
    """A body's operations are marked as those of a stage of its name."""

    def marked(*args, **options):
        return in_stage(make.__name__)(make(*args, **options))

    BODIES[make.__name__] = marked
    return marked


def work(x, steps):
    """A chain of ``steps`` multiplies and adds in vector registers."""
    for _ in range_constexpr(steps):
        x = x * 3 + 1
    return x


@traced
def stamp(b, place):
    """Each wave's clock, one lane writing."""
    tid = fx.thread_idx.x
    now = gfx950.clock()
    if tid % 64 == 0:
        slot = fx.block_idx.x * 8 + place * 2 + tid // 64
        gfx950.store_i64(b + gfx950.i64(slot * 8), now)


@body
def load_early(steps, use_first):
    """A load, work that does not need it, and its use: before or after the work."""

    def run(a, b, n, lds):
        x = word_of(a, everyone())
        y = everyone() + n
        if const_expr(use_first):
            x = x + n
            y = work(y, steps)
        else:
            y = work(y, steps)
            x = x + n
        stamp(b, 0)
        put(b, WORDS + everyone(), x + y)

    return run


@body
def waves_meet(steps):
    """Wave 1 works, both meet at a barrier, both read the clock."""

    @traced
    def run(a, b, n, lds):
        stamp(b, 0)
        y = everyone() + n
        if fx.thread_idx.x >= 64:
            y = work(y, steps)
            gfx950.lds_store(lds, fx.thread_idx.x, y)
        gfx950.barrier()
        stamp(b, 1)

    return run


@body
def relay(ctas, steps):
    """CTA 0 works and stores a word; CTA k polls word k - 1, then stores word k."""

    @traced
    def run(a, b, n, lds):
        for k in range_constexpr(ctas):
            if fx.block_idx.x == k:
                if const_expr(k > 0):
                    wait_for(b, fx.Int32(WORDS + 64 * (k - 1)), n)
                if const_expr(k == 0):
                    gfx950.lds_store(lds, fx.thread_idx.x, work(everyone() + n, steps))
                stamp(b, 0)
                if fx.thread_idx.x == 0:
                    put(b, fx.Int32(WORDS + 64 * k), n, gfx950.DEVICE)

    return run


@body
def to_a_peer():
    """The launch with n = 0 stores a word of a, where the one with n = 1 polls for it."""

    @traced
    def run(a, b, n, lds):
        if fx.block_idx.x == 0:
            if n == 0:
                stamp(b, 0)
                if fx.thread_idx.x == 0:
                    put(a, fx.Int32(0), fx.Int32(5), gfx950.SYSTEM)
            if n == 1:
                wait_for(a, fx.Int32(0), fx.Int32(5), gfx950.SYSTEM)
                stamp(b, 0)

    return run


@body
def many_polls(apart):
    """CTA 0 stores words that CTAs 1..3 poll: one word for all, or a line for each wave."""

    @traced
    def run(a, b, n, lds):
        tid = fx.thread_idx.x
        if fx.block_idx.x == 0:
            put(b, WORDS + 64 * (tid // 2 & 15) + (tid & 1), n, gfx950.DEVICE)
        if fx.block_idx.x > 0:
            line = fx.block_idx.x * 2 + tid // 64 if const_expr(apart) else fx.Int32(0)
            wait_for(b, WORDS + 64 * line + (tid & 1), n)
            stamp(b, 0)

    return run


@body
def matrix_chain(count):
    """``count`` dependent matrix instructions a wave."""

    @traced
    def run(a, b, n, lds):
        x = gfx950.i64(everyone() + n)
        c = fx.Vector.filled(4, 0.0, fx.Float32)
        for _ in range_constexpr(count):
            c = gfx950.mfma_fp8(x, x, c)
        stamp(b, 0)
        put(b, WORDS + everyone(), gfx950.bitcast_i32(c[0]))

    return run


@body
def strided(stride):
    """LDS reads of words ``stride`` apart."""

    @traced
    def run(a, b, n, lds):
        tid = fx.thread_idx.x
        gfx950.lds_store(lds, tid, tid)
        gfx950.lds_store(lds, tid + 128, tid)
        gfx950.barrier()
        x = tid
        for _ in range_constexpr(8):
            x = x + gfx950.lds_load(lds, (tid % 64 * stride + (x & n)) & (LDS_WORDS - 1))
        stamp(b, 0)
        put(b, WORDS + everyone(), x)

    return run


@body
def poll_behind_load(load_first):
    """A poll of a word that is there, with or without a slow load issued before it."""

    @traced
    def run(a, b, n, lds):
        if (fx.block_idx.x == 0) & (fx.thread_idx.x == 0):
            put(b, fx.Int32(WORDS), n, gfx950.DEVICE)
        if fx.block_idx.x == 1:
            x = fx.Int32(0)
            if const_expr(load_first):
                x = word_of(a, everyone())
            wait_for(b, fx.Int32(WORDS), n)
            stamp(b, 0)
            put(b, WORDS + 512 + everyone(), x)

    return run


@body
def stream(ctas, loads):
    """The first ``ctas`` CTAs each load ``loads`` rows of 16 bytes a lane."""

    @traced
    def run(a, b, n, lds):
        if fx.block_idx.x < ctas:
            x = fx.Int32(0)
            for k in range_constexpr(loads):
                row = gfx950.load(gfx950.buffer(a), (everyone() + k * 512) * 16, 4)
                x = x + row[0]
            stamp(b, 0)
            put(b, WORDS + everyone(), x)

    return run


@body
def prefetch(loads):
    """A loop that loads the next word before it uses this one's."""

    @traced
    def run(a, b, n, lds):
        x = word_of(a, everyone())
        total = fx.Int32(0)
        for i in range(loads):
            following = word_of(a, everyone() + i * 0)
            total = work(total + x, 50)
            x = following
        stamp(b, 0)
        put(b, WORDS + everyone(), total)

    return run


@body
def two_loads(steps):
    """A load, work, a second load, the first one's use, the second one's."""

    def run(a, b, n, lds):
        x = word_of(a, everyone())
        y = work(everyone() + n, steps)
        z = word_of(a, everyone() + 512)
        x = x + n
        stamp(b, 0)
        z = z + n
        stamp(b, 1)
        put(b, WORDS + everyone(), x + y + z)

    return run


@body
def two_streams(together):
    """Each CTA loads four rows of 16 bytes a lane and, before it waits for them or after, four
    more; clocks when the first are there and when all are."""

    def run(a, b, n, lds):
        def rows(first):
            at = [(everyone() + (first + k) * 512) * 16 for k in range(4)]
            return [gfx950.load(gfx950.buffer(a), i, 4) for i in at]

        def total(x, values):
            for row in values:
                x = x + row[0]
            return x

        one = rows(0)
        two = rows(4) if together else None
        x = total(n, one)
        stamp(b, 0)
        x = total(x, two or rows(4))
        stamp(b, 1)
        put(b, WORDS + everyone(), x)

    return run


@body
def streams_apart():
    """CTAs 0 and 1 load eight rows of 16 bytes a lane, CTAs 2 and 3 at a later point."""

    @traced
    def run(a, b, n, lds):
        for half in range_constexpr(2):
            if fx.block_idx.x // 2 == half:
                x = fx.Int32(0)
                for k in range_constexpr(8):
                    x = x + gfx950.load(gfx950.buffer(a), (everyone() + k * 512) * 16, 4)[0]
                stamp(b, 0)
                put(b, WORDS + everyone(), x)

    return run


@body
def polls_apart():
    """CTA 0 stores a word that CTA 1 polls, and CTA 2 at a later point of the program."""

    @traced
    def run(a, b, n, lds):
        if (fx.block_idx.x == 0) & (fx.thread_idx.x == 0):
            put(b, fx.Int32(WORDS), n, gfx950.DEVICE)
        for k in range_constexpr(1, 3):
            if fx.block_idx.x == k:
                wait_for(b, fx.Int32(WORDS), n)
                stamp(b, 0)

    return run
