"""Each rank's HBM over time, for the modelled clock: what CTAs ask for, and when it is served.

CTAs share the bandwidth whichever point of the program they are at: what one takes early another
waits for. Requests are served as a fluid: in a slot of time every CTA that still waits gets an
equal share, at most what one CU takes. An earlier point of the program has been served before a
later one is asked, so it goes first in a slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from m3lab.clock.device_model import DeviceModel

SLOT_NS = 50.0
_LINE = 128  # bytes of a cache line
Times = NDArray[np.float64]


class Chosen(Protocol):
    """The waves that make a request (``clock``): places in per-wave tensors, and their CTAs."""

    place: torch.Tensor
    cta: torch.Tensor

    def per_cta(self, values: torch.Tensor, how: str) -> torch.Tensor: ...


class Hbm:
    """Bandwidth of ``n_ranks`` parts in slots of 50 ns.

    ``rate``: bytes per ns of a part; ``cu_rate``: bytes per ns that one CU takes at most.
    """

    def __init__(self, n_ranks: int, rate: float, cu_rate: float) -> None:
        self.rate, self.cu_rate = rate, min(cu_rate, rate)
        self.used = np.zeros((n_ranks, 256))

    def serve(self, rank: NDArray[np.int64], start: Times, nbytes: Times) -> Times:
        """When the last byte of each request is served: ns, [requests]. ``rank``, ``start`` (ns)
        and ``nbytes`` are [requests], each of a CTA of its own."""
        left, end = nbytes.astype(np.float64), start.astype(np.float64)
        slot = int(start.min() // SLOT_NS) if len(start) else 0
        waiting = np.flatnonzero(left > 0)
        while len(waiting):
            if slot >= self.used.shape[1]:
                self.used = np.pad(self.used, ((0, 0), (0, slot)))
            opens = np.maximum(start[waiting], slot * SLOT_NS)
            span = (slot + 1) * SLOT_NS - opens
            now = span > 0
            if now.any():
                who, opens, span = waiting[now], opens[now], span[now]
                self._fill(slot, rank[who], who, opens, span, left, end)
                waiting = waiting[left[waiting] > 0]
            slot += 1
        return end

    def _fill(
        self, slot: int, rank: NDArray[np.int64], who: NDArray[np.intp], opens: Times, span: Times,
        left: Times, end: Times,
    ) -> None:  # fmt: skip
        """One slot: equal shares of what is free, then what small requests left over, once."""
        want = np.minimum(left[who], span * self.cu_rate)
        got = np.zeros_like(want)
        most = np.zeros_like(want)
        for _ in range(2):
            free = np.maximum(self.rate * SLOT_NS - self.used[:, slot], 0.0)
            asks = got < want
            share = (free / np.maximum(np.bincount(rank[asks], minlength=len(free)), 1))[rank]
            most = np.maximum(most, np.where(asks, got + share, 0.0))
            more = np.where(asks, np.minimum(want - got, share), 0.0)
            self.used[:, slot] += np.bincount(rank, more, len(free))
            got += more
        done = got >= left[who] - 1e-6
        # served at an even pace over the slot, at most the CU's
        pace = np.minimum(np.maximum(most, 1e-9) / span, self.cu_rate)
        end[who] = opens + np.where(done, np.minimum(got / pace, span), span)
        left[who] = np.where(done, 0.0, left[who] - got)


class Lines:
    """Which lines of memory a step has read from HBM: what is read again is in the Infinity Cache,
    which holds a step's weights whole. What several CTAs ask for at once is read once, and each
    waits for its share of it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.read = torch.zeros(nbytes // _LINE + 1, dtype=torch.bool, device=device)
        self.asked = torch.zeros(len(self.read), dtype=torch.float32, device=device)

    def share(
        self, offset: torch.Tensor, live: torch.Tensor | None, nbytes: int, size: tuple[int, int]
    ) -> torch.Tensor:
        """The part of each wave's load that HBM must serve, [c, w]: of a line 0 where it was read
        before, 1 / n where n waves ask for it now. ``offset``: arena bytes per lane, of ``nbytes``
        each; neighbours in a wave are taken to lie side by side, so one a line is looked at.
        ``size``: (c, w), where ``offset`` and ``live`` may have 1."""
        step = max(_LINE // nbytes, 1) if offset.shape[2] > 1 else 1
        line = offset[..., ::step] // _LINE
        line = line.expand(*size, line.shape[2])
        asks = torch.ones_like(line, dtype=torch.bool)
        if live is not None:
            asks = live[..., :: step if live.shape[2] > 1 else 1].expand(line.shape)
        fresh = asks & ~self.read[line]
        new = line[fresh]
        self.asked.index_add_(0, new, torch.ones(len(new), device=new.device))
        part = torch.where(fresh, 1 / self.asked[line].clamp(min=1), 0.0)
        self.read[new] = True
        self.asked[new] = 0
        return part.sum(-1, dtype=torch.float64) / asks.sum(-1).clamp(min=1)


class Bursts:
    """Each CTA's requests to HBM, by the burst: what it asks for before it waits for any of it.

    Two waves share a SIMD, and the older one issues all its requests before the younger one: when
    the younger one's first request is served, so are half of the later ones. When a burst is
    served is known when a wave first waits for a part of it.
    """

    def __init__(
        self, part: DeviceModel, rank: torch.Tensor, n_waves: int, given: torch.Tensor | None
    ) -> None:
        """``rank``: each CTA's, numbered from 0; ``given``: ``served`` of an earlier run."""
        self.rank, self.n_waves, self.given = rank, n_waves, given
        self.hbm = Hbm(int(rank.max()) + 1, part.hbm_gbs, part.cu_hbm_gbs)
        self.latency = part.hbm_ns
        n, device = len(rank), rank.device
        self.number = torch.zeros(n, dtype=torch.int64, device=device)
        self.open = torch.zeros(n, dtype=torch.bool, device=device)
        self.any_open = False
        # per CTA and burst: first request's time, bytes, those of them that HBM must serve, and
        # the time when all are served
        self.start, self.size, self.cold, self.served = (
            torch.zeros((n, 64), dtype=torch.float64, device=device) for _ in range(4)
        )
        self.cu_rate = part.cu_hbm_gbs
        self.all = torch.arange(n, device=device)
        # per wave: its last burst, and the bytes its CTA had asked for in it by then;
        # per loaded slot: the same of the wave's last request up to that load
        waves = n * n_waves
        self.last = torch.zeros(waves, dtype=torch.int64, device=device)
        self.asked = torch.zeros(waves, dtype=torch.float64, device=device)
        self.of_slot: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, at: Chosen, now: torch.Tensor, size: torch.Tensor, cold: torch.Tensor) -> None:
        """Requests of ``size`` bytes (a wave each) made ``now``, ``cold`` of them HBM's."""
        asked = at.per_cta(size, "sum")
        fresh = (asked > 0) & ~self.open
        self.number += fresh
        if int(self.number.max()) >= self.size.shape[1]:
            for name in ("start", "size", "cold", "served"):
                table = getattr(self, name)
                setattr(self, name, torch.cat([table, torch.zeros_like(table)], 1))
        first = at.per_cta(now, "amin")
        here = (self.all, self.number)
        self.start[here] = torch.where(fresh, first, self.start[here])
        self.size[here] += asked
        self.cold[here] += at.per_cta(cold, "sum")
        self.open |= fresh
        self.any_open = True
        some = size > 0
        self.last[at.place] = torch.where(some, self.number[at.cta], self.last[at.place])
        total = self.size[at.cta, self.number[at.cta]]
        self.asked[at.place] = torch.where(some, total, self.asked[at.place])

    def note(self, at: Chosen, slot: int) -> None:
        """A loaded value comes no earlier than its wave's requests to HBM before it."""
        if slot not in self.of_slot:
            self.of_slot[slot] = torch.zeros_like(self.last), torch.zeros_like(self.asked)
        number, asked = self.of_slot[slot]
        number[at.place], asked[at.place] = self.last[at.place], self.asked[at.place]

    def hand_on(self, at: Chosen, roots: tuple[int, ...], target: int) -> None:
        """``target`` comes with the latest of what ``roots`` come with."""
        if target not in self.of_slot:
            self.of_slot[target] = torch.zeros_like(self.last), torch.zeros_like(self.asked)
        number, asked = torch.zeros_like(at.place), at.place.to(torch.float64) * 0
        for root in roots:
            if root in self.of_slot:
                n, a = (t[at.place] for t in self.of_slot[root])
                later = (n > number) | ((n == number) & (a > asked))
                number, asked = torch.where(later, n, number), torch.where(later, a, asked)
        into = self.of_slot[target]
        into[0][at.place], into[1][at.place] = number, asked

    def end(self, at: Chosen, returned: torch.Tensor, roots: tuple[int, ...] | None = None) -> None:
        """Have HBM serve the bursts of these CTAs that are open, those that ``roots`` come with
        where given. ``returned``: per wave, when all its vector memory has; moved on."""
        if not self.any_open:
            return
        closing = torch.zeros_like(self.open)
        if roots is None:
            closing[at.cta] = True
        else:
            for root in roots:
                if root in self.of_slot:
                    mine = self.of_slot[root][0][at.place] == self.number[at.cta]
                    closing[at.cta[mine]] = True
        ctas = (closing & self.open).nonzero().flatten()
        if not len(ctas):
            return
        here = (ctas, self.number[ctas])
        if self.given is None:
            request = (self.rank[ctas], self.start[here], self.cold[here])
            ends = self.hbm.serve(*(x.cpu().numpy() for x in request))
            taken = self.start[here] + self.size[here] / self.cu_rate
            self.served[here] = torch.maximum(torch.from_numpy(ends).to(taken), taken)
        else:
            self.served[here] = self.given[here]
        self.open[ctas] = False
        self.any_open = bool(self.open.any())
        # what these waves request next returns after it
        there = torch.zeros_like(self.start[:, 0])
        there[ctas] = self.served[here] + self.latency
        mine = self.last == self.number.repeat_interleave(self.n_waves)
        latest = torch.maximum(returned, there.repeat_interleave(self.n_waves))
        returned.copy_(torch.where(mine, latest, returned))

    def wait(self, at: Chosen, slot: int, now: torch.Tensor) -> torch.Tensor:
        """``now``, or when the part of a burst that a slot's value comes with is there."""
        if slot not in self.of_slot:
            return now
        number, asked = (t[at.place] for t in self.of_slot[slot])
        here = (at.cta, number)
        start, size = self.start[here], self.size[here]
        share = (asked + size) / (2 * size.clamp(min=1))
        there = start + share * (self.served[here] - start) + self.latency
        return torch.where(number > 0, torch.maximum(now, there), now)
