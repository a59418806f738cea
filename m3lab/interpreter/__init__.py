"""Running traced FlyDSL kernels with no AMD GPU.

``Memory`` holds device memory, ``Launch`` names a Program with its arguments on a rank, ``run``
executes launches and checks them. Any FlyDSL kernel at the interpreter's level runs: nothing here
knows MiniMax-M3.
"""

from m3lab.interpreter.errors import (
    Deadlock,
    InterpreterError,
    LdsRace,
    Misaligned,
    NaNMade,
    NonUniform,
    OutOfBounds,
    PartialMask,
    ProgramOrder,
    StaleRead,
    UninitializedRead,
    UnknownOperation,
)
from m3lab.interpreter.machine import Checks
from m3lab.interpreter.memory import Allocation, Memory
from m3lab.interpreter.program import Program
from m3lab.interpreter.run import Launch, RunReport, run

__all__ = [
    "Allocation", "Checks", "Deadlock", "InterpreterError", "Launch", "LdsRace", "Memory",
    "Misaligned", "NaNMade", "NonUniform", "OutOfBounds", "PartialMask", "Program",
    "ProgramOrder", "RunReport", "StaleRead", "UninitializedRead", "UnknownOperation", "run",
]  # fmt: skip
