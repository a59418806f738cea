"""Split attention over the selected keys, and the merge of its partitions.

One call is one token; ``split`` is one kv head of it. Quantizations and roundings are the
kernel's, in its order; sums run in whatever order torch takes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from m3lab.model.formats import E4M3_MAX, bf16_round, e4m3_decode, e4m3_encode
from m3lab.reference.numerics import INV_E4M3_MAX, LOG2E, exp2, f32, rcp

NEG = -3.4e38  # a masked score; seen in sp_m where a partition has no valid key


class SplitPartials(NamedTuple):
    """fp32: outputs [n_split, heads, 128] (bf16 values), maxima and sums [n_split, heads]."""

    sp_o: Tensor
    sp_m: Tensor
    sp_l: Tensor


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x`` with zero rows appended up to ``rows``."""
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def _key_scales(scale: Tensor | float, n_ctx: int, rows: int) -> Tensor:
    """fp32 [rows] scales of the selected keys; 0 past the context (never used there)."""
    out = torch.zeros(rows)
    scale = torch.as_tensor(scale, dtype=torch.float32)
    out[:n_ctx] = scale if scale.ndim == 0 else scale[:n_ctx]
    return out


def split(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor | float,
    v: Tensor,
    v_scale: Tensor | float,
    n_ctx: int,
    sm_scale: float,
    partition: int = 256,
    n_split: int = 8,
) -> SplitPartials:
    """Partial attention of one token's ``q`` [heads, 128] (bf16 values) over one kv head.

    ``k``, ``v``: E4M3 bytes [keys, 128] in selection order; ``k_scale``, ``v_scale``: fp32 [keys],
    or one number for a static-scale cache. Keys from ``n_ctx`` on are masked, whatever they hold.
    """
    rows = n_split * partition
    if not 0 < n_ctx <= min(rows, k.shape[0], v.shape[0]):
        raise ValueError(
            f"the selection's context must be 1..{min(rows, k.shape[0], v.shape[0])} keys, "
            f"got {n_ctx}"
        )
    keys = _padded(e4m3_decode(k[:n_ctx]), rows)
    values = _padded(e4m3_decode(v[:n_ctx]), rows)
    valid = torch.arange(rows) < n_ctx
    ks, vs = _key_scales(k_scale, n_ctx, rows), _key_scales(v_scale, n_ctx, rows)

    q8 = e4m3_decode(e4m3_encode(q.float()))
    score = (f32(sm_scale) * ks) * (q8 @ keys.t())  # [heads, rows]
    score = torch.where(valid, score, f32(NEG)).view(-1, n_split, partition)
    m = score.amax(-1)  # [heads, n_split]; a NaN goes through, as v_maximum3 lets it
    p = exp2((score - m[..., None]) * LOG2E)
    l_sum = p.sum(-1)

    vs = vs.view(n_split, partition)
    vmax = vs.amax(-1)
    to_fp8 = f32(E4M3_MAX) * rcp(vmax + f32(1e-8))
    p8 = e4m3_decode(e4m3_encode((vs * to_fp8[:, None]) * p))
    acc = torch.einsum("hsk,skd->shd", p8, values.view(n_split, partition, -1))
    inv_l = 1.0 / torch.where(l_sum > 0, l_sum, f32(1.0))
    o = bf16_round(((vmax * INV_E4M3_MAX)[:, None, None] * acc) * inv_l.t()[..., None])
    return SplitPartials(o, m.t().contiguous(), l_sum.t().contiguous())


class QuantizedRow(NamedTuple):
    """A row in E4M3 (uint8) and its fp32 scale (0-dim)."""

    bytes: Tensor
    scale: Tensor


def weighed(sp_o: Tensor, sp_m: Tensor, sp_l: Tensor) -> Tensor:
    """The partitions' outputs weighed together, not yet rounded: fp32 [heads, 128]."""
    top = sp_m.amax(0)
    weight = sp_l * exp2((sp_m - top) * LOG2E)
    total = torch.zeros_like(top)
    for w in weight:
        total = total + w
    total = torch.where(total > 0, total, f32(1.0))
    out = torch.zeros_like(sp_o[0], dtype=torch.float32)
    for w, o in zip(weight, sp_o.float(), strict=True):
        out = out + (w / total)[:, None] * o
    return out


def merged(sp_o: Tensor, sp_m: Tensor, sp_l: Tensor) -> Tensor:
    """``weighed`` rounded to bf16, as fp32 values."""
    return bf16_round(weighed(sp_o, sp_m, sp_l))


def merge(sp_o: Tensor, sp_m: Tensor, sp_l: Tensor) -> QuantizedRow:
    """A token's partitions (every head of the rank) -> o_proj's input: E4M3 [heads * 128], scale.

    scale = amax * fp32(1/448); the row is multiplied by rcp(scale), unclamped; a zero row is zeros.
    """
    return quantize_row(merged(sp_o, sp_m, sp_l).flatten())


def quantize_row(row: Tensor) -> QuantizedRow:
    """Per-token fp8 of an attention row (fp32 holding bf16 values)."""
    amax = row.abs().amax()
    scale = amax * INV_E4M3_MAX
    inv = torch.where(amax == 0, f32(0.0), rcp(scale))
    return QuantizedRow(e4m3_encode(row * inv), scale)


def merge_nearest(
    sp_o: Tensor, sp_m: Tensor, sp_l: Tensor, got: Tensor, rounding: float = 2.0**-20
) -> Tensor:
    """The merged row as fp32 that lies nearest to ``got`` (bytes times scale, fp32 [heads * 128])
    among those that one fp32 rounding before the two quantizations can make.

    A sum that lies on the edge of a bf16 or E4M3 step falls to either side by the order of its
    additions, and one such step is 3e-3 of a short row.
    """
    row = weighed(sp_o, sp_m, sp_l).flatten()
    best: Tensor | None = None
    for edge in (1.0, 1.0 - rounding, 1.0 + rounding):
        q = quantize_row(bf16_round(row * edge))
        value = e4m3_decode(q.bytes) * q.scale
        best = (
            value
            if best is None
            else torch.where((value - got).abs() < (best - got).abs(), value, best)
        )
    assert best is not None
    return best
