"""Small FlyDSL kernels for the interpreter's tests: words in, words out, one row a thread.

A test gives a function from input words (Int32) to result words; the kernel around it loads and
stores them. ``run_lanes`` builds, interprets and returns the results with the Program.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl._mlir import ir
from flydsl.expr import range_constexpr
from flydsl.expr.typing import Int64, as_ir_value

from m3lab.compile.trace import build
from m3lab.interpreter import Launch, Memory, Program, run
from m3lab.kernels.device import gfx950

Words = list[Any]


@fx.struct
class Lds:
    words: fx.Array[fx.Int32, 1024, 16]


Body = Callable[[Words], Sequence[Any]]


def lane_kernel(name: str, body: Body, n_in: int, n_out: int, block: int, grid: int) -> Any:
    """A launcher: thread t of CTA b maps row ``block * b + t`` of the input to the output's."""

    @flyc.kernel(name=name, known_block_size=[block, 1, 1])
    def kernel(source: Int64, target: Int64) -> None:
        fx.SharedAllocator().allocate(Lds).peek()
        row = fx.block_idx.x * block + fx.thread_idx.x
        given = gfx950.buffer(source)
        words = [gfx950.load(given, (row * n_in + i) * 4) for i in range(n_in)]
        results = body(words)
        wanted = gfx950.buffer(target)
        for i in range_constexpr(n_out):
            gfx950.store(wanted, (row * n_out + i) * 4, results[i])

    @flyc.jit
    def launch(
        source: Int64,
        target: Int64,
        stream: fx.Stream = fx.Stream(None),  # noqa: B008
    ) -> None:
        kernel(source, target).launch(grid=(grid,), block=(block,), stream=stream)

    return launch


@cache
def _build_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="m3lab-flykernels-")  # gone with the process


def build_cache() -> Path:
    return Path(_build_folder().name)


def program_of(launcher: Any, n_args: int) -> Program:
    made = build(launcher, [1 << 40] * n_args, emit=("program",), cache=build_cache())
    assert made.program is not None
    return made.program


def run_lanes(
    name: str, body: Body, rows: list[list[int]], n_out: int, *, block: int = 64, grid: int = 1
) -> tuple[list[list[int]], Program]:
    """Run ``body`` on ``rows`` (padded with zero rows to the launch) -> (result rows, Program)."""
    threads = block * grid
    padded = rows + [[0] * len(rows[0])] * (threads - len(rows))
    program = program_of(lane_kernel(name, body, len(rows[0]), n_out, block, grid), 2)
    memory = Memory()
    source = memory.upload("source", torch.tensor(padded, dtype=torch.int64).to(torch.int32))
    target = memory.alloc("target", threads * n_out * 4)
    run([Launch(program, [source.addr, target.addr])], memory)
    out = target.read(torch.int32, (threads, n_out)).tolist()
    return out[: len(rows)], program


# ---------------------------------------------------------------------- operations by name


def emit(kind: str, operands: Sequence[Any], /, *types: Any, **attributes: Any) -> list[Any]:
    """The MLIR operation ``kind`` on MLIR values; attributes as MLIR text or attributes."""
    made = {
        name: ir.Attribute.parse(value) if isinstance(value, str) else value
        for name, value in attributes.items()
    }
    return list(ir.Operation.create(kind, list(types), list(operands), made).results)


def one(kind: str, operands: Sequence[Any], result: Any, /, **attributes: Any) -> Any:
    """The only result of ``emit``."""
    (value,) = emit(kind, operands, result, **attributes)
    return value


def narrowed(word: Any, bits: int) -> Any:
    """The low bits of an i32 value as an integer of ``bits``."""
    return word if bits == 32 else one("arith.trunci", [word], int_type(bits))


def widened(value: Any) -> Any:
    """An integer of up to 32 bits as i32, its sign kept (i1: 0 or 1)."""
    bits = value.type.width
    if bits == 32:
        return value
    return one("arith.extui" if bits == 1 else "arith.extsi", [value], int_type(32))


def int_type(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def float_type(name: str) -> Any:
    return {"f32": ir.F32Type, "f16": ir.F16Type, "bf16": ir.BF16Type}[name].get()


def vector_type(n: int, element: Any) -> Any:
    return ir.VectorType.get([n], element)


def as_float(word: Any, name: str) -> Any:
    """The low bits of an i32 value as a float."""
    return one("arith.bitcast", [narrowed(word, 32 if name == "f32" else 16)], float_type(name))


def float_word(value: Any) -> Any:
    """A float's bits as i32, zeros above."""
    if value.type == ir.F32Type.get():
        return one("arith.bitcast", [value], int_type(32))
    return one("arith.extui", [one("arith.bitcast", [value], int_type(16))], int_type(32))


def constant(value: int, bits: int = 32) -> Any:
    return one("arith.constant", [], int_type(bits), value=f"{value} : i{bits}")


def values(words: Words) -> list[Any]:
    """MLIR values of FlyDSL words."""
    return [as_ir_value(w) for w in words]


def words_of(results: Sequence[Any]) -> list[Any]:
    """FlyDSL words of i32 MLIR values."""
    return [fx.Int32(r) for r in results]
