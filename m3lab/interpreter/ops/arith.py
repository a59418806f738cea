"""Integer and float arithmetic (``arith``, and the ``llvm`` forms of the same).

Integers wrap. What LLVM leaves undefined is defined here, so that a lane that is masked off cannot
stop a run: a shift by the width or more gives 0 (sign bits for the arithmetic one), a division by
zero gives all ones and the dividend as remainder, the least integer over -1 gives itself. Floats
are IEEE at their own width, denormals kept; fast-math flags are ignored. Booleans are torch.bool.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from m3lab.interpreter.ops import lane_op
from m3lab.interpreter.ops.values import (
    BITS,
    INT64_MIN,
    as_bits,
    dtype_of,
    lanes_last,
    narrow,
    on_cpu_none,
    ordered,
    python_scalar,
    shift_right_logical,
    unsigned,
    wrap,
)
from m3lab.interpreter.program import Op, Type

Tensor = torch.Tensor

# ---------------------------------------------------------------------- constants


@lru_cache(maxsize=None)
def _constant(value: object, kind: Type, device: str) -> Tensor:
    dtype = dtype_of(kind)
    values = list(value) if isinstance(value, tuple) else [value]
    if not dtype.is_floating_point and dtype != torch.bool:
        values = [wrap(int(v), BITS[dtype]) for v in values]
    tensor = torch.tensor(values, dtype=torch.float64 if dtype.is_floating_point else dtype)
    tensor = narrow(tensor, dtype) if dtype.is_floating_point else tensor
    if kind.n:
        tensor = tensor.expand(kind.n) if len(values) == 1 else tensor
        return tensor.reshape(1, 1, 1, kind.n).contiguous().to(device)
    return tensor.reshape(1, 1, 1).to(device)


def constant_value(value: object, kind: Type, device: str | torch.device) -> Tensor:
    """A constant of type ``kind``, one lane wide; shared, so never write to it."""
    key = tuple(value) if isinstance(value, list) else value
    if isinstance(key, float) and key == 0.0:
        key = ("-0" if str(key)[0] == "-" else "0", 0.0)[1] if str(key)[0] != "-" else key
    return _constant(key, kind, str(device))
