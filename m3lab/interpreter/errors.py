"""What the interpreter can find wrong, one class a check.

Each error names the kernel's source line (innermost frame first), the CTA, wave and lane, and for
memory the region and the byte in it.
"""

from __future__ import annotations


class InterpreterError(RuntimeError):
    """A kernel did something a GPU would not forgive, or that the interpreter cannot run."""


class UnknownOperation(InterpreterError):
    """An operation kind nobody implemented: never approximated."""


class OutOfBounds(InterpreterError):
    """An access to memory outside every allocation, or across the end of one."""


class Misaligned(InterpreterError):
    """An access whose address is not a multiple of what the access needs."""


class UninitializedRead(InterpreterError):
    """A value that nothing wrote reached a store, a branch, an address or a used result."""


class Deadlock(InterpreterError):
    """No CTA can go on: every one waits for something that is not written."""


class ProgramOrder(InterpreterError):
    """A poll that only a write from a later point of the program satisfies."""


class LdsRace(InterpreterError):
    """Two waves touch an LDS word, one writing, with no barrier between."""


class StaleRead(InterpreterError):
    """A read that a GPU may serve from a cache, or before the write it means."""


class PartialMask(InterpreterError):
    """A barrier or a matrix operation that only a part of the wave (or CTA) reaches."""


class NonUniform(InterpreterError):
    """A value that must be the same over a wave and is not."""


class NaNMade(InterpreterError):
    """A floating-point NaN made from inputs that held none (optional check)."""
