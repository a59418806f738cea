"""K4, the post-attention kernel: one launch is one layer on one rank.

``build_post_attn_kernel`` checks the build, names the kernel and returns its launcher; the kernel's
body runs the stages of ``m3lab.kernels.stages`` in program order, which is a topological order of
the mailbox dependencies: no CTA polls for something that a CTA produces at a later point of the
program. What a stage does is in its own module.
"""

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int32, Int64

from m3lab.kernels.arguments import ARG_NAMES, INT32_ARGS
from m3lab.kernels.device import gfx950
from m3lab.kernels.device.context import KernelSpec, TraceContext, clear_stamps, flush_stamps, stamp
from m3lab.kernels.device.mailbox import launch_tag
from m3lab.kernels.device.wave import div, mod
from m3lab.kernels.marks import in_stage
from m3lab.kernels.plan import THREADS, TL_POINTS, WAVE, Plan
from m3lab.kernels.stages import Point, stages_until, until_names
from m3lab.kernels.tuning import Tuning
from m3lab.model.shapes import ONE_INDEX_HEAD, CacheLayout, IndexHeads, RankShape

# LDS arrays of the stages built so far: placement's name -> element
LDS_ELEMENTS = {
    "pool": fx.Int32,
    "red": fx.Float32,
    "q8": fx.Int32,
    "partials": fx.Float32,
    "heads": fx.Float32,
    "keys": fx.Int32,
    "ranks": fx.Int32,
    "blocks": fx.Int32,
    "route": fx.Int32,
    "route_weight": fx.Float32,
}


def trace_args(tokens: int = 1) -> list[int]:
    """Plain integers that a build is traced with, one per argument: their values mean nothing."""
    return [1 if name in INT32_ARGS else 256 for name in ARG_NAMES]


def kernel_symbol(stem: str, floats: tuple[float, ...], **integers: int) -> str:
    """The mangled kernel name that profilers show as ``flydsl::<stem>_<name><value>...``.

    Booleans are 0 and 1; the float constants are a short hash.
    """
    digest = hashlib.sha256(struct.pack(f"<{len(floats)}d", *floats)).hexdigest()[:8]
    parts = [stem, *(f"{name}{int(value)}" for name, value in integers.items()), f"f{digest}"]
    name = "_".join(parts)
    return f"_ZN6flydsl{len(name)}{name}E"


def build_post_attn_kernel(
    npes: int,
    sm_scale: float,
    eps: float,
    route_scale: float,
    shared_weight: float,
    swiglu_limit: float,
    init_blocks: int,
    local_blocks: int,
    tokens: int = 1,
    timeline: bool = False,
    fuse_k1: bool = False,
    heads: IndexHeads = ONE_INDEX_HEAD,
    shared_fp8: bool = False,
    *,
    shape: RankShape = RankShape(),  # noqa: B008  (frozen)
    cache: CacheLayout = CacheLayout(),  # noqa: B008  (frozen)
    blocks: int = 256,
    until: str | None = None,
    tuning: Tuning = Tuning(),  # noqa: B008  (frozen)
) -> Any:
    """The ``@flyc.jit`` launcher of K4 for one rank of an ``npes``-way group.

    ``tokens`` rows a step, ``blocks`` CTAs of 512 threads, all of which must be resident: the
    hand-offs spin. ``until`` stops the kernel after a stage that ``ends_builds``; None builds all.
    ``tuning``: the schedule's knobs; a build that turns one has a number of its own in its name.
    Raises ValueError, in one sentence, for a combination that cannot be or is not built.
    """
    stages = stages_until(until)
    _refuse(npes, fuse_k1, heads, init_blocks, local_blocks, shape)
    plan = Plan(shape, tokens, npes, blocks, tuning)
    if until != "o_proj" and plan.grouped:
        raise ValueError(
            f"not built yet: the router and experts of {tokens} tokens, the wide form "
            f"(build at most {tuning.grouped_from - 1}, or until='o_proj')"
        )
    spec = KernelSpec(
        plan=plan,
        cache=cache,
        sm_scale=sm_scale,
        eps=eps,
        route_scale=route_scale,
        shared_weight=shared_weight,
        swiglu_limit=swiglu_limit,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        timeline=timeline,
        shared_fp8=shared_fp8,
        stages=stages,
    )
    smem = _shared_memory(spec)
    symbol = kernel_symbol(
        "minimax_m3_post_attn",
        (sm_scale, eps, route_scale, shared_weight, swiglu_limit),
        tp=shape.tp,
        pe=npes,
        s=tokens,
        h=shape.hidden,
        n=shape.inter,
        ib=init_blocks,
        lb=local_blocks,
        ih=heads.count,
        io=heads.own,
        tl=timeline,
        kps=cache.page_stride,
        sks=cache.static_scale,
        sf8=shared_fp8,
        b=blocks,
        u=(*until_names(), None).index(until),
        **({"tu": tuning.number} if tuning.changes() else {}),
    )

    @flyc.kernel(name=symbol, known_block_size=[THREADS, 1, 1])
    def post_attn_kernel(
        h_in: Int64,
        q: Int64,
        block_table: Int64,
        seq_lens: Int64,
        k_cache: Int64,
        v_cache: Int64,
        k_scale: Int64,
        v_scale: Int64,
        w_o: Int64,
        s_o: Int64,
        g_post: Int64,
        w_gate: Int64,
        bias: Int64,
        w13: Int64,
        s13: Int64,
        w2: Int64,
        s2: Int64,
        sh_args: Int64,
        h_mid: Int64,
        ar_out: Int64,
        scratch: Int64,
        sym: Int64,
        peers: Int64,
        step: Int64,
        rank: Int32,
        layer: Int32,
        bt_width: Int32,
        q_len: Int32,
        tl: Int64,
        k1_args: Int64,
        positions: Int64,
        slot_mapping: Int64,
        res: Int64,
    ) -> None:
        args = (
            h_in, q, block_table, seq_lens, k_cache, v_cache, k_scale, v_scale, w_o, s_o, g_post,
            w_gate, bias, w13, s13, w2, s2, sh_args, h_mid, ar_out, scratch, sym, peers, step,
            rank, layer, bt_width, q_len, tl, k1_args, positions, slot_mapping, res,
        )  # fmt: skip
        ctx = open_context(spec, smem, args)
        clear_stamps(ctx)
        stamp(ctx, Point.BEGIN)
        run_stages(ctx)
        flush_stamps(ctx)

    @flyc.jit
    def launch_post_attn(
        h_in: Int64,
        q: Int64,
        block_table: Int64,
        seq_lens: Int64,
        k_cache: Int64,
        v_cache: Int64,
        k_scale: Int64,
        v_scale: Int64,
        w_o: Int64,
        s_o: Int64,
        g_post: Int64,
        w_gate: Int64,
        bias: Int64,
        w13: Int64,
        s13: Int64,
        w2: Int64,
        s2: Int64,
        sh_args: Int64,
        h_mid: Int64,
        ar_out: Int64,
        scratch: Int64,
        sym: Int64,
        peers: Int64,
        step: Int64,
        rank: Int32,
        layer: Int32,
        bt_width: Int32,
        q_len: Int32,
        tl: Int64,
        k1_args: Int64,
        positions: Int64,
        slot_mapping: Int64,
        res: Int64,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        post_attn_kernel(
            h_in, q, block_table, seq_lens, k_cache, v_cache, k_scale, v_scale, w_o, s_o, g_post,
            w_gate, bias, w13, s13, w2, s2, sh_args, h_mid, ar_out, scratch, sym, peers, step,
            rank, layer, bt_width, q_len, tl, k1_args, positions, slot_mapping, res,
        ).launch(grid=(blocks,), block=(THREADS,), stream=stream)  # fmt: skip

    return launch_post_attn


def run_stages(ctx: TraceContext) -> None:
    """Trace the build's stages in program order, each under its own mark."""
    for stage in ctx.spec.stages:
        if entry := stage.load():
            in_stage(stage.name)(entry)(ctx)
        if stage.done is not None:
            stamp(ctx, stage.done)


def _refuse(
    npes: int,
    fuse_k1: bool,
    heads: IndexHeads,
    init_blocks: int,
    local_blocks: int,
    shape: RankShape,
) -> None:
    """ValueError for what no plan can say."""
    if fuse_k1:
        raise ValueError("not built yet: the fused pre-attention kernel (fuse_k1)")
    if heads.count > 1 and npes != heads.count:
        raise ValueError(f"four index heads need four peers, got {npes}")
    if heads.count > 1 and init_blocks:
        raise ValueError(
            f"init_blocks must be 0 with four index heads, got {init_blocks}: "
            "the context-parallel candidates start past them"
        )
    if heads.count > 1:
        raise ValueError("not built yet: the selection with four index heads")
    if local_blocks < 1:
        raise ValueError(f"local_blocks must be at least 1, got {local_blocks}")
    if init_blocks < 0 or init_blocks + local_blocks > shape.model.topk_blocks:
        raise ValueError(
            f"init_blocks + local_blocks must be in 1..{shape.model.topk_blocks}, "
            f"got {init_blocks} + {local_blocks}"
        )


def _shared_memory(spec: KernelSpec) -> type:
    """The LDS arrays of the stages that are built, as a FlyDSL struct."""
    plan = spec.plan
    fields = {
        name: fx.Array[element, plan.lds_words[name], 16]
        for name, element in LDS_ELEMENTS.items()
        if not (name == "partials" and plan.grouped)
    }
    if spec.timeline:
        fields["stamps"] = fx.Array[fx.Int64, TL_POINTS, 16]
    return fx.struct(type("SharedMemory", (), {"__annotations__": fields}))


def open_context(spec: KernelSpec, smem: type, args: tuple) -> TraceContext:
    """The context of this trace: thread indices, LDS pointers, buffers, tag."""
    named = SimpleNamespace(**dict(zip(ARG_NAMES, args, strict=True)))
    storage = fx.SharedAllocator().allocate(smem).peek()
    lds = SimpleNamespace(**{name: getattr(storage, name).ptr for name in smem.__annotations__})
    if not spec.plan.grouped:
        lds.tiles = lds.partials
    if spec.plan.split_in_pool:  # the stages take turns with the pool
        lds.partials = fx.recast_iter(fx.Float32, lds.pool)
    tid = fx.thread_idx.x
    lane = mod(tid, WAVE)
    return TraceContext(
        spec=spec,
        args=named,
        lds=lds,
        tid=tid,
        bid=fx.block_idx.x,
        lane=lane,
        wave=gfx950.uniform(div(tid, WAVE)),
        group=div(lane, 16),
        row=mod(lane, 16),
        scratch=gfx950.buffer(named.scratch),
        inbox=gfx950.buffer(named.sym),
        tag=launch_tag(gfx950.load_constant(named.step), named.layer),
    )
