"""The golden record: what twelve steps publish, how they are built and what the clock says of them.

A rebuild of the house must not change a bit of it: ``python tests/golden/record.py`` writes the
record anew, ``test_golden.py`` compares with it. Bits: a hash of every published view of every
rank. Build: the static figures and a hash of the assembly without the kernel's name. Times: the
modelled ones, to a nanosecond.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

from m3lab.clock.clock import Clock
from m3lab.compile import isa
from m3lab.kernels.tuning import Tuning
from m3lab.model.shapes import CacheLayout, RankShape
from m3lab.step import DecodeStep, StepResult, build_for

RECORD = Path(__file__).with_name("record.json")
STATIC = CacheLayout(static_scale=True)

# name -> DecodeStep's options; each has its own build
CASES = {
    "s1_solo": {"tokens": 1, "tp": 4, "npes": 1, "context": 8192, "until": None},
    "s1_ranks": {"tokens": 1, "tp": 4, "context": 8192, "until": None},
    "s2_ranks": {"tokens": 2, "tp": 4, "context": 2049, "until": None},
    "s4_solo": {"tokens": 4, "tp": 4, "npes": 1, "context": 8192, "until": None},
    "s4_ranks_timeline": {"tokens": 4, "tp": 4, "context": 8192, "until": None, "timeline": True},
    "s4_verify_padded": {
        "tokens": 4,
        "tp": 4,
        "npes": 1,
        "q_len": 2,
        "pad_rows": 2,
        "context": 300,
        "until": None,
    },
    "s3_tp8_solo": {"tokens": 3, "tp": 8, "npes": 1, "context": 2048, "until": None},
    "s1_tp2_ranks": {"tokens": 1, "tp": 2, "context": 2049, "until": None},
    "s2_long_static": {
        "tokens": 2,
        "tp": 4,
        "npes": 1,
        "context": 65_537,
        "layout": STATIC,
        "until": None,
    },
    "s4_o_proj": {"tokens": 4, "tp": 4, "context": 100, "until": "o_proj"},
    "s1_router": {"tokens": 1, "tp": 4, "npes": 1, "context": 129, "until": "router"},
    "s4_knobs": {
        "tokens": 4,
        "tp": 4,
        "npes": 1,
        "context": 2049,
        "until": None,
        "tuning": Tuning(score_copies=1, merge_in_output=True, shared_after_routing=False),
    },
}


def record_of(name: str) -> dict[str, object]:
    """The record of one case, as JSON holds it."""
    options = dict(CASES[name])
    shape = RankShape(tp=options.pop("tp"))
    step = DecodeStep(shape, **options)
    built = build_for(step, emit=("program", "asm", "size"))
    figures = asdict(isa.figures_of(built))
    figures.pop("name")
    clock = Clock()
    with step.prepare():
        result = step.run(clock=clock)
        failed = [v.name for v in step.verify(result) if not v.passed]
    return {
        "asm": _hash(re.sub(r"_ZN6flydsl\w+", "KERNEL", built.asm or "").encode()),
        "figures": figures,
        "bits": bits(result),
        "modelled_us": round(clock.modelled().step_modelled_us, 3),
        "failed": failed,
    }


def bits(result: StepResult) -> dict[str, str]:
    """View -> hash of its bytes on every rank."""
    names = sorted(result.ranks[0].tensors())
    return {
        name: _hash(
            b"".join(v.tensors()[name].contiguous().numpy().tobytes() for v in result.ranks)
        )
        for name in names
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def main(names: list[str]) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in names or CASES:
        known[name] = record_of(name)
        print(name, known[name]["modelled_us"], known[name]["failed"], flush=True)
        RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
