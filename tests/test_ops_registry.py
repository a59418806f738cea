"""Every operation kind that the specification names has an implementation, in one table only."""

from __future__ import annotations

import lane_arithmetic  # noqa: F401  (registers the operations)

from m3lab.interpreter.ops import CROSS, LANE, MATRIX

# handled by the machine: control, memory, scheduling, the clock
MACHINE = {
    "scf.if",
    "scf.for",
    "scf.while",
    "scf.condition",
    "scf.yield",
    "gpu.thread_id",
    "gpu.block_id",
    "gpu.block_dim",
    "gpu.grid_dim",
    "gpu.barrier",
    "gpu.return",
    "llvm.load",
    "llvm.store",
    "llvm.getelementptr",
    "llvm.inttoptr",
    "llvm.ptrtoint",
    "llvm.mlir.addressof",
    "llvm.addrspacecast",
    "llvm.fence",
    "llvm.call_intrinsic:llvm.amdgcn.s.memrealtime",
    "rocdl.make.buffer.rsrc",
    "rocdl.raw.ptr.buffer.load",
    "rocdl.raw.ptr.buffer.store",
    "rocdl.s.sleep",
    "rocdl.s.waitcnt",
    "rocdl.sched.barrier",
}

ELEMENTWISE = [
    "arith.constant",
    "arith.addi",
    "arith.subi",
    "arith.muli",
    "arith.andi",
    "arith.ori",
    "arith.xori",
    "arith.divsi",
    "arith.divui",
    "arith.remsi",
    "arith.remui",
    "arith.floordivsi",
    "arith.ceildivsi",
    "arith.ceildivui",
    "arith.shli",
    "arith.shrsi",
    "arith.shrui",
    "arith.cmpi",
    "arith.cmpf",
    "arith.select",
    "arith.maxsi",
    "arith.minsi",
    "arith.maxui",
    "arith.minui",
    "arith.addf",
    "arith.subf",
    "arith.mulf",
    "arith.divf",
    "arith.remf",
    "arith.negf",
    "arith.maximumf",
    "arith.minimumf",
    "arith.maxnumf",
    "arith.minnumf",
    "arith.extsi",
    "arith.extui",
    "arith.trunci",
    "arith.index_cast",
    "arith.index_castui",
    "arith.sitofp",
    "arith.uitofp",
    "arith.fptosi",
    "arith.fptoui",
    "arith.extf",
    "arith.truncf",
    "arith.bitcast",
    "arith.addui_extended",
    "arith.mulsi_extended",
    "arith.mului_extended",
    "math.absf",
    "math.fma",
    "math.ctpop",
    "math.ctlz",
    "math.cttz",
    "math.absi",
    "math.exp2",
    "math.log2",
    "math.sqrt",
    "math.rsqrt",
    "math.floor",
    "math.ceil",
    "math.trunc",
    "math.round",
    "math.roundeven",
    "vector.extract",
    "vector.insert",
    "vector.bitcast",
    "vector.from_elements",
    "vector.broadcast",
    "vector.shuffle",
    "vector.extract_strided_slice",
    "vector.insert_strided_slice",
    "vector.shape_cast",
    "vector.reduction",
    "llvm.extractvalue",
    "llvm.insertvalue",
    "llvm.bitcast",
    "llvm.mlir.undef",
    "llvm.mlir.poison",
    "llvm.mlir.zero",
    "llvm.mlir.constant",
    "llvm.intr.exp2",
    "llvm.call_intrinsic:llvm.amdgcn.exp2.f32",
    "llvm.call_intrinsic:llvm.exp2.f32",
    "llvm.call_intrinsic:llvm.amdgcn.rcp.f32",
    "llvm.call_intrinsic:llvm.amdgcn.rsq.f32",
    "llvm.call_intrinsic:llvm.expect.i1",
    "llvm.call_intrinsic:llvm.amdgcn.perm",
    "rocdl.exp2",
    "rocdl.rcp",
    "rocdl.rsq",
    "rocdl.log",
    "rocdl.sqrt",
    "rocdl.sin",
    "rocdl.cos",
    "rocdl.fmed3",
    "rocdl.cvt.pk.fp8.f32",
    "rocdl.cvt.pk.bf8.f32",
    "rocdl.cvt.pk.f32.fp8",
    "rocdl.cvt.pk.f32.bf8",
    "rocdl.cvt.f32.fp8",
    "rocdl.cvt.f32.bf8",
    "rocdl.cvt.pkrtz",
    "rocdl.cvt.scalef32.pk.f32.fp4",
    "rocdl.cvt.scalef32.pk.fp4.f32",
    "rocdl.cvt.scalef32.pk.f32.fp8",
    "rocdl.cvt.scalef32.pk.fp8.f32",
    "rocdl.fdot2",
    "rocdl.fdot2.f32.bf16",
    "rocdl.mbcnt.lo",
    "rocdl.mbcnt.hi",
]

BETWEEN_LANES = [
    "gpu.shuffle",
    "rocdl.ds_bpermute",
    "rocdl.ds_swizzle",
    "rocdl.readlane",
    "rocdl.readfirstlane",
    "rocdl.ballot",
    "rocdl.permlane16.swap",
    "rocdl.permlane32.swap",
    "rocdl.update.dpp",
    "llvm.call_intrinsic:llvm.amdgcn.update.dpp.i32",
    "llvm.call_intrinsic:llvm.amdgcn.permlane16.swap",
    "llvm.call_intrinsic:llvm.amdgcn.permlane32.swap",
]

MATRICES = [
    "rocdl.mfma.f32.16x16x32.fp8.fp8",
    "rocdl.mfma.f32.16x16x32.bf16",
    "rocdl.mfma.f32.16x16x32.f16",
    "rocdl.mfma.f32.16x16x16bf16.1k",
    "rocdl.mfma.f32.16x16x16f16",
    "rocdl.mfma.i32.16x16x32.i8",
    "rocdl.mfma.scale.f32.16x16x128.f8f6f4",
    "rocdl.mfma.scale.f32.32x32x64.f8f6f4",
]


def test_every_elementwise_kind_has_a_lane_function() -> None:
    assert set(ELEMENTWISE) <= set(LANE)


def test_every_cross_lane_kind_has_a_function_with_a_source_map() -> None:
    assert set(BETWEEN_LANES) <= set(CROSS)


def test_every_matrix_kind_has_a_function() -> None:
    assert set(MATRICES) <= set(MATRIX)


def test_no_kind_is_in_two_tables_or_is_the_machine_s() -> None:
    tables = (set(LANE), set(CROSS), set(MATRIX), MACHINE - set(LANE))
    for i, one in enumerate(tables):
        for other in tables[i + 1 :]:
            assert not one & other
