"""Who may read what another CTA wrote: stale reads and program order.

The rule, from the AMDGPU memory model (LLVM "User Guide for AMDGPU Backend", gfx942 / gfx950): a
store becomes visible to another CTA when it is made with that scope (sc1: device, sc0 sc1: system
between GPUs) or when its wave releases at that scope afterwards; a reader sees it when its load has
the scope or its wave acquired at that scope after it saw the flag. Plain words need such a flag:
the writer's stores must be complete (a release at agent scope or s_waitcnt vmcnt(0) by the storing
wave, then a barrier where another wave publishes) before the flag is stored. A polling load needs
no flag: the value it waits for is its own.

Time is ``Memory.stores``, the count of store operations executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from m3lab.interpreter.memory import Memory

NONE, DEVICE, SYSTEM = 0, 1, 2  # scopes
SCOPE_NAMES = {NONE: "no", DEVICE: "device", SYSTEM: "system"}
_CTA_BITS, _WAVE_BITS, _SCOPE_BITS = 16, 4, 4
_SEQ_SHIFT = _CTA_BITS + _WAVE_BITS + _SCOPE_BITS
_INF = 1 << 38


class Violation:
    """One bad read: reader (CTA, wave), the entry of its writer, and why it is bad."""

    def __init__(self, at: int, writer: int, seq: int, why: str) -> None:
        self.at, self.writer, self.seq, self.why = at, writer, seq, why


class Order:
    """Knowledge of every CTA (all ranks) about the others' stores, for one run of launches."""

    def __init__(self, memory: Memory, ranks: torch.Tensor, n_waves: int) -> None:
        n, device = len(ranks), memory.device
        self.memory = memory
        self.ranks = ranks
        self.n = n
        self.n_waves = n_waves
        self.start = memory.stores
        self.tick = 0  # orders acquires after what was seen before them
        self.known = torch.full((n * n,), -1, dtype=torch.int64, device=device)
        self.seen = torch.full((n * n,), _INF, dtype=torch.int64, device=device)
        self.pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.undrained = torch.full((n, n_waves), _INF, dtype=torch.int64, device=device)
        self.last_store = torch.full((n, n_waves), -1, dtype=torch.int64, device=device)
        self.covered = torch.full((n,), self.start - 1, dtype=torch.int64, device=device)
        self.released = torch.full((3, n, n_waves), -1, dtype=torch.int64, device=device)
        self.acquired = torch.full((3, n, n_waves), -1, dtype=torch.int64, device=device)
        self.covers = torch.full((256, n), -1, dtype=torch.int64, device=device)
        # per store since start: the operation's place in the program
        self.ops = torch.full((256,), -1, dtype=torch.int64, device=device)

    # ------------------------------------------------------------------ events

    def store(
        self, op_index: int, ctas: torch.Tensor, waves: torch.Tensor, scope: int
    ) -> torch.Tensor:
        """A store operation by waves (1-D, one entry an active wave): returns entry base per wave.

        Or-ing nothing more is needed: the entry names store, scope, wave and CTA.
        """
        seq = self.memory.stores
        self.memory.stores += 1
        row = seq - self.start
        if row >= len(self.covers):
            self.covers = torch.cat([self.covers, torch.full_like(self.covers, -1)])
            self.ops = torch.cat([self.ops, torch.full_like(self.ops, -1)])
        self.ops[row] = op_index
        if scope:
            own = self.undrained[ctas, waves] == _INF
            quiet = self.last_store[ctas] <= self.covered[ctas][:, None]
            quiet[torch.arange(len(ctas), device=quiet.device), waves] = True
            now = torch.where(own & quiet.all(1), seq, self.covered[ctas])
            self.covers[row].scatter_reduce_(0, ctas, now, "amax")
        self.undrained[ctas, waves] = torch.clamp(self.undrained[ctas, waves], max=seq)
        self.last_store[ctas, waves] = seq
        named = (seq << _SEQ_SHIFT) | (scope << (_CTA_BITS + _WAVE_BITS))
        return named | (waves << _CTA_BITS) | ctas

    def fence(
        self, ctas: torch.Tensor, waves: torch.Tensor, scope: int, acquire: bool, release: bool
    ) -> None:
        """A fence of agent (DEVICE) or SYSTEM scope by these waves; NONE scope orders nothing."""
        self.tick += 1
        for level in range(DEVICE, scope + 1):
            if release:
                self.released[level, ctas, waves] = self.memory.stores
            if acquire:
                self.acquired[level, ctas, waves] = self.tick
        if release and scope:
            self.drain(ctas, waves)

    def drain(self, ctas: torch.Tensor, waves: torch.Tensor) -> None:
        """The waves waited until their stores were acknowledged (s_waitcnt vmcnt(0))."""
        self.undrained[ctas, waves] = _INF

    def barrier(self, ctas: torch.Tensor) -> None:
        """A CTA barrier: what one wave drained or saw, all know."""
        drained = self.undrained[ctas].amin(1)
        now = torch.clamp(drained - 1, max=self.memory.stores - 1)
        self.covered[ctas] = torch.maximum(self.covered[ctas], now)
        if self.pending:
            inside = torch.zeros(self.n, dtype=torch.bool, device=ctas.device)
            inside[ctas] = True
            left = []
            for key, wave, cover in self.pending:
                hit = inside[key // self.n]
                if bool(hit.all()):
                    self._learn(key, cover)
                    continue
                self._learn(key[hit], cover[hit])
                left.append((key[~hit], wave[~hit], cover[~hit]))
            self.pending = left

    # ------------------------------------------------------------------ reads

    def load(
        self,
        op_index: int,
        entries: torch.Tensor,
        me: torch.Tensor,
        waves: torch.Tensor,
        scope: int,
        spin: bool,
        whole_cta: bool,
    ) -> Violation | tuple[int, int] | None:
        """Look at the writers of words just read (1-D: entry, reading CTA, reading wave).

        Returns a Violation, or (position, writer's operation) of a poll that a later program
        point satisfied, or None.
        """
        seq = entries >> _SEQ_SHIFT
        writer = entries & ((1 << _CTA_BITS) - 1)
        foreign = (seq >= self.start) & (writer != me) & (entries != 0)
        if not bool(foreign.any()):
            return None
        at = foreign.nonzero().flatten()
        seq, writer, me, waves = seq[at], writer[at], me[at], waves[at]
        entry = entries[at]
        its_wave = (entry >> _CTA_BITS) & ((1 << _WAVE_BITS) - 1)
        its_scope = (entry >> (_CTA_BITS + _WAVE_BITS)) & ((1 << _SCOPE_BITS) - 1)
        need = torch.where(self.ranks[writer] != self.ranks[me], SYSTEM, DEVICE)
        key = me * self.n + writer

        released = self.released[need, writer, its_wave] > seq
        bad = ~((its_scope >= need) | released)
        if bool(bad.any()):
            return self._violation(
                bad, at, writer, seq, need, "was stored without {0} scope and not released"
            )
        if scope < SYSTEM:
            acquired = self.acquired[need, me, waves] > self.seen[key]
            bad = ~((scope >= need) | acquired)
            if bool(bad.any()):
                return self._violation(
                    bad, at, writer, seq, need,
                    "is read without {0} scope and without an acquire since its flag was seen",
                )  # fmt: skip
        if spin:
            later = self.ops[seq - self.start] > op_index
            if bool(later.any()):
                i = int(later.nonzero()[0, 0])
                return int(at[i]), int(self.ops[seq[i] - self.start])
            cover = self.covers[seq - self.start, writer]
            if whole_cta:
                self._learn(key, cover)
            else:
                self.pending.append((key, waves, cover))
                self.seen[key] = self.tick
            return None
        unknown = self.known[key] < seq
        if bool(unknown.any()):
            for pkey, pwave, pcover in self.pending:
                ahead = unknown.nonzero().flatten()
                hit = (pkey[None] == key[ahead][:, None]) & (pwave[None] == waves[ahead][:, None])
                best = torch.where(hit, pcover[None], -1).amax(1)
                unknown[ahead] &= best < seq[ahead]
            for i in unknown.nonzero().flatten().tolist():
                unknown[i] = not self._relayed(int(me[i]), int(writer[i]), int(seq[i]))
                if unknown[i]:
                    break
            if bool(unknown.any()):
                return self._violation(
                    unknown, at, writer, seq, need,
                    "is read with no flag in between that covers the store",
                )  # fmt: skip
        return None

    def _relayed(self, me: int, writer: int, seq: int) -> bool:
        """Whether a CTA that ``me`` heard of, through any chain of flags, knew of the store.

        When along the chain is not looked at: a bound on the safe side of false alarms.
        """
        heard = self.known.view(self.n, self.n)
        reached = heard[me] >= self.start
        while True:
            wider = reached | (heard[reached] >= self.start).any(0)
            if bool((heard[wider, writer] >= seq).any()):
                return True
            if bool((wider == reached).all()):
                return False
            reached = wider

    def _learn(self, key: torch.Tensor, cover: torch.Tensor) -> None:
        self.known.scatter_reduce_(0, key, cover, "amax")
        self.seen[key] = self.tick

    def _violation(
        self,
        bad: torch.Tensor,
        at: torch.Tensor,
        writer: torch.Tensor,
        seq: torch.Tensor,
        need: torch.Tensor,
        why: str,
    ) -> Violation:
        i = int(bad.nonzero()[0, 0])
        scope = SCOPE_NAMES[int(need[i])]
        return Violation(int(at[i]), int(writer[i]), int(seq[i]), why.format(scope))

    def source(self, seq: int) -> int:
        """The operation (place in the program) of store ``seq``."""
        return int(self.ops[seq - self.start])
