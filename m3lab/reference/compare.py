"""Comparing a kernel's results with a reference's, floats by norm and integers by their scores.

An integer outcome (blocks, experts, E8M0 bytes) must be equal, unless the numbers that decided it
are so close that one rounding could order them either way; these helpers draw that line. What is
compared, and the verdict on it, is ``m3lab.verify``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from m3lab.reference.numerics import INV_E4M3_MAX


def rel_l2(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in fp64; 0 for two zeros, inf for a non-finite difference."""
    got, want = got.double(), want.double()
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    error, norm = float((got - want).norm()), float(want.norm())
    if error == 0:
        return 0.0
    value = error / norm if norm > 0 else float("inf")
    return value if value == value else float("inf")


def same_order_within(
    got: Sequence[int], want: Sequence[int], scores: Tensor, tolerance: float
) -> bool:
    """Whether two orders of picks differ only where the scores are within ``tolerance``.

    ``scores``: [candidates], the reference's. Slot by slot, the scores of the two picks must be
    equal or no further apart than ``tolerance``, and nothing may be picked twice.
    """
    if len(got) != len(want) or len(set(got)) != len(got):
        return False
    return all(
        g == w or abs(float(scores[g]) - float(scores[w])) <= tolerance
        for g, w in zip(got, want, strict=True)
    )


def blocks_agree(
    got: Sequence[int], want: Sequence[int], scores: Tensor, pinned: Sequence[int], rounding: float
) -> bool:
    """Selected blocks equal except where the decisive scores are within one rounding.

    ``scores``: fp32 [blocks] as the reference has them; ``pinned``: blocks whose place no score
    decides, which must agree exactly; ``rounding``: relative to the largest finite score.
    """
    for g, w in zip(got, want, strict=False):
        if g != w and (g in pinned or w in pinned):
            return False
    finite = scores[torch.isfinite(scores)]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    return same_order_within(got, want, scores, rounding * largest)


def experts_agree(got: Sequence[int], want: Sequence[int], scores: Tensor, logits: Tensor) -> bool:
    """Chosen experts equal except where biased scores are within one bf16 rounding of a logit.

    ``scores``: fp32 [experts], sigmoid + bias; ``logits``: their bf16 values. The key drops seven
    bits of the score, a 2**-16 of it at most.
    """
    rounding = 2.0**-8 * float(logits.abs().max()) * 0.25  # a sigmoid's slope is at most 1/4
    return same_order_within(got, want, scores, rounding + 2.0**-16 * float(scores.abs().max()))


def scale_bytes_agree(got: Tensor, want: Tensor, amax: Tensor, rounding: float = 2.0**-7) -> bool:
    """E8M0 bytes equal except where the block's amax is within one rounding of a power's edge.

    ``amax``: fp32, the reference's, shaped as the bytes; ``rounding``: relative, default that of a
    bf16 element. At such an edge the two may be one step apart.
    """
    a = amax * INV_E4M3_MAX
    power = torch.exp2(torch.round(torch.log2(a.double())))
    edge = (a.double() / power - 1).abs() <= rounding
    step = (got.int() - want.int()).abs()
    return bool(((step == 0) | ((step == 1) & edge)).all())
