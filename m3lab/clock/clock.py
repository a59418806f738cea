"""Modelled time of an interpreted run: a time per wave, moved on by what the wave does.

A model, never a measurement: every figure it hands out is called modelled. What it knows of the
hardware is a ``Part``. The mechanism: an operation costs its class's issue; a load's result is
ready after the latency of where it is found and its share of bandwidth, and the wait is paid at its
first use (vector memory returns in order, as vmcnt counts it; what a CTA requests from HBM before
it waits for any of it is a burst, served together); a stored word can be seen by other
CTAs after a latency, and a poll ends when the latest of its words is seen; a barrier takes the
slowest wave. Time does not depend on the schedule: how many CTAs stream, or poll one line, at a
point of the program is a ``LockstepProfile``, which a lockstep run takes and a split schedule is
given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from m3lab.clock.device_model import DeviceModel, load_device_model
from m3lab.clock.events import Event, class_cost, scalar_load, weave
from m3lab.clock.hbm import Bursts, Lines
from m3lab.clock.polling import LockstepProfile, Poll, PollContention
from m3lab.interpreter.counters import bank_cycles
from m3lab.interpreter.memory import Memory
from m3lab.interpreter.order import NONE, SYSTEM
from m3lab.interpreter.prepare import Prepared

TICK_NS = 10.0  # s_memrealtime counts at 100 MHz
_SUB = 16  # a shadow entry's time counts sixteenths of a nanosecond
_CTA_BITS, _WAVE_BITS = 16, 4
_WHO_BITS = _CTA_BITS + _WAVE_BITS
_T, _V, _L = range(3)  # rows of the state: now, vector memory all returned, LDS all returned


@dataclass(frozen=True)
class Hop:
    """One hand-off: ``writer`` stored at ``stored_us`` what ``reader`` waited for until
    ``seen_us``. CTAs are (rank, block); ``line`` is the polling load's; times are modelled."""

    line: str
    stage: str
    writer: tuple[int, int]
    reader: tuple[int, int]
    asked_us: float
    stored_us: float
    seen_us: float


@dataclass
class Modelled:
    """A run's modelled times in microseconds, launch included: the whole step, per rank, and per
    CTA the end of its last wave (float64 [CTAs]). Never a measurement."""

    step_modelled_us: float
    rank_modelled_us: dict[int, float]
    cta_modelled_us: torch.Tensor
    part: str


class _Chosen:
    """The waves a region runs on, flat: places in the state, CTAs, and how many share a SIMD."""

    def __init__(self, clock: Clock, machine: Any, act: Any) -> None:
        c, w, _ = act.shape
        self.act, self.n_ctas = act, clock.n_ctas
        self.size = (c, w)
        ids = machine.ctas.ids[act.rows].view(-1, 1).expand(c, w)
        waves = act.waves.view(1, -1).expand(c, w)
        self.local = None
        if act.mask is not None:
            some = act.mask.any(-1).expand(c, w).reshape(-1)
            if not bool(some.all()):
                self.local = some.nonzero().flatten()
        self.cta, self.wave = self.pick(ids), self.pick(waves)
        self.place = self.cta * clock.n_waves + self.wave
        self.any = len(self.place) > 0
        if not self.any:
            return
        simd = self.cta * int(clock.part.simds) + self.wave % int(clock.part.simds)
        n = clock.n_ctas * int(clock.part.simds)
        self.share = torch.bincount(simd, minlength=n)[simd].to(torch.float64)
        busy = torch.bincount(self.cta, minlength=clock.n_ctas) > 0
        self.ctas_of_a_rank = int(torch.bincount(clock.ranks[busy]).max())

    def per_cta(self, values: torch.Tensor, how: str) -> torch.Tensor:
        """[CTAs] reduction of values per chosen wave; CTAs without one hold a neutral value."""
        start = {"amax": 0.0, "sum": 0.0, "amin": float("inf")}[how]
        out = torch.full((self.n_ctas,), start, dtype=torch.float64, device=values.device)
        return out.scatter_reduce(0, self.cta, values, how)

    def pick(self, per_wave: torch.Tensor) -> torch.Tensor:
        """A [c | 1, w | 1] tensor's values of the chosen waves, 1-D."""
        flat = per_wave.expand(self.size).reshape(-1)
        return flat if self.local is None else flat[self.local]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Values per chosen wave as [c, w], zero elsewhere."""
        if self.local is None:
            return values.view(self.size)
        out = values.new_zeros(self.size[0] * self.size[1])
        out[self.local] = values
        return out.view(self.size)


class Clock:
    """Modelled time of one run. Make a new one for each; pass it as ``run(..., clock=clock)``.

    ``census``: of an earlier lockstep run of the same launches; needed where ``cta_groups`` or
    ``delay`` split the grid. ``free``: stages (kernel files) whose work costs nothing, for what-if
    bounds; what they wait for is still waited for.
    """

    def __init__(
        self,
        part: DeviceModel | None = None,
        *,
        census: LockstepProfile | None = None,
        free: Iterable[str] = (),
    ) -> None:
        self.part = part or load_device_model()
        self.given = census
        self.census = census or LockstepProfile()
        self.free = frozenset(free)
        self.started = False

    # ------------------------------------------------------------------ a run

    def prepare(self, prepared: Prepared) -> Prepared:
        """``prepared`` with this clock's events."""
        timed = weave(prepared)
        name = prepared.program.name
        costs = {}
        for event in timed.events:
            shared = own = 0.0
            for (stage, kind), amount in event.work.items():
                if prepared.stages[stage] not in self.free:
                    a, b = class_cost(kind, self.part)
                    shared, own = shared + amount * a, own + amount * b
            costs[event.number] = (shared / self.part.clock_ghz, own / self.part.clock_ghz)
        self.costs[name] = costs
        return timed.prepared

    def begin(self, memory: Memory, ranks: torch.Tensor, n_waves: int, split: bool) -> None:
        """Start a run of ``len(ranks)`` CTAs of ``n_waves`` waves (ranks: each CTA's rank)."""
        if self.started:
            raise ValueError("a Clock times one run; make a new one for the next")
        if split and self.given is None:
            raise ValueError(
                "a split schedule (cta_groups, delay) needs the census of a lockstep run: "
                "Clock(census=earlier.census)"
            )
        self.started = True
        self.memory, self.ranks = memory, ranks
        self.n_ctas, self.n_waves, device = len(ranks), n_waves, memory.device
        self.costs: dict[str, dict[int, tuple[float, float]]] = {}
        n = self.n_ctas * n_waves
        self.state = torch.zeros((3, n), dtype=torch.float64, device=device)
        self.state[_T] = self.part.launch_ns
        self.pipes = {
            name: torch.zeros(self.n_ctas, dtype=torch.float64, device=device)
            for name in ("memory", "lds")
        }
        self.ready: dict[int, torch.Tensor] = {}
        self.rank = ranks.unique(return_inverse=True)[1]
        self.bursts = Bursts(
            self.part, self.rank, n_waves, self.given.served if self.given else None
        )
        self.lines = Lines(memory.used, device)
        self.spinning = PollContention(self.rank, self.given, self.census, self.part.channels)
        self.entered: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.shadow = memory.shadow_words()  # per word: (time seen, wave, CTA) of its last store
        self.starts, self.owners = memory.owners()
        self.polls: list[tuple[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.stores: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # waves, now, seen
        self._chosen: dict[int, _Chosen] = {}
        self._conflicts: dict[tuple[str, int, int], float] = {}

    def chosen(self, machine: Any, act: Any) -> _Chosen:
        known = self._chosen.get(id(act))
        if known is None or known.act is not act:
            if len(self._chosen) > 64:
                self._chosen.clear()
            known = self._chosen[id(act)] = _Chosen(self, machine, act)
        return known

    # ------------------------------------------------------------------ events

    def event(self, machine: Any, event: Event, act: Any) -> None:
        """Pay for what ran since the last event, and wait for what is used next."""
        at = self.chosen(machine, act)
        if not at.any:
            return
        if event.what == "round":
            # every round of a poll starts when the loop was entered: the clock models the round
            # that succeeds, however many tries the interpreter made
            self.state[:, at.place] = self.entered[id(machine), event.index][0][:, at.place]
            self.spinning.try_again(machine)
        now = self.state[_T, at.place]
        shared, own = self.costs[machine.program.name][event.number]
        if shared:
            share = at.share
            if event.polling is not None:  # the waves that entered, not those of this try
                share = self.entered[id(machine), event.polling][1][at.place]
            now = now + share * shared
        if own:
            now = now + own
        if event.waits:
            self._serve(at, event.waits)
        for root in event.waits:
            if root in self.ready:
                now = torch.maximum(now, self.ready[root][at.place])
                now = self.bursts.wait(at, root, now)
        if event.what == "barrier":
            now = torch.maximum(now, self.state[_L, at.place])
            last = at.per_cta(now, "amax")
            now = last[at.cta] + self.part.barrier_clk / self.part.clock_ghz
        elif event.what == "waitcnt":
            self._serve(at)
            now = torch.maximum(now, self.state[_V, at.place])
        self.state[_T, at.place] = now
        if event.what == "spin":
            # vector memory returns in order: what was requested before the poll comes first
            self._serve(at)
            share = torch.ones_like(self.state[_T])
            share[at.place] = at.share
            self.entered[id(machine), event.index] = self.state.clone(), share
            self.spinning.enter(machine, event.index)
        for roots, target in event.forward:
            self._forward(at, roots, target)

    def _forward(self, at: _Chosen, roots: tuple[int, ...], target: int) -> None:
        known = [self.ready[r][at.place] for r in roots if r in self.ready]
        if known:
            latest = known[0]
            for more in known[1:]:
                latest = torch.maximum(latest, more)
            self._ready(target)[at.place] = latest
            self.bursts.hand_on(at, roots, target)

    def _serve(self, at: _Chosen, roots: tuple[int, ...] | None = None) -> None:
        """What these waves wait for has been requested: HBM serves it."""
        self.bursts.end(at, self.state[_V], roots)
        if self.given is None:
            self.census.served = self.bursts.served

    def _ready(self, slot: int) -> torch.Tensor:
        if slot not in self.ready:
            self.ready[slot] = torch.zeros_like(self.state[_T])
        return self.ready[slot]

    def _queue(
        self, at: _Chosen, pipe: str, now: torch.Tensor, need: torch.Tensor | float
    ) -> torch.Tensor:
        """When each wave's transfer is over: a CTA's transfers use its pipe one after another."""
        busy = self.pipes[pipe]
        if isinstance(need, float):
            need = torch.full_like(now, need)
        total = at.per_cta(need, "sum")
        begin = torch.maximum(busy, at.per_cta(now, "amin"))
        end = begin + total
        self.pipes[pipe] = torch.where(torch.isinf(end), busy, end)
        return torch.maximum(end[at.cta], now + need)

    # ------------------------------------------------------------------ memory

    def access(
        self,
        machine: Any,
        op: Any,
        act: Any,
        offset: torch.Tensor,
        nbytes: int,
        found: list[Any],
        scope: int,
        live: torch.Tensor | None,
        what: str,
    ) -> None:
        """A load or store of global memory. ``offset``: arena bytes per lane; ``live``: lanes that
        really access memory, None: all."""
        at = self.chosen(machine, act)
        if not at.any:
            return
        now = self.state[_T, at.place]
        if machine.prepared.stages[op.stage] in self.free:
            if what == "load":
                seen = self._seen(at, offset, nbytes, live) if op.spin else now
                self._ready(op.results[0])[at.place] = torch.maximum(now, seen)
            else:
                self._publish(at, offset, nbytes, live, now)
            return
        if what == "store":
            self._store(machine, op, at, now, offset, nbytes, scope, live)
        elif op.spin:
            self._poll(machine, op, at, now, offset, nbytes, live)
        elif scalar_load(op, machine.program):
            self._ready(op.results[0])[at.place] = now + self.part.scalar_ns
        else:
            self._load(machine, op, at, now, offset, nbytes, found, scope, live)

    def _load(
        self, machine: Any, op: Any, at: _Chosen, now: Any, offset: Any, nbytes: int,
        found: list[Any], scope: int, live: Any,
    ) -> None:  # fmt: skip
        cold = scope == NONE and any(a.nbytes > self.part.warm_bytes for a in found)
        rate = self.part.cu_bytes_per_clk * self.part.clock_ghz  # bytes per ns
        latency: Any = self.part.hbm_ns if cold else self.part.warm_ns
        if scope != NONE:
            latency = self.part.device_ns
            if scope == SYSTEM:
                latency = latency + 2 * self.part.link_ns * self._remote(at, offset, live)
        size = self._bytes(at, offset, nbytes, live)
        arrival = self._queue(at, "memory", now, size / rate) + latency
        self._return(op, at, arrival)
        if cold:
            fresh = at.pick(self.lines.share(offset, live, nbytes, at.size))
            self.bursts.add(at, now, size, size * fresh)
        self.bursts.note(at, op.results[0])

    def _return(self, op: Any, at: _Chosen, arrival: torch.Tensor) -> None:
        arrival = torch.maximum(arrival, self.state[_V, at.place])
        self.state[_V, at.place] = arrival
        self._ready(op.results[0])[at.place] = arrival

    def _poll(
        self, machine: Any, op: Any, at: _Chosen, now: Any, offset: Any, nbytes: int, live: Any
    ) -> None:
        entry = self._latest(at, offset, nbytes, live)
        seen = _time(entry)
        poll = Poll(machine, (machine.program.name, op.index), at, offset, live)
        fullest, mean = self.spinning.queues(poll, torch.maximum(now, seen))
        held = self.spinning.held_back(poll, now, seen, _writer(entry))
        seen = seen + mean * held * self.part.poll_service_ns
        # who spins has a try in the queues when the word arrives, and then the one that finds it
        queue = fullest * self.part.poll_service_ns * torch.where(seen > now, 2.0, 1.0)
        arrival = torch.maximum(now, seen) + self.part.device_ns + queue
        self._return(op, at, arrival)
        self.spinning.ended(poll, now, arrival)
        self.polls.append((machine, op, at.place, entry, now))

    def _store(
        self, machine: Any, op: Any, at: _Chosen, now: Any, offset: Any, nbytes: int, scope: int,
        live: Any,
    ) -> None:  # fmt: skip
        size = self._bytes(at, offset, nbytes, live)
        need = size / (self.part.cu_bytes_per_clk * self.part.clock_ghz)
        seen = self._queue(at, "memory", now, need) + self.part.visible_ns
        if scope == SYSTEM:  # each peer has a link of its own, shared by the CTAs that push to it
            share = size * (self._streams(machine, op, at) / self.part.link_gbs)
            seen = seen + self._remote(at, offset, live) * (share + self.part.link_ns)
        self.state[_V, at.place] = torch.maximum(self.state[_V, at.place], seen)
        self._publish(at, offset, nbytes, live, seen)

    def _publish(
        self, at: _Chosen, offset: torch.Tensor, nbytes: int, live: Any, seen: torch.Tensor
    ) -> None:
        """Note from when the stored words can be seen, and whose they are."""
        self.stores.append((at.place, self.state[_T, at.place], seen))
        entry = _count(seen) << _WHO_BITS
        entry = at.spread(entry | (at.cta << _WAVE_BITS) | at.wave)
        if offset.shape[0] == 1:
            entry = entry.amax(0, keepdim=True)
        if offset.shape[1] == 1:
            entry = entry.amax(1, keepdim=True)
        shape = offset.shape if live is None else torch.broadcast_shapes(offset.shape, live.shape)
        lanes = entry.unsqueeze(-1).expand(shape)
        index = (offset // 4).expand(shape)
        if live is None:
            index, lanes = index.reshape(-1), lanes.reshape(-1)
        else:
            keep = live.expand(shape)
            index, lanes = index[keep], lanes[keep]
        for k in range((nbytes + 3) // 4):
            self.shadow[index + k] = lanes

    def _latest(
        self, at: _Chosen, offset: torch.Tensor, nbytes: int, live: torch.Tensor | None
    ) -> torch.Tensor:
        """The shadow entry seen last of the words each chosen wave reads."""
        index = offset // 4
        entry = self.shadow[index]
        for k in range(2, nbytes // 4, 2):  # a pair is stored whole
            entry = torch.maximum(entry, self.shadow[index + k])
        if live is not None:
            entry = torch.where(live, entry, 0)
        return at.pick(entry.amax(-1))

    def _seen(self, at: _Chosen, offset: Any, nbytes: int, live: Any) -> torch.Tensor:
        return _time(self._latest(at, offset, nbytes, live))

    def _bytes(
        self, at: _Chosen, offset: torch.Tensor, nbytes: int, live: torch.Tensor | None
    ) -> torch.Tensor:
        """Bytes each chosen wave moves; a lane-uniform address is one access."""
        lanes = offset.shape[2]
        if live is None:
            return torch.full(
                at.place.shape, float(lanes * nbytes), dtype=torch.float64, device=offset.device
            )
        used = live if lanes > 1 and live.shape[2] > 1 else live[..., :1]
        count = used.sum(-1) * (lanes if used.shape[2] == 1 else 1)
        return at.pick(count).to(torch.float64) * nbytes

    def _streams(self, machine: Any, op: Any, at: _Chosen) -> int:
        """CTAs of a rank that execute ``op`` at the same point of the program."""
        key = (machine.program.name, op.index)
        if self.given is None:
            self.census.streams[key] = max(at.ctas_of_a_rank, self.census.streams.get(key, 0))
        return max(self.census.streams.get(key, 0), 1)

    def _remote(self, at: _Chosen, offset: torch.Tensor, live: Any) -> torch.Tensor:
        """Whether each chosen wave's last live lane names another rank's memory."""
        if live is not None:
            offset = torch.where(live, offset, -1)
        first = at.pick(offset.amax(-1)).contiguous()
        owner = self.owners[torch.searchsorted(self.starts, first, right=True) - 1]
        return owner != self.ranks[at.cta]

    # ------------------------------------------------------------------ LDS

    def lds(self, machine: Any, op: Any, act: Any, addr: torch.Tensor, nbytes: int) -> None:
        """An LDS access of all waves of ``act``; conflicts counted from the addresses."""
        at = self.chosen(machine, act)
        if not at.any or machine.prepared.stages[op.stage] in self.free:
            return
        key = (machine.program.name, op.index, addr.shape[1])
        if key not in self._conflicts:  # the first CTA's addresses stand for all
            self._conflicts[key] = bank_cycles(addr[0], nbytes)[0] / addr.shape[1]
        now = self.state[_T, at.place]
        need = self._conflicts[key] / self.part.clock_ghz
        done = self._queue(at, "lds", now, need)
        done = torch.maximum(done, self.state[_L, at.place])
        if op.results:
            done = done + self.part.lds_latency_clk / self.part.clock_ghz
            self._ready(op.results[0])[at.place] = done
        self.state[_L, at.place] = done

    # ------------------------------------------------------------------ reading the clock

    def ticks(self, machine: Any, act: Any) -> torch.Tensor:
        """s_memrealtime of each wave: int64 [c, w, 1], 10 ns units."""
        at = self.chosen(machine, act)
        now = (self.state[_T, at.place] / TICK_NS).to(torch.int64)
        return at.spread(now).unsqueeze(-1)

    def modelled(self) -> Modelled:
        """The run's modelled times."""
        if not self.started:
            raise ValueError("this Clock has timed no run yet: pass it to run(..., clock=clock)")
        ends = torch.maximum(self.state[_T], self.state[_V]).view(self.n_ctas, self.n_waves)
        per_cta = ends.amax(1) / 1000
        per_rank = {
            int(r): float(per_cta[self.ranks == r].max()) for r in self.ranks.unique().tolist()
        }
        return Modelled(max(per_rank.values()), per_rank, per_cta.cpu(), self.part.name)

    def critical_path(self, blocks: torch.Tensor | None = None) -> list[Hop]:
        """Hand-offs the step's end was waiting for, first to last.

        From the CTA that ends last: its latest poll that had to wait, the CTA that stored the word
        it waited for, that CTA's latest poll before that, and so on. Waves of a CTA count as one.
        """
        ends = self.state[_T].view(self.n_ctas, self.n_waves).amax(1)
        cta = int(ends.argmax())
        before = float(ends[cta])
        hops: list[Hop] = []
        first = {int(r): int((self.ranks == r).nonzero()[0]) for r in self.ranks.unique().tolist()}

        def name(c: int) -> tuple[int, int]:
            rank = int(self.ranks[c])
            return rank, c - first[rank]

        while len(hops) < 1000:
            best: tuple[float, Any] | None = None
            for machine, op, place, entry, asked in self.polls:
                mine = place // self.n_waves == cta
                seen = _time(entry)
                mine &= (seen > asked) & (seen < before)
                if bool(mine.any()):
                    at = torch.where(mine, seen, -1.0).argmax()
                    if best is None or float(seen[at]) > best[0]:
                        best = float(seen[at]), (machine, op, int(entry[at]), float(asked[at]))
            if best is None:
                break
            seen_at, (machine, op, word, asked_at) = best
            writer = int(_writer(word))
            stored = self._stored(word)
            hops.append(
                Hop(
                    machine.line(op), machine.prepared.stages[op.stage], name(writer), name(cta),
                    asked_at / 1000, stored / 1000, seen_at / 1000,
                )
            )  # fmt: skip
            cta, before = writer, stored
        return hops[::-1]

    def _stored(self, word: int) -> float:
        """When the store of a shadow entry's word was issued, ns."""
        wave = int(_writer(word)) * self.n_waves + (word & ((1 << _WAVE_BITS) - 1))
        for place, now, seen in reversed(self.stores):
            same = (place == wave) & (_count(seen) == word >> _WHO_BITS)
            if bool(same.any()):
                return float(now[same][0])
        raise AssertionError("a word that was waited for was stored")


def _count(seen: torch.Tensor) -> torch.Tensor:
    """A time in ns as a shadow entry holds it."""
    return (seen * _SUB).round().to(torch.int64)


def _time(entry: torch.Tensor) -> torch.Tensor:
    """A shadow entry's time in ns."""
    return (entry >> _WHO_BITS).to(torch.float64) / _SUB


def _writer(entry: Any) -> Any:
    """The CTA that stored a shadow entry's word."""
    return (entry >> _WAVE_BITS) & ((1 << _CTA_BITS) - 1)
