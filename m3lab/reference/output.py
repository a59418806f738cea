"""Output projection partials, the rank-ordered all-reduce, and the residual.

The same all-reduce finishes the attention half and the MLP half of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m3lab.model.formats import bf16_round, e4m3_decode
from m3lab.reference.numerics import e4m3_values, matmul_t


def output_partial(attnq: Tensor, scale: Tensor, w_o: Tensor, s_o: Tensor) -> Tensor:
    """One rank's partial rows, bf16 values in fp32 [..., hidden].

    ``attnq``: E4M3 bytes [..., o_k]; ``scale``: fp32 [...]; ``w_o``: E4M3 bytes [hidden, o_k], this
    rank's columns, or the same already decoded to fp32; ``s_o``: fp32 [hidden].
    """
    total = matmul_t(e4m3_decode(attnq), e4m3_values(w_o))
    return bf16_round((total * scale[..., None]) * s_o)


def all_reduce(partials: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum of the ranks' bf16 partials, in rank order in fp32, rounded to bf16 once."""
    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total = total + partial.float()
    return bf16_round(total)


def h_mid(a: Tensor, h_in: Tensor) -> Tensor:
    """The layer's middle residual, bf16(a + h_in), ``a`` being the all-reduced bf16 row."""
    return bf16_round(a.float() + h_in.float())
