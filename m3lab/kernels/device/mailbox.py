"""The tagged pair protocol: hand-offs between CTAs, and between GPUs, with no flag and no atomic.

A pair is a value word and a tag word, written by one store and read by one load: when the tag is
this launch's, the value is there. Bulk data goes as plain words, with one pair as their flag. Where
the regions lie is ``memory_layout``'s matter, which stage uses which the stages'.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from m3lab.kernels.device import gfx950
from m3lab.layout.regions import PAIR_BYTES

POLL_BATCH = 12  # loads that are re-loaded together


@dataclass(frozen=True)
class MailboxView:
    """A region as a kernel addresses it: a buffer, the region's byte offset in it, the scope of its
    loads and stores (``gfx950.DEVICE`` between CTAs, ``gfx950.SYSTEM`` between GPUs)."""

    buffer: Any
    base: int
    cache: int


@dataclass(frozen=True)
class PairRange:
    """``pairs`` (1 or 2) consecutive pairs to poll, from pair ``index``; two start at an even
    index."""

    box: MailboxView
    index: Any
    pairs: int = 1


def further(box, pairs):
    """The box from ``pairs`` (a number) pairs on."""
    return MailboxView(box.buffer, box.base + pairs * PAIR_BYTES, box.cache)


def launch_tag(step, layer):
    """The tag of this launch's pairs; never 0, so zeroed memory never matches."""
    return step * 128 + layer + 1


def put_words(tag, box, index, words):
    """One or two integer words to pairs from ``index``, in one store."""
    both = [part for word in words for part in (word, tag)]
    value = fx.Vector.from_elements(both, fx.Int32)
    gfx950.store(box.buffer, index * PAIR_BYTES, value, base=box.base, cache=box.cache)


def put(tag, box, index, value):
    """One fp32 to pair ``index``."""
    put_words(tag, box, index, [gfx950.bitcast_i32(value)])


def put_bf(tag, box, element, values):
    """Two or four fp32 as bf16 to the pairs that hold elements from ``element``, in one store."""
    words = [gfx950.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    put_words(tag, box, element >> 1, words)


def poll(tag, requests, batch=POLL_BATCH):
    """Wait for every request's tags -> each one's list of value words.

    ``batch`` requests are loaded together and again together. The wait is a loop whose condition
    depends on its own loads, the first try included.
    """
    words = []
    for first in range(0, len(requests), batch):
        words += _poll_batch(tag, requests[first : first + batch])
    return words


def _poll_batch(tag, requests):
    counts = [2 * r.pairs for r in requests]

    def load_all():
        return [
            gfx950.load(r.box.buffer, r.index * PAIR_BYTES, n, base=r.box.base, cache=r.box.cache)
            for r, n in zip(requests, counts, strict=True)
        ]

    def pending(values):
        # All tags are the launch's when the least and the largest are: v_min3 / v_max3 in vector
        # registers, where comparing each one holds a mask a tag in SGPRs.
        tags = [value[i] for value, n in zip(values, counts, strict=True) for i in range(1, n, 2)]
        return (fx.min(*tags, tag) != tag) | (fx.max(*tags, tag) != tag)

    got = gfx950.poll_until(counts, load_all, pending)
    return [[v[i] for i in range(0, n, 2)] for v, n in zip(got, counts, strict=True)]
