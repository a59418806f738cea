"""Kernels with one fault each, and their repaired twins: ``FAULTS[name](buggy)`` is a body.

A body takes (a, b, n): two 64-bit addresses and an int. 4 CTAs of 128 threads (two waves), one LDS
array of 256 words.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.expr import const_expr, rocdl
from flydsl.expr.typing import Int32, Int64, T, as_ir_value

from m3lab.kernels.device import gfx950
from m3lab.kernels.device.gfx950 import traced

THREADS, CTAS, LDS_WORDS = 128, 4, 256
FAULTS = {}


@fx.struct
class Lds:
    x: fx.Array[fx.Int32, LDS_WORDS, 16]


def fault(make):
    FAULTS[make.__name__] = make
    return make


def kernel(name, body):
    """The launcher of a body."""

    @flyc.kernel(name=name, known_block_size=[THREADS, 1, 1])
    def run_body(a: Int64, b: Int64, n: Int32):
        body(a, b, n, fx.SharedAllocator().allocate(Lds).peek().x.ptr)

    @flyc.jit
    def launch(a: Int64, b: Int64, n: Int32, stream: fx.Stream = fx.Stream(None)):  # noqa: B008
        run_body(a, b, n).launch(grid=(CTAS,), block=(THREADS,), stream=stream)

    return launch


def word_of(a, index, cache=gfx950.CACHED):
    return gfx950.load(gfx950.buffer(a), index * 4, cache=cache)


def put(b, index, value, cache=gfx950.CACHED):
    gfx950.store(gfx950.buffer(b), index * 4, value, cache=cache)


def everyone():
    return fx.block_idx.x * THREADS + fx.thread_idx.x


@traced
def wait_for(address, index, value, cache=gfx950.DEVICE):
    """Spin until word ``index`` is ``value``."""
    gfx950.poll_until(
        [1],
        lambda: [gfx950.load(gfx950.buffer(address), index * 4, cache=cache)],
        lambda got: got[0] != value,
    )


# ---------------------------------------------------------------------- addresses


@fault
def past_the_end(buggy):
    def body(a, b, n, lds):
        put(b, everyone() + (1 if buggy else 0), word_of(a, everyone()))

    return body


@fault
def misaligned(buggy):
    def body(a, b, n, lds):
        x = gfx950.load(gfx950.buffer(a), (everyone() >> 1) * 4 + (2 if buggy else 0))
        put(b, everyone(), x)

    return body


@fault
def nowhere(buggy):
    """A bounded buffer of zero records may have any base; an unbounded one may not."""

    def body(a, b, n, lds):
        x = gfx950.load(
            gfx950.buffer(fx.Int64(4096), None if buggy else fx.Int64(0)), everyone() * 4
        )
        put(b, everyone(), x)

    return body


@fault
def past_lds(buggy):
    def body(a, b, n, lds):
        gfx950.lds_store(lds, fx.thread_idx.x + n * (2 if buggy else 1), everyone())

    return body


# ---------------------------------------------------------------------- unwritten memory


@fault
def unwritten_stored(buggy):
    """Words past the half that was written: loaded by all, stored only where written."""

    def body(a, b, n, lds):
        x = word_of(a, everyone())
        keep = everyone() < n
        put(b, everyone(), x if buggy else keep.select(x, fx.Int32(0)))

    return body


@fault
def unwritten_bytes(buggy):
    """A word whose upper bytes nothing wrote, masked or not."""

    def body(a, b, n, lds):
        x = word_of(a, everyone())
        mask = (everyone() < n).select(fx.Int32(-1), fx.Int32(0))
        put(b, everyone(), x if buggy else x & mask)

    return body


@fault
def unwritten_branch(buggy):
    @traced
    def body(a, b, n, lds):
        x = word_of(a, everyone())
        keep = everyone() < n
        if (x > 0) if const_expr(buggy) else (keep.select(x, fx.Int32(0)) > 0):
            put(b, everyone(), fx.Int32(1))

    return body


@fault
def unwritten_address(buggy):
    def body(a, b, n, lds):
        x = word_of(a, everyone())
        index = x if buggy else (everyone() < n).select(x, fx.Int32(0))
        put(b, everyone(), word_of(a, index & 7))

    return body


@fault
def undefined_stored(buggy):
    def body(a, b, n, lds):
        x = fx.Int32(llvm.mlir_undef(T.i32))
        put(b, everyone(), x if buggy else (n > 0).select(fx.Int32(1), x))

    return body


@fault
def unwritten_lds(buggy):
    def body(a, b, n, lds):
        gfx950.lds_store(lds, fx.thread_idx.x, everyone())
        gfx950.barrier()
        other = fx.thread_idx.x + (1 if buggy else 0)
        put(b, everyone(), gfx950.lds_load(lds, other))

    return body


@fault
def inactive_lane(buggy):
    """A butterfly under a mask: lanes 0..15 may read each other, not lanes that are off."""

    @traced
    def body(a, b, n, lds):
        if fx.thread_idx.x % 64 < 16:
            x = word_of(a, everyone())
            put(b, everyone(), x.shuffle_xor(16 if buggy else 8, 64))

    return body


# ---------------------------------------------------------------------- the wave and the CTA


@fault
def partial_barrier(buggy):
    @traced
    def body(a, b, n, lds):
        if fx.thread_idx.x < (64 if buggy else 128):
            gfx950.barrier()

    return body


@fault
def barrier_under_lanes(buggy):
    @traced
    def body(a, b, n, lds):
        if (fx.thread_idx.x % 2 == 0) if const_expr(buggy) else (fx.block_idx.x % 2 == 0):
            gfx950.barrier()

    return body


@fault
def partial_mfma(buggy):
    @traced
    def body(a, b, n, lds):
        zero = fx.Int64(0)
        if fx.thread_idx.x < (32 if buggy else 64):
            c = gfx950.mfma_fp8(zero, zero, fx.Vector.filled(4, 1.0, fx.Float32))
            put(b, everyone(), gfx950.bitcast_i32(c[0]))

    return body


@fault
def lane_wise_descriptor(buggy):
    def body(a, b, n, lds):
        step = fx.thread_idx.x if buggy else fx.block_idx.x
        x = gfx950.load(gfx950.buffer(a + fx.Int64(step * 4)), fx.Int32(0))
        put(b, everyone(), x)

    return body


# ---------------------------------------------------------------------- LDS races


@fault
def race_write_read(buggy):
    @traced
    def body(a, b, n, lds):
        gfx950.lds_store(lds, fx.thread_idx.x, everyone())
        if const_expr(not buggy):
            gfx950.barrier()
        put(b, everyone(), gfx950.lds_load(lds, fx.thread_idx.x ^ 64))

    return body


@fault
def race_read_write(buggy):
    @traced
    def body(a, b, n, lds):
        gfx950.lds_store(lds, fx.thread_idx.x, everyone())
        gfx950.barrier()
        x = gfx950.lds_load(lds, fx.thread_idx.x ^ 64)
        if const_expr(not buggy):
            gfx950.barrier()
        gfx950.lds_store(lds, fx.thread_idx.x, x + 1)

    return body


@fault
def race_write_write(buggy):
    """Two waves store to one word: the same value is allowed."""

    def body(a, b, n, lds):
        wave = fx.thread_idx.x // 64
        gfx950.lds_store(lds, fx.thread_idx.x % 64, wave if buggy else fx.block_idx.x + 7)

    return body


@fault
def same_value_twice(buggy):
    """Two stores of one interval, by other waves: of the same value allowed, else a race."""

    @traced
    def body(a, b, n, lds):
        wave = fx.thread_idx.x // 64
        if wave == 0:
            gfx950.lds_store(lds, fx.thread_idx.x % 64, n)
        if wave == 1:
            gfx950.lds_store(lds, fx.thread_idx.x % 64, n + 1 if buggy else n)

    return body


@fault
def race_wide(buggy):
    """A 16-byte read of words another wave wrote."""

    @traced
    def body(a, b, n, lds):
        gfx950.lds_store(lds, fx.thread_idx.x, everyone())
        if const_expr(not buggy):
            gfx950.barrier()
        four = gfx950.lds_load(lds, fx.thread_idx.x % 32 * 4, 4)
        put(b, everyone(), four[0] + four[3])

    return body


# ---------------------------------------------------------------------- hand-offs between CTAs
# b: word 0 is the flag, words 256.. the data. CTA 0 gives, CTA 1 takes.


@traced
def hand_off(b, n, data_cache, wait, flag_seen, read_cache, acquire=False, release=False):
    tid = fx.thread_idx.x
    if fx.block_idx.x == 0:
        put(b, 256 + tid, tid * 3 + n, data_cache)
        if const_expr(release):
            fx.memory_fence(syncscope="agent", ordering=fx.AtomicOrdering.Release)
        if const_expr(wait):
            rocdl.s_waitcnt(vmcnt=0)
        gfx950.barrier()
        if tid == 0:
            put(b, fx.Int32(0), n, gfx950.DEVICE)
    if fx.block_idx.x == 1:
        if const_expr(flag_seen):
            if tid < 64:
                wait_for(b, fx.Int32(0), n)
            gfx950.barrier()
        if const_expr(acquire):
            fx.memory_fence(syncscope="agent", ordering=fx.AtomicOrdering.Acquire)
        put(b, 512 + tid, word_of(b, 256 + tid, read_cache))


def _handing(buggy, **fault):
    good = {
        "data_cache": gfx950.DEVICE, "wait": True, "flag_seen": True, "read_cache": gfx950.DEVICE,
    }  # fmt: skip

    def body(a, b, n, lds):
        hand_off(b, n, **(good | fault if buggy else good))

    return body


@fault
def stale_load(buggy):
    """The data is read through a cache."""
    return _handing(buggy, read_cache=gfx950.CACHED)


@fault
def stale_store(buggy):
    """The data is stored into a cache and not released."""
    return _handing(buggy, data_cache=gfx950.CACHED)


@fault
def no_flag(buggy):
    """The data is read with no flag in between."""
    return _handing(buggy, flag_seen=False)


@fault
def flag_too_early(buggy):
    """The flag may overtake the data: nobody waits for the stores."""
    return _handing(buggy, wait=False)


@fault
def fences(buggy):
    """Plain stores and loads are right with an agent release and acquire, wrong without one."""

    def body(a, b, n, lds):
        hand_off(
            b, n, data_cache=gfx950.CACHED, wait=False, flag_seen=True, read_cache=gfx950.CACHED,
            release=True, acquire=not buggy,
        )  # fmt: skip

    return body


@fault
def wave_ahead(buggy):
    """Wave 0 saw the flag; the other wave reads without a barrier after it."""

    @traced
    def body(a, b, n, lds):
        tid = fx.thread_idx.x
        if fx.block_idx.x == 0:
            put(b, 256 + tid, tid * 3 + n, gfx950.DEVICE)
            gfx950.release_stores()
            gfx950.barrier()
            if tid == 0:
                put(b, fx.Int32(0), n, gfx950.DEVICE)
        if fx.block_idx.x == 1:
            if tid < 64:
                wait_for(b, fx.Int32(0), n)
            if const_expr(not buggy):
                gfx950.barrier()
            put(b, 512 + tid, word_of(b, 256 + tid, gfx950.DEVICE))

    return body


@fault
def relay(buggy):
    """CTA 2 reads CTA 0's data after CTA 1's flag; CTA 1 must have seen CTA 0's first."""

    @traced
    def body(a, b, n, lds):
        tid = fx.thread_idx.x
        if fx.block_idx.x == 0:
            put(b, 256 + tid, tid * 3 + n, gfx950.DEVICE)
            gfx950.release_stores()
            gfx950.barrier()
            if tid == 0:
                put(b, fx.Int32(0), n, gfx950.DEVICE)
        if fx.block_idx.x == 1:
            if const_expr(not buggy):
                wait_for(b, fx.Int32(0), n)
                gfx950.barrier()
            if tid == 0:
                put(b, fx.Int32(1), n, gfx950.DEVICE)
        if fx.block_idx.x == 2:
            wait_for(b, fx.Int32(1), n)
            gfx950.barrier()
            put(b, 512 + tid, word_of(b, 256 + tid, gfx950.DEVICE))

    return body


@fault
def later_writer(buggy):
    """CTA 1 polls for what CTA 0 writes only after its own poll for something CTA 1 gave."""

    @traced
    def body(a, b, n, lds):
        before, after = (fx.Int32(2), fx.Int32(0)) if buggy else (fx.Int32(0), fx.Int32(2))
        if fx.block_idx.x == before:
            put(b, before, n, gfx950.DEVICE)
        if fx.block_idx.x == 1:
            wait_for(b, fx.Int32(0), n)
        if fx.block_idx.x == after:
            put(b, after, n, gfx950.DEVICE)

    return body


@fault
def never_written(buggy):
    @traced
    def body(a, b, n, lds):
        if fx.block_idx.x == 0:
            put(b, fx.Int32(0), n, gfx950.DEVICE)
        if fx.block_idx.x == 1:
            wait_for(b, fx.Int32(4 if buggy else 0), n)

    return body


@fault
def unknown(buggy):
    """An operation nobody implemented."""

    def body(a, b, n, lds):
        if buggy:
            raw_rocdl.s_setprio(2)
            llvm.call_intrinsic(T.i32, "llvm.amdgcn.mbcnt.made.up", [as_ir_value(n)], [], [])

    return body


@fault
def makes_nan(buggy):
    def body(a, b, n, lds):
        x = gfx950.f32(everyone())
        y = x if buggy else x + 1.0
        put(b, everyone(), gfx950.bitcast_i32(x / y))

    return body
