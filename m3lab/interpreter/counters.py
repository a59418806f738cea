"""What a run did: operations by class, bytes by space, polls, barriers, LDS conflicts.

Counts are of wave instructions at the interpreter's level (before the compiler's optimizations), a
row a stage (see ``Program.loc_stages``); per CTA where that tells something.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

LDS_BANKS = 64  # of 4 bytes on gfx950 (AMD CDNA4 ISA guide: LDS is 160 KB in 64 banks)
# lanes served together by width in bytes: a b128 access goes in four quarters, a b64 in two halves
_GROUP = {1: 64, 2: 64, 4: 64, 8: 32, 16: 16}


class Counters:
    """Counters of one run over ``n_ctas`` CTAs (all ranks)."""

    def __init__(self, n_ctas: int, device: torch.device, bank_conflicts: bool = True) -> None:
        self.n_ctas = n_ctas
        self.device = device
        self.bank_conflicts = bank_conflicts
        self.work: dict[tuple[str, str], torch.Tensor] = {}
        self.bytes: dict[tuple[str, str, str, str, str], int] = defaultdict(int)
        self.matrix_kinds: dict[tuple[str, str], int] = defaultdict(int)
        self.barriers: dict[str, int] = defaultdict(int)
        self.polls: dict[str, int] = defaultdict(int)
        self.poll_tries: dict[str, int] = defaultdict(int)
        self.lds_accesses: dict[str, int] = defaultdict(int)
        self.lds_cycles: dict[str, int] = defaultdict(int)
        self.lds_ideal: dict[str, int] = defaultdict(int)
        self._conflicts: dict[tuple[int, int, int], tuple[int, int]] = {}

    # ------------------------------------------------------------------ events

    def region(self, code: Any, act: Any, machine: Any) -> None:
        """A region ran once on these CTAs and waves."""
        ids = machine.ctas.ids[act.rows]
        n = len(act.waves)
        stages = machine.prepared.stages
        for stage, name, count in code.histogram:
            key = (stages[stage], name)
            total = self.work.get(key)
            if total is None:
                total = torch.zeros(self.n_ctas, dtype=torch.int64, device=self.device)
                self.work[key] = total
            total[ids] += count * n

    def matrix(self, op: Any, act: Any, machine: Any) -> None:
        c, w, _ = act.shape
        self.matrix_kinds[machine.prepared.stages[op.stage], op.kind] += c * w

    def barrier(self, op: Any, rows: torch.Tensor, machine: Any) -> None:
        self.barriers[machine.prepared.stages[op.stage]] += len(rows)

    def poll(self, op: Any, lanes: int, first: bool, machine: Any) -> None:
        """A polling loop went round once more for ``lanes`` lanes."""
        stage = machine.prepared.stages[op.stage]
        self.poll_tries[stage] += 1
        if first:
            self.polls[stage] += 1

    def access(
        self, op: Any, space: str, scope: str, buffer: str, what: str, nbytes: int, machine: Any
    ) -> None:
        self.bytes[machine.prepared.stages[op.stage], space, scope, buffer, what] += nbytes

    def lds(
        self, op: Any, addr: torch.Tensor, nbytes: int, act: Any, machine: Any, what: str
    ) -> None:
        """An LDS access: bytes, and cycles by bank conflicts from the actual addresses."""
        c, w, _ = act.shape
        stage = machine.prepared.stages[op.stage]
        self.bytes[stage, "lds", "cta", "lds", what] += c * w * 64 * nbytes
        if not self.bank_conflicts:
            return
        self.lds_accesses[stage] += c * w
        scale = c * (w // addr.shape[1])
        key = (id(machine.prepared), op.index, addr.shape[1])
        known = self._conflicts.get(key) if addr.shape[0] == 1 else None
        if known is None:  # addresses that differ by CTA: the first CTA's stand for all
            known = self._conflicts[key] = bank_cycles(addr[0], nbytes)
        self.lds_cycles[stage] += known[0] * scale
        self.lds_ideal[stage] += known[1] * scale

    # ------------------------------------------------------------------ tables

    def stages(self) -> list[str]:
        names = {k[0] for k in self.work} | {k[0] for k in self.bytes}
        return sorted(names)

    def by_stage(self) -> dict[str, dict[str, int]]:
        """Wave operations per stage and class, over all CTAs."""
        out: dict[str, dict[str, int]] = defaultdict(dict)
        for (stage, name), counts in self.work.items():
            out[stage][name] = int(counts.sum())
        return dict(out)

    def bytes_rows(self) -> list[dict[str, Any]]:
        """One row per stage, space, scope, buffer and direction."""
        names = ("stage", "space", "scope", "buffer", "what")
        return [dict(zip(names, k, strict=True), bytes=v) for k, v in sorted(self.bytes.items())]

    def summary(self) -> dict[str, Any]:
        """Everything as plain data (JSON-able)."""
        return {
            "work": self.by_stage(),
            "bytes": self.bytes_rows(),
            "matrix": {f"{s}:{k}": v for (s, k), v in self.matrix_kinds.items()},
            "barriers": dict(self.barriers),
            "polls": dict(self.polls),
            "poll_tries": dict(self.poll_tries),
            "lds_accesses": dict(self.lds_accesses),
            "lds_cycles": dict(self.lds_cycles),
            "lds_ideal": dict(self.lds_ideal),
        }


def bank_cycles(addr: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """(cycles, cycles without conflicts) of one access of all waves; ``addr`` [waves, 64 | 1].

    Rule: lanes are served in groups (64 lanes for up to 4 bytes, 32 for 8, 16 for 16 bytes); a
    group takes as many cycles as the most distinct words any one of the 64 banks must give; lanes
    reading the same word share it. Source: AMD CDNA ISA guides, "LDS bank conflicts"; 64 banks on
    gfx950.
    """
    group = _GROUP[nbytes]
    waves = addr.shape[0]
    if addr.shape[1] == 1:
        groups = waves * (64 // group)
        return groups, groups
    words = (addr.to(torch.int64) // 4).view(waves * (64 // group), group)
    per_lane = max(nbytes // 4, 1)
    spread = words[:, :, None] + torch.arange(per_lane, device=addr.device)
    flat = spread.flatten(1).sort(1).values
    distinct = torch.ones_like(flat, dtype=torch.bool)
    distinct[:, 1:] = flat[:, 1:] != flat[:, :-1]
    bank = flat % LDS_BANKS
    load = torch.zeros(len(flat), LDS_BANKS, dtype=torch.int64, device=addr.device)
    load.scatter_add_(1, bank, distinct.to(torch.int64))
    return int(load.max(1).values.sum()), len(flat)
