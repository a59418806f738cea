"""The loads of ``three_loads``: buffer loads of three words, added up."""

import flydsl.expr as fx
from flydsl._mlir.dialects import rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import Int32, Int64, T

from m3lab.kernels.marks import in_stage


def pointer(address):
    kind = fx.PointerType.get(fx.Int32.ir_type, fx.AddressSpace.Global, 4)
    return fx.inttoptr(kind, address)


@dsl_loc_tracing  # raw dialect builders record no call chain of their own
def raw_load(resource, offset):
    zero = Int32(0).ir_value()
    return Int32(rocdl.raw_ptr_buffer_load(T.i32, resource, offset.ir_value(), zero))


@in_stage("sum")
def sum_of_three(source, tid):
    resource = fx.rocdl.get_buffer_rsrc(fx.rocdl.make_buffer_ptr(pointer(source), Int64(4096)))
    first, second, third = (raw_load(resource, (tid + skip) * 4) for skip in (0, 100, 300))
    return first + second + third
