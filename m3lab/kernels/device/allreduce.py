"""The tensor-parallel all-reduce inside a stage: push partials, sum them in rank order.

Each rank pushes its bf16 partials into every peer's inbox (one hop), or, in the owner form, into
the row group's owner's alone, which sums and gathers the sums to every rank (two hops, half the
bytes). The sum is over all ranks in rank order in fp32, the own one included, so every rank holds
the same bits.

No region is overwritten while a peer may still read it: to push layer L's MLP partials a rank must
have passed layer L's attention reduce, which needs every peer's attention push of layer L, which a
peer makes only after it has finished reading layer L-1's MLP region.
"""

import flydsl.expr as fx

from m3lab.kernels.device import gfx950, mailbox
from m3lab.kernels.device.context import inbox_view
from m3lab.kernels.device.mailbox import MailboxView, PairRange
from m3lab.model.shapes import MAX_TOKENS


def request_peer(ctx, peer):
    """Request the inbox address of rank ``peer``, a uniform index. Where the push ends a wait, this
    goes before it."""
    return gfx950.load(gfx950.buffer(ctx.args.peers), fx.Int32(peer) * 8, 2)


def request_peers(ctx):
    """Request every rank's inbox address, in rank order, this rank's own included."""
    return [request_peer(ctx, peer) for peer in range(ctx.spec.npes)]


def inbox_at(address):
    """A buffer at a requested address."""
    return gfx950.buffer(gfx950.uniform64(address.bitcast(fx.Int64)[0]))


def peer_view(ctx, buffer, name):
    """A region of the inbox that ``buffer`` is on."""
    return MailboxView(buffer, ctx.spec.peer_regions[name].offset, gfx950.SYSTEM)


def partial_element(ctx, source, token, element):
    """Element of [source rank][token][hidden] in ``attn`` and ``ffn``."""
    return (source * MAX_TOKENS + token) * ctx.shape.hidden + element


def push(ctx, buffer, name, token, element, pair):
    """This rank's two bf16 partials of ``token`` from ``element`` to a peer's inbox."""
    at = partial_element(ctx, ctx.args.rank, token, element)
    mailbox.put_bf(ctx.tag, peer_view(ctx, buffer, name), at, pair)


def rank_sum(ctx, name, token, element):
    """The two sums, fp32, of every rank's partials of ``token`` from ``element``."""
    box = inbox_view(ctx, name)
    sources = range(ctx.spec.npes)
    at = [partial_element(ctx, source, token, element) >> 1 for source in sources]
    parts = mailbox.poll(ctx.tag, [PairRange(box, index) for index in at])
    low, high = gfx950.f32(0.0), gfx950.f32(0.0)
    for (word,) in parts:
        one, two = gfx950.bf16_floats(word)
        low, high = low + one, high + two
    return low, high


def gather(ctx, buffers, name, token, element, sums):
    """The owner's two sums of ``token`` from ``element`` to every rank."""
    at = token * ctx.shape.hidden + element
    for buffer in buffers:
        mailbox.put_bf(ctx.tag, peer_view(ctx, buffer, name), at, sums)
