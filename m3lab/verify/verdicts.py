"""What a comparison says: the ``Verdict``, its bounds, and how two tensors become one.

Nothing here knows a stage; ``verify`` and ``verify_mlp`` say what is compared with what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from m3lab.reference.compare import rel_l2

STAGE_BOUND = 2e-3  # relative L2 of a stage fed with the kernel's own inputs (model.md)
EXACT_ALARM = 1.2e-1  # relative L2 of the kernel's result against the exact reference (model.md)

Against = Literal["stage", "chained", "exact"]


@dataclass(frozen=True)
class Verdict:
    """One comparison. ``error``: relative L2, or the count of unequal values where ``bound`` is 0.

    ``against`` "stage": the kernel reference on the kernel's own inputs; "chained": the kernel
    reference from the step's inputs on; "exact": the fp32 reference. ``row`` None: all rows.
    """

    name: str
    rank: int
    row: int | None
    against: Against
    error: float
    bound: float | None
    passed: bool
    note: str = ""


def check_close(name: str, rank: int, row: int | None, got: Tensor, want: Tensor) -> Verdict:
    """Whether a stage's values are within its bound."""
    error = rel_l2(got, want)
    return Verdict(name, rank, row, "stage", error, STAGE_BOUND, error <= STAGE_BOUND)


def check_equal(name: str, rank: int, row: int | None, got: Tensor, want: Tensor) -> Verdict:
    """Whether every value is the same (a NaN never is)."""
    return check_exactly(name, rank, row, int((got != want).sum()))


def check_exactly(name: str, rank: int, row: int | None, unequal: int, note: str = "") -> Verdict:
    """Whether nothing differs, ``unequal`` values doing so."""
    return Verdict(name, rank, row, "stage", float(unequal), 0.0, unequal == 0, note)


def check_alarm(name: str, rank: int, got: Tensor, want: Tensor) -> Verdict:
    """Whether a result is as near to the exact reference as the number formats let it be."""
    error = rel_l2(got, want)
    return Verdict(name, rank, None, "exact", error, EXACT_ALARM, error <= EXACT_ALARM)


def reported(name: str, rank: int, against: Against, error: float) -> Verdict:
    """A figure without a bound."""
    return Verdict(name, rank, None, against, error, None, True, "reported, not bounded")


def unequal_bits(x: Tensor, y: Tensor) -> int:
    """Bytes that differ; NaN equals NaN."""
    return int((x.contiguous().view(torch.uint8) != y.contiguous().view(torch.uint8)).sum())
