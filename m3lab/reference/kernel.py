"""The kernel reference: the layer with every quantization and rounding of the kernels in place.

Each stage is a function of plain tensors, so that it can be fed with a kernel's own published
inputs to that stage and compared with what the kernel published. Sums run in torch's order, not the
kernel's; integer outcomes follow the kernel's rules exactly. This module is the public face; the
stages live beside it.
"""

from m3lab.reference.attention import NEG, QuantizedRow, SplitPartials, merge, merged, split
from m3lab.reference.output import all_reduce, h_mid, output_partial
from m3lab.reference.selection import (
    Selection,
    context_blocks,
    index_key,
    select,
    sparse_table,
)

__all__ = [
    "NEG",
    "QuantizedRow",
    "Selection",
    "SplitPartials",
    "all_reduce",
    "context_blocks",
    "h_mid",
    "index_key",
    "merge",
    "merged",
    "output_partial",
    "select",
    "sparse_table",
    "split",
]
