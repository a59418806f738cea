"""What each operation kind does to lanes.

A lane function takes the ``Op`` and its operands as torch tensors and returns the result tensor
(or a tuple of them). Tensors are shaped [ctas or 1, waves or 1, 64 or 1], a vector value has one
more axis for its elements; a value stays at the smallest shape that broadcasts. A lane function
knows nothing of masks, memory or scheduling: the machine does.

* ``lane_op``: elementwise, results broadcast like the operands. Kinds without operands (constants,
  undefined values) take a ``device`` keyword, the CPU by default.
* ``cross_op``: moves between the 64 lanes of a wave; takes a ``mask`` keyword (the active lanes, or
  None: all) and returns (result, source): ``source`` gives per lane the lane it read (broadcastable
  to the result's shape), or None where that says nothing. ``crosslane.MOVES`` names the operands
  that are values on the move.
* ``matrix_op``: uses all 64 lanes of a wave together.

A struct (what a permlane swap gives) is a tuple. No function writes to its operands: they are
shared, constants among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LANE: dict[str, Callable[..., Any]] = {}
CROSS: dict[str, Callable[..., Any]] = {}
MATRIX: dict[str, Callable[..., Any]] = {}


def _register(table: dict[str, Callable[..., Any]], kinds: tuple[str, ...]) -> Callable[..., Any]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        for kind in kinds:
            if kind in table:
                raise RuntimeError(f"operation kind {kind} is registered twice")
            table[kind] = fn
        return fn

    return add


def lane_op(*kinds: str) -> Callable[..., Any]:
    """Register an elementwise operation."""
    return _register(LANE, kinds)


def cross_op(*kinds: str) -> Callable[..., Any]:
    """Register an operation that moves values between lanes."""
    return _register(CROSS, kinds)


def matrix_op(*kinds: str) -> Callable[..., Any]:
    """Register a wave-wide matrix operation."""
    return _register(MATRIX, kinds)
