"""How polling waves stand in each other's way, for the modelled clock.

A polling load passes the L2, and a channel of the memory side serves one line after another: who
polls queues with all that poll at that time, and with the words' writers. Three effects: the queue
of a try, in the fullest channel; what polls at earlier points of the program still ask for
meanwhile; and a writer's own polls, held back by those that already spin on what it will store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_LINE = 128  # bytes of a cache line
_KEPT = 64  # polls of a CTA that are remembered

Key = tuple[str, int]  # a program's name and an operation's place in it
Nth = tuple[str, int, int]  # and the how manieth time its polling loop is entered


@dataclass
class LockstepProfile:
    """What a lockstep run saw and a split schedule is given.

    ``streams``: the most CTAs of a rank that execute an operation together. ``polled``: of a poll,
    (the most waves of a rank on one line, lines asked for by all of them). ``beside``: lines that
    earlier polls still ask for, [CTAs]. ``held``: a writer's polls that are held back, [ranks].
    ``served``: when HBM had served each CTA's bursts, by their number: ns [CTAs, bursts].
    """

    streams: dict[Key, int] = field(default_factory=dict)
    polled: dict[Key, tuple[int, int]] = field(default_factory=dict)
    beside: dict[Nth, torch.Tensor] = field(default_factory=dict)
    held: dict[Nth, torch.Tensor] = field(default_factory=dict)
    served: torch.Tensor | None = None


@dataclass(frozen=True)
class Poll:
    """A polling load: whose, which, of which waves (``clock``'s choice of them), and where:
    ``offset`` in bytes per lane, ``live``: the lanes that poll, None: all."""

    machine: Any
    key: Key
    at: Any
    offset: torch.Tensor
    live: torch.Tensor | None


@dataclass
class _Loop:
    """The polling loop that a machine is in: its number, and what this try has asked for so far:
    (waves on the line most polled, lines)."""

    number: int = 0
    nth: int = 0
    tried: tuple[int, int] = (0, 0)


class PollContention:
    """The polls of one run. ``rank``: each CTA's, numbered from 0; ``given``: the census to go by,
    else ``census`` is filled."""

    def __init__(
        self,
        rank: torch.Tensor,
        given: LockstepProfile | None,
        census: LockstepProfile,
        channels: float,
    ) -> None:
        self.rank, self.given, self.census, self.channels = rank, given, census, channels
        self.n_ranks = int(rank.max()) + 1
        self.loops: dict[int, _Loop] = {}
        self.entered: dict[tuple[int, int], int] = {}
        self.number = 0
        # when each CTA's last polls ended, a column a polling loop; per machine the loops' spans
        self.ends = torch.zeros((len(rank), _KEPT), dtype=torch.float64, device=rank.device)
        self.spans: dict[int, dict[int, tuple[float, float, int]]] = {}

    def enter(self, machine: Any, index: int) -> None:
        """A machine enters the polling loop at ``index`` of its program."""
        self.number += 1
        nth = self.entered[id(machine), index] = self.entered.get((id(machine), index), -1) + 1
        self.loops[id(machine)] = _Loop(self.number, nth)
        self.ends[:, self.number % _KEPT] = 0

    def try_again(self, machine: Any) -> None:
        self.loops[id(machine)].tried = 0, 0

    def queues(self, poll: Poll, when: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Requests in the fullest channel's queue, and in a channel's on average, per wave: as many
        as poll one line, or an even share of what this try has asked for so far and what polls at
        earlier points of the program ask for at ``when`` (ns, per wave)."""
        loop = self.loops[id(poll.machine)]
        nth = (*poll.key, loop.nth)
        if self.given is None:
            if poll.key not in self.census.polled:
                self.census.polled[poll.key] = self._count(poll)
            self.census.beside[nth] = self._beside(poll, when)
        line, asked = self.census.polled.get(poll.key, (0, 0))
        loop.tried = max(loop.tried[0], line), loop.tried[1] + asked
        share = (loop.tried[1] + self.census.beside[nth][poll.at.cta]) / self.channels
        return share.clamp(min=loop.tried[0]), share

    def held_back(
        self, poll: Poll, now: torch.Tensor, seen: torch.Tensor, writer: torch.Tensor
    ) -> torch.Tensor:
        """How many polls the awaited word's writer made while this rank's waves already spun on the
        word, the mean over them: each stood in their queue. Per wave; 0 for who does not wait."""
        waits = seen > now
        nth = (*poll.key, self.loops[id(poll.machine)].nth)
        rank = self.rank[poll.at.cta]
        if self.given is None:
            then = self.ends[writer]
            polls = ((then > now[:, None]) & (then < seen[:, None])).sum(1) * waits
            total = torch.zeros(self.n_ranks, dtype=torch.float64, device=now.device)
            total.index_add_(0, rank, polls.to(torch.float64))
            count = torch.bincount(rank, minlength=self.n_ranks)
            self.census.held[nth] = total / count.clamp(min=1)
        return self.census.held[nth][rank] * waits

    def ended(self, poll: Poll, now: torch.Tensor, arrival: torch.Tensor) -> None:
        """A try that began ``now`` found its words at ``arrival`` (ns, per wave)."""
        loop = self.loops[id(poll.machine)]
        column = self.ends[:, loop.number % _KEPT]
        column.copy_(torch.maximum(column, poll.at.per_cta(arrival, "amax")))
        spans = self.spans.setdefault(id(poll.machine), {})
        begin, end, asked = float(now.min()), float(arrival.max()), loop.tried[1]
        if loop.number in spans:
            begin, end = min(begin, spans[loop.number][0]), max(end, spans[loop.number][1])
        spans[loop.number] = begin, end, asked

    def _beside(self, poll: Poll, when: torch.Tensor) -> torch.Tensor:
        """Lines that earlier polls of this machine's still ask for at a CTA's time: [CTAs]."""
        time = poll.at.per_cta(when, "amax")
        lines = torch.zeros_like(time)
        for number, (begin, end, asked) in self.spans.get(id(poll.machine), {}).items():
            if number != self.loops[id(poll.machine)].number:
                lines += asked * ((time >= begin) & (time <= end))
        return lines

    def _count(self, poll: Poll) -> tuple[int, int]:
        """(waves of a rank on the line most polled, lines polled by all of them together)."""
        at, offset, live = poll.at, poll.offset, poll.live
        step = max(offset.shape[2] // 8, 1)  # eight lanes of a wave name the lines it reads
        lines = offset[:, :, ::step] // _LINE
        lines = lines.expand(*at.size, lines.shape[2]).reshape(-1, lines.shape[2])
        if live is not None:
            on = live.any(-1).expand(at.size).reshape(-1)
            lines = torch.where(on[:, None], lines, -1)
        if at.local is not None:
            lines = lines[at.local]
        first = self.rank[at.cta[0]]
        lines = lines[self.rank[at.cta] == first]
        lines = lines.sort(1).values
        fresh = torch.ones_like(lines, dtype=torch.bool)
        fresh[:, 1:] = lines[:, 1:] != lines[:, :-1]
        asked = lines[fresh & (lines >= 0)]
        if not len(asked):
            return 0, 0
        return int(asked.unique(return_counts=True)[1].max()), len(asked)
