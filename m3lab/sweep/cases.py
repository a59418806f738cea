"""One case of a sweep: its identity, and running it in this process into one flat row.

A row is what ``cases.parquet`` holds: the case's own values, its status, the worst error per
intermediate, the modelled time, and text columns for what is nested (verdicts, counters, ISA
figures, stamps). Processes, time limits and resuming are ``m3lab.sweep.runner``'s.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3lab.kernels.plan import Plan
from m3lab.kernels.tuning import Tuning
from m3lab.model.shapes import CacheLayout, ModelShape, RankShape
from m3lab.sweep.results import clock_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

    from m3lab.clock.clock import Clock
    from m3lab.step import DecodeStep, StepResult
    from m3lab.verify.verdicts import Verdict

BUILT_TOKENS = 4  # the narrow form's rows; wider builds come with the wide stages


@dataclass(frozen=True)
class Case:
    """One build run once on one set of inputs.

    ``context`` is per request and counts the step's own new tokens. ``solo`` runs rank 0 of the
    ``tp`` shard alone. The last ``pad_rows`` of the ``tokens`` rows are padding. ``model`` holds
    ModelShape overrides as sorted (name, value) pairs, ``tuning`` the knobs that are not at their
    default. ``timeline``: the build stamps its timeline. ``clock``: the interpreter's run takes
    modelled times (the first one, where there are ``repetitions``).
    """

    tokens: int = 1
    context: int = 2048
    tp: int = 4
    solo: bool = False
    q_len: int = 1
    pad_rows: int = 0
    page_stride: int = 8
    static_scale: bool = False
    backend: str = "auto"
    until: str | None = None
    seed: int = 0
    repetitions: int = 1
    layers: int = 1
    checks: bool = True
    timeout_s: int = 900
    model: tuple[tuple[str, Any], ...] = ()
    tuning: tuple[tuple[str, Any], ...] = ()
    timeline: bool = False
    clock: bool = True

    def __post_init__(self) -> None:
        if self.tokens % self.q_len:
            raise ValueError(
                f"tokens must be a multiple of q_len, got tokens {self.tokens}, q_len {self.q_len}"
            )
        if self.context < self.q_len:
            raise ValueError(
                "context counts a request's own new tokens, so it is at least q_len: "
                f"got context {self.context}, q_len {self.q_len}"
            )
        if self.pad_rows >= self.tokens or self.pad_rows % self.q_len:
            raise ValueError(
                "pad_rows must leave a live row and be whole requests: a multiple of q_len "
                f"{self.q_len} below tokens {self.tokens}, got {self.pad_rows}"
            )
        if self.tokens > BUILT_TOKENS:
            raise ValueError(
                f"tokens {self.tokens}: the kernel is built for 1..{BUILT_TOKENS} tokens so far"
            )
        if self.backend == "hip":
            raise ValueError(
                "backend hip: launching on a HIP device is not built yet; use auto or interpreter"
            )
        if self.layers > 1:
            raise ValueError(
                f"layers {self.layers}: rotating layers is for timing on a HIP device, "
                "which is not built yet; use 1"
            )
        if self.context > self.shape.model.max_context:
            raise ValueError(
                f"context must be at most the model's max_context "
                f"{self.shape.model.max_context}, got {self.context}"
            )
        if self.timeline and not self.clock:
            raise ValueError(
                "timeline needs clock: without one every stamp of the interpreter is 0"
            )
        if self.tuning != (changed := changed_knobs(dict(self.tuning))):
            raise ValueError(
                f"tuning must be the changed knobs, sorted: {changed}, got {self.tuning}"
            )
        # refuses what no kernel is laid out for
        Plan(self.shape, self.tokens, self.npes, tuning=self.knobs)

    @property
    def npes(self) -> int:
        """Ranks that run and reduce together: 1 when solo, else the TP width."""
        return 1 if self.solo else self.tp

    @property
    def shape(self) -> RankShape:
        return RankShape(ModelShape(**dict(self.model)), self.tp)

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.page_stride, self.static_scale)

    @property
    def knobs(self) -> Tuning:
        return Tuning(**dict(self.tuning))

    @property
    def name(self) -> str:
        """A readable name, the same for the same case: ``s2_c2049_tp4_solo_static``."""
        parts = [f"s{self.tokens}", f"c{self.context}", f"tp{self.tp}"]
        parts += ["solo"] if self.solo else []
        parts += [f"q{self.q_len}"] if self.q_len > 1 else []
        parts += [f"pad{self.pad_rows}"] if self.pad_rows else []
        parts += ["stride16"] if self.page_stride == 16 else []
        parts += ["static"] if self.static_scale else []
        parts += [self.until] if self.until else []
        parts += [knob_name(name, value) for name, value in self.tuning]
        parts += ["timeline"] if self.timeline else []
        return "_".join(parts)

    @cached_property
    def key(self) -> str:
        """Name plus a digest of everything that decides the result (not the time limit)."""
        identity = {k: v for k, v in asdict(self).items() if k != "timeout_s"}
        text = json.dumps(identity, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Case:
        data = json.loads(text)
        for field in ("model", "tuning"):
            data[field] = tuple((name, value) for name, value in data[field])
        return cls(**data)


def changed_knobs(given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The knobs in ``given`` that are not at their default, as a case holds them.

    ValueError, in one sentence that begins with the knob's name, for one that no build has.
    """
    known = Tuning.__dataclass_fields__
    for name in given:
        if name not in known:
            raise ValueError(f"{name} is no knob; the knobs are {', '.join(known)}")
    return tuple(sorted(Tuning(**given).changes().items()))


def knob_name(name: str, value: Any) -> str:
    """A turned knob as a case's name tells it: ``score_copies1``, ``poll_all``, ``pad_rows_off``"""
    if value is True:
        return name
    return f"{name}_off" if value is False else f"{name}{value}"


def run_case(case: Case) -> dict[str, Any]:
    """Build, prepare, run and verify ``case`` here; its row's fields. Raises nothing foreseen."""
    from m3lab.interpreter.errors import InterpreterError

    try:
        return _measure(case)
    except InterpreterError as exc:
        return {"status": "failed", "error": f"{type(exc).__name__}: {exc}"}
    except Exception as exc:
        where = traceback.extract_tb(exc.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        return {"status": "error", "error": f"{type(exc).__name__}: {exc} ({at})"}


def _measure(case: Case) -> dict[str, Any]:
    from m3lab.clock.clock import Clock
    from m3lab.compile import isa
    from m3lab.report.floors import step_floors
    from m3lab.step import DecodeStep, build_for

    began = time.perf_counter()
    step = DecodeStep(
        case.shape,
        case.tokens,
        context=case.context,
        q_len=case.q_len,
        npes=case.npes,
        pad_rows=case.pad_rows,
        layout=case.layout,
        until=case.until,
        seed=case.seed,
        backend=case.backend,
        timeline=case.timeline,
        tuning=case.knobs,
    )
    built = build_for(step, emit=("program", "asm", "size"))
    build_s = time.perf_counter() - began
    with step.prepare():
        prepare_s = time.perf_counter() - began - build_s
        clock = Clock() if case.clock else None
        result = step.run(clock=clock, **_checks(case))
        verdicts = step.verify(result)
        verdicts += [_repeated(step, result, i) for i in range(1, case.repetitions)]
    figures = isa.figures_of(built)
    floors = step_floors(
        step.shape, step.seq_lens, step.npes, step.layout, _distinct_experts(step, result)
    )
    if step.until == "router":
        del floors["experts"]
    failed = [v for v in verdicts if not v.passed] + figures.problems()
    return {
        "status": "failed" if failed else "passed",
        "error": None if not failed else f"{len(failed)} checks failed, first: {failed[0]}",
        "checks_passed": sum(v.passed for v in verdicts),
        "checks_failed": sum(not v.passed for v in verdicts),
        "build_s": build_s,
        "build_cached": built.cached,
        "prepare_s": prepare_s,
        "interpreter_wall_s": result.seconds,
        **_times(clock),
        "stamps": packed(result.stamps),
        "waits": packed_waits(step, clock) if case.timeline and clock else None,
        **_errors(verdicts),
        "verdicts": json.dumps([asdict(v) for v in verdicts]),
        "counters": json.dumps(result.report.counters.summary()),
        "isa": json.dumps(asdict(figures)),
        "floors": json.dumps({name: asdict(floor) for name, floor in floors.items()}),
    }


def _times(clock: Clock | None) -> dict[str, Any]:
    """The modelled columns: microseconds, launch included; None where no clock ran.

    ``modelled`` is JSON: ``part`` (whose constants), ``clock`` (a digest of the model),
    ``rank_modelled_us`` by rank, and ``critical_path``, a mapping for each ``Hop``.
    """
    if clock is None:
        return {"modelled_us": None, "modelled": None}
    times = clock.modelled()
    nested = {
        "part": times.part,
        "clock": clock_fingerprint(),
        "rank_modelled_us": times.rank_modelled_us,
        "critical_path": [asdict(hop) for hop in clock.critical_path()],
    }
    return {"modelled_us": times.step_modelled_us, "modelled": json.dumps(nested)}


def packed(stamps: Sequence[Tensor]) -> str | None:
    """Stamps of a step's ranks, int64 [blocks, points] each, as text: base64 of zlib of int32.

    None where the build stamps nothing. ``m3lab.report.tables.stamps`` reads it back.
    """
    if not stamps:
        return None
    ticks = b"".join(rank.cpu().numpy().astype("<i4").tobytes() for rank in stamps)
    return base64.b64encode(zlib.compress(ticks, 9)).decode("ascii")


def packed_waits(step: DecodeStep, clock: Clock) -> str:
    """When each CTA waited for another one's words, as text: base64 of zlib of CSV.

    ``m3lab.report.tables.waits`` reads it back.
    """
    from m3lab.report import handoffs

    text = handoffs.waits(handoffs.polls(step, clock)).to_csv(index=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def _distinct_experts(step: DecodeStep, result: StepResult) -> int | None:
    """Routed experts that the rows chose together; None where the build ends before the router."""
    if step.until == "o_proj":
        return None
    chosen = result.ranks[0].experts
    return 0 if chosen is None else len(chosen[:, :-1].unique())


def _checks(case: Case) -> dict[str, Any]:
    """Options of the interpreter's run."""
    from m3lab.interpreter import Checks

    off = Checks(uninitialized=False, races=False, stale=False, order=False, bank_conflicts=False)
    return {} if case.checks else {"checks": off}


def _repeated(step: DecodeStep, first: StepResult, schedule: int) -> Verdict:
    """A further run under another schedule must publish the very same bits."""
    from m3lab.verify import same_bits

    return same_bits(first, step.run(seed=schedule, cta_groups=8), schedule)


def _errors(verdicts: list[Verdict]) -> dict[str, float]:
    """The worst error per intermediate and reference, as flat columns."""
    worst: dict[str, float] = {}
    for v in verdicts:
        name = f"{v.against}_{v.name}"
        worst[name] = max(worst.get(name, 0.0), v.error)
    return worst
