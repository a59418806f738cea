"""Every raw or unstable FlyDSL, ROCDL and LLVM use of the kernels, in one plan.

The other kernel modules speak of buffers, words and lanes through these functions and of nothing
below them, so that a FlyDSL upgrade touches this file alone. There is no knowledge of the model or
of a stage here. gfx950 only: cache policy bits, wait counts and descriptor flags are this part's.
"""

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, scf
from flydsl._mlir.dialects import rocdl as raw_rocdl
from flydsl.compiler.ast_rewriter import ASTRewriter
from flydsl.expr import const_expr, range_constexpr, rocdl
from flydsl.expr.meta import capture_user_location, dsl_loc_tracing
from flydsl.expr.typing import T, as_ir_value

# Re-exported: the rewriter looks for these two names in a traced helper.
__all__ = ["const_expr", "range_constexpr"]

# Cache policy of a load or store: SC1 is device scope (past the caches of one XCD), SC0 | SC1
# system scope (to other GPUs). LLVM AMDGPU usage, memory model gfx942.
CACHED = 0
DEVICE = 16
SYSTEM = 17

LANES = 64
DPP_ALL = 0xF  # every row, every bank
DPP_QUAD = {1: 0xB1, 2: 0x4E, 3: 0x1B}  # quad_perm for a lane xor of 1, 2, 3
DPP_ROW_ROR_8 = 0x128  # rotate by 8 within 16 lanes: xor 8
DPP_ROW_MIRROR = 0x140  # xor 15
DPP_ROW_HALF_MIRROR = 0x141  # xor 7
FP8_FORMAT = 0  # E4M3, as a matrix operand of the scaled MFMA
FP4_FORMAT = 4  # E2M1
UNIT_SCALE = 127  # E8M0 of 1.0


def traced(function):
    """Let ``function`` hold traced ``if`` / ``for`` / ``while``: FlyDSL rewrites only the kernel's
    own body, a helper must be passed through its rewriter."""
    return ASTRewriter.transform(function)


# ---------------------------------------------------------------------- scalars


def i32(value):
    return fx.Int32(value)


def i64(value):
    return fx.Int64(value)


def f32(value):
    return fx.Float32(value)


def select(cond, yes, no):
    """``yes`` where ``cond`` holds, else ``no``, lane by lane."""
    return cond.select(yes, no)


def bitcast_i32(x):
    return x.bitcast(fx.Int32)


def bitcast_f32(word):
    return word.bitcast(fx.Float32)


def fma(x, y, z):
    """x * y + z, rounded once."""
    return fx.math.fma(x, y, z)


def absolute(x):
    return fx.math.absf(x)


def div_rn(x, divisor, inverse):
    """x / divisor, correctly rounded without a division; ``inverse`` is 1 / divisor."""
    q = x * inverse
    return fma(fma(-q, divisor, x), inverse, q)


@dsl_loc_tracing
def uniform(x):
    """``x`` of the first active lane: tells the compiler that the wave agrees on it."""
    return fx.Int32(raw_rocdl.readfirstlane(T.i32, as_ir_value(x)))


def uniform64(x):
    """``uniform`` of an Int64."""
    low = uniform(fx.Int32(x))
    high = uniform(fx.Int32(x >> 32))
    return (fx.Int64(high) << 32) | fx.Int64(fx.Uint32(low))


@dsl_loc_tracing
def rcp(x):
    """v_rcp_f32."""
    return fx.Float32(raw_rocdl.rcp(T.f32, as_ir_value(x)))


@dsl_loc_tracing
def rsq(x):
    """v_rsq_f32."""
    return fx.Float32(raw_rocdl.rsq(T.f32, as_ir_value(x)))


@dsl_loc_tracing
def exp2(x):
    """v_exp_f32."""
    return fx.Float32(raw_rocdl.exp2(T.f32, as_ir_value(x)))


@dsl_loc_tracing
def pack_fp8x4(a, b, c, d):
    """Four fp32 as E4M3 bytes, ``a`` lowest (RNE; past 448 is NaN)."""
    word = as_ir_value(fx.Int32(0))
    for half, pair in enumerate(((a, b), (c, d))):
        x, y = (as_ir_value(fx.Float32(v)) for v in pair)
        word = raw_rocdl.cvt_pk_fp8_f32(T.i32, x, y, word, bool(half))
    return fx.Int32(word)


def bf16_round(x):
    return x.to(fx.BFloat16).to(fx.Float32)


def pack_bf16x2(low, high):
    """Two fp32 as a word of two bf16."""
    return fx.Vector.from_elements([low, high], fx.Float32).to(fx.BFloat16).bitcast(fx.Int32)[0]


def bf16_floats(word):
    """The two bf16 of a word as fp32: (low, high)."""
    return bitcast_f32(word << 16), bitcast_f32(word & fx.Int32(-65536))


# ---------------------------------------------------------------------- memory


def global_pointer(address, element=fx.Int32, align=4):
    """A typed pointer at a 64-bit address."""
    return fx.inttoptr(fx.PointerType.get(element.ir_type, fx.AddressSpace.Global, align), address)


@dsl_loc_tracing
def load_constant(address, element=fx.Int32):
    """One value at a uniform address that nothing writes during the launch: a scalar load."""
    size = element.width // 8
    pointer = fx.to_llvm_ptr(global_pointer(address, element, size))
    return element(llvm.LoadOp(element.ir_type, pointer, alignment=size, invariant=True).result)


def buffer(address, nbytes=None):
    """Buffer resource at ``address``, a value the whole wave shares; ``nbytes`` bounds it, a load
    past it gives 0 and a store is dropped (default: 4 GiB, unchecked)."""
    return rocdl.get_buffer_rsrc(rocdl.make_buffer_ptr(global_pointer(address), nbytes))


def _words_type(count):
    return T.i32 if count == 1 else fx.Vector.make_type(count, fx.Int32)


def _words(value, count):
    return fx.Int32(value) if count == 1 else fx.Vector(value, (count,), fx.Int32)


@dsl_loc_tracing
def load(rsrc, byte, count=1, *, base=0, cache=CACHED):
    """``count`` (1, 2, 4) words at ``base`` (a uniform offset) + ``byte`` of a buffer."""
    value = rocdl.raw_ptr_buffer_load(
        _words_type(count), rsrc, fx.Int32(byte), fx.Int32(base), aux=cache
    )
    return _words(value, count)


@dsl_loc_tracing
def store(rsrc, byte, value, *, base=0, cache=CACHED):
    """``value`` (a word or a vector of 2 or 4) to ``base`` + ``byte`` of a buffer."""
    raw_rocdl.raw_ptr_buffer_store(
        as_ir_value(value),
        rsrc,
        as_ir_value(fx.Int32(byte)),
        as_ir_value(fx.Int32(base)),
        aux=ir.IntegerAttr.get(T.i32, cache),
    )


def store_i64(address, value):
    """An Int64 to a 64-bit address."""
    fx.generic_store(global_pointer(address, fx.Int64, 8), value)


def lds_load(pointer, index, count=1, element=fx.Int32):
    """``count`` consecutive elements of an LDS array, at a multiple of ``count``."""
    if count == 1:
        return fx.ptr_load(pointer + index)
    wide = fx.recast_iter(_aligned(pointer, element, count), pointer + index)
    return fx.Vector(
        fx.ptr_load(wide, result_type=fx.Vector.make_type(count, element)), (count,), element
    )


def lds_store(pointer, index, value, count=1, element=fx.Int32):
    """Store ``count`` consecutive elements to an LDS array, at a multiple of ``count``."""
    if count == 1:
        fx.ptr_store(value, pointer + index)
        return
    fx.ptr_store(value, fx.recast_iter(_aligned(pointer, element, count), pointer + index))


def _aligned(pointer, element, count):
    return fx.PointerType.get(element.ir_type, pointer.address_space, 4 * count)


@dsl_loc_tracing
def acquire():
    """Keep later loads behind the poll that made them valid.

    A fence of workgroup scope costs no instruction on gfx950: it only keeps the compiler from
    hoisting. The loads themselves must be of device scope, which passes this CU's stale lines.
    """
    fx.memory_fence(syncscope=rocdl.SyncScope.Workgroup, ordering=fx.AtomicOrdering.Acquire)


@dsl_loc_tracing
def release_stores():
    """Wait until this wave's device-scope stores are where other CTAs read them.

    The barrier that follows does not wait for stores: on gfx9 the compiler emits no s_waitcnt at
    s_barrier, and a release fence of workgroup scope waits for LDS alone outside threadgroup-split
    mode (LLVM AMDGPU usage, memory model gfx942). A release of agent scope would wait, and write
    back the whole L2 too, which write-through stores do not need.
    """
    fx.memory_fence(syncscope=rocdl.SyncScope.Workgroup, ordering=fx.AtomicOrdering.Release)
    rocdl.s_waitcnt(vmcnt=0)


@dsl_loc_tracing
def poll_until(counts, load_all, pending):
    """Load until nothing is ``pending``; one ``s_sleep 1`` between tries.

    ``counts``: words of each value that ``load_all()`` returns; ``pending(values)``: the lane's
    condition to try again. The whole wave loads again while one of its lanes must, so the loop is
    a uniform branch. -> the last values.
    """
    loc = capture_user_location()
    types = [_words_type(n) for n in counts]
    loop = scf.WhileOp(types, [], loc=loc)
    loop.regions[0].blocks.append()
    loop.regions[1].blocks.append(*types, arg_locs=[loc] * len(types))
    with ir.InsertionPoint(loop.regions[0].blocks[0]):
        # The intrinsics read memory without being volatile: without a fence in the loop LLVM may
        # move them out of it. This scope is a compiler barrier and no instruction.
        fx.memory_fence(syncscope="singlethread", ordering=fx.AtomicOrdering.Acquire)
        values = load_all()
        waiting = raw_rocdl.ballot(T.i64, as_ir_value(pending(values)))
        again = fx.Int64(waiting) != fx.Int64(0)
        scf.ConditionOp(as_ir_value(again), [as_ir_value(v) for v in values], loc=loc)
    with ir.InsertionPoint(loop.regions[1].blocks[0]):
        raw_rocdl.s_sleep(1)
        scf.YieldOp([], loc=loc)
    return [_words(value, n) for value, n in zip(loop.results, counts, strict=True)]


@dsl_loc_tracing
def first_lane(cond):
    """The lowest lane where ``cond`` holds, 64 where there is none; uniform."""
    lanes = raw_rocdl.ballot(T.i64, as_ir_value(cond))
    return fx.Int32(fx.math.cttz(fx.Int64(lanes)))


@dsl_loc_tracing
def unlikely(cond):
    """``cond``, with a hint that it seldom holds: the code behind it goes out of the way."""
    hint = [as_ir_value(cond), as_ir_value(fx.Boolean(False))]
    return fx.Boolean(llvm.call_intrinsic(fx.Boolean.ir_type, "llvm.expect.i1", hint, [], []))


@dsl_loc_tracing
def sched_barrier():
    """No instruction crosses this point of the schedule. Between requests and their use: to save
    registers the compiler would move each load to its use, and only a few be in flight."""
    rocdl.sched_barrier(0)


def barrier():
    fx.gpu.barrier()


@dsl_loc_tracing
def clock():
    """s_memrealtime, 100 MHz."""
    return fx.Int64(llvm.call_intrinsic(T.i64, "llvm.amdgcn.s.memrealtime", [], [], []))


# ---------------------------------------------------------------------- across lanes


def _dpp(word, control):
    value = as_ir_value(word)
    args = [value, value, *(as_ir_value(fx.Int32(n)) for n in (control, DPP_ALL, DPP_ALL))]
    args.append(as_ir_value(fx.Boolean(True)))
    return fx.Int32(llvm.call_intrinsic(T.i32, "llvm.amdgcn.update.dpp.i32", args, [], []))


def _swap(word, builder):
    """v_permlane16/32_swap of a word with itself: (the even rows', the odd rows') value in both
    rows of a pair."""
    pair = ir.Type.parse("!llvm.struct<(i32, i32)>")
    value = as_ir_value(word)
    got = builder(pair, value, value, False, False)
    return tuple(fx.Int32(llvm.extractvalue(T.i32, got, [i])) for i in range(2))


@dsl_loc_tracing
def swap_rows(word):
    """(value of lane & ~16, value of lane | 16)."""
    return _swap(word, raw_rocdl.permlane16_swap)


@dsl_loc_tracing
def swap_halves(word):
    """(value of lane & ~32, value of lane | 32)."""
    return _swap(word, raw_rocdl.permlane32_swap)


@dsl_loc_tracing
def xor_in_row(word, offset):
    """The word of lane ^ ``offset``, offset in 1..15, by one or two DPP moves."""
    if offset >= 8 and offset != 15:
        word, offset = _dpp(word, DPP_ROW_ROR_8), offset ^ 8
    if offset == 15:
        return _dpp(word, DPP_ROW_MIRROR)
    if offset >= 4:
        word, offset = _dpp(word, DPP_ROW_HALF_MIRROR), offset ^ 7
    return _dpp(word, DPP_QUAD[offset]) if offset else word


@dsl_loc_tracing
def lane_value(x, lane):
    """A Float32 of the lane ``lane``, a uniform index, in every lane: v_readlane."""
    word = raw_rocdl.readlane(T.i32, as_ir_value(bitcast_i32(x)), as_ir_value(lane))
    return bitcast_f32(fx.Int32(word))


# ---------------------------------------------------------------------- dot products, matrix cores


@dsl_loc_tracing
def dot2_bf16(a, b, c):
    """``c`` plus the products of two words' bf16 pairs: exact products, fp32 sums."""
    pairs = [
        as_ir_value(fx.Vector.from_elements([x], fx.Int32).bitcast(fx.BFloat16)) for x in (a, b)
    ]
    return fx.Float32(rocdl.fdot2_f32_bf16(T.f32, *pairs, as_ir_value(c), clamp=False).result)


@dsl_loc_tracing
def mfma_fp8(a, b, c):
    """16x16x32, E4M3 by E4M3; ``a`` and ``b`` are Int64, ``c`` four fp32."""
    return fx.Vector(
        rocdl.mfma_f32_16x16x32_fp8_fp8(T.vec(4, T.f32), [a, b, c, 0, 0, 0]), (4,), fx.Float32
    )


@dsl_loc_tracing
def mfma_scaled(a, b, c, *, formats, scales, selects=(0, 0)):
    """16x16x128 f8f6f4: ``a`` and ``b`` are vectors of words (8 for E4M3, 4 for E2M1)."""
    operands = [a, b, c, *formats, selects[0], scales[0], selects[1], scales[1]]
    return fx.Vector(
        rocdl.mfma_scale_f32_16x16x128_f8f6f4(T.vec(4, T.f32), operands), (4,), fx.Float32
    )
