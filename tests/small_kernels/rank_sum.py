"""Every rank pushes two values a thread to every rank and writes the sums it gets."""

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr.typing import Int32, Int64

from m3lab.kernels.device import allreduce, gfx950
from m3lab.kernels.device.mailbox import launch_tag
from m3lab.layout.regions import peer_layout
from m3lab.model.shapes import ModelShape, RankShape

THREADS = 64
RANKS = 4
SHAPE = RankShape(ModelShape(hidden=2048), RANKS)


@fx.struct
class SharedMemory:
    unused: fx.Array[fx.Int32, 4, 16]


@flyc.kernel(name="rank_sum", known_block_size=[THREADS, 1, 1])
def rank_sum(mine: Int64, out: Int64, inbox: Int64, peers: Int64, rank: Int32, step: Int32):
    fx.SharedAllocator().allocate(SharedMemory)
    tid = fx.thread_idx.x
    ctx = SimpleNamespace(
        shape=SHAPE,
        spec=SimpleNamespace(npes=RANKS, peer_regions=peer_layout(SHAPE, RANKS)),
        args=SimpleNamespace(peers=peers, rank=rank),
        inbox=gfx950.buffer(inbox),
        tag=launch_tag(step, 3),
    )
    words = gfx950.load(gfx950.buffer(mine), tid * 8, 2)
    pair = [gfx950.bitcast_f32(words[i]) for i in range(2)]
    for address in allreduce.request_peers(ctx):
        allreduce.push(ctx, allreduce.inbox_at(address), "ffn", 2, 2 * tid, pair)
    sums = allreduce.rank_sum(ctx, "ffn", 2, 2 * tid)
    words = fx.Vector.from_elements([gfx950.bitcast_i32(x) for x in sums], fx.Int32)
    gfx950.store(gfx950.buffer(out), tid * 8, words)


@flyc.jit
def launch(
    mine: Int64,
    out: Int64,
    inbox: Int64,
    peers: Int64,
    rank: Int32,
    step: Int32,
    stream: fx.Stream = fx.Stream(None),  # noqa: B008
):
    rank_sum(mine, out, inbox, peers, rank, step).launch(grid=(1,), block=(THREADS,), stream=stream)
