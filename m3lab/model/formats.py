"""Number formats and quantizers: E4M3, E2M1, E8M0, PTPC FP8, MXFP4, MXFP8, in torch.

At rest every quantized tensor is torch.uint8. The codecs here are the one place that knows bit
layouts; nothing here knows a weight's name or a kernel's order of bytes (that is ``shuffle``).
Format facts: OCP 8-bit and Microscaling specifications.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3lab.model.shapes import MX_BLOCK

E4M3_MAX = 448.0
E4M3_NAN = 0x7F  # and 0xFF
E2M1_MAX = 6.0
E8M0_NAN = 0xFF
PTPC_MIN_SCALE = 1e-30

CHUNK_BLOCKS = 1 << 13  # quantized together: 1 MB of fp32, whose temporaries stay in the cache

# The midpoint between 448 and the next step, 480: ties go to the even code, which is 448's, so a
# value rounds past 448 only above it.
_E4M3_LAST = 464.0
_INV_E4M3_MAX = torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _as_fp32(x: Tensor) -> Tensor:
    """``x`` as fp32 where that is exact; fp64 would round twice and is refused."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a quantizer takes fp32, bf16 or fp16, got {x.dtype}")
    return x.float()


def _as_bytes(x: Tensor, what: str) -> Tensor:
    if x.dtype != torch.uint8:
        raise ValueError(f"{what} must be torch.uint8, got {x.dtype}")
    return x


def bf16_round(x: Tensor) -> Tensor:
    """``x`` rounded to the nearest even bf16, in x's own dtype (fp32 or fp64)."""
    return x.to(torch.bfloat16).to(x.dtype)


# ------------------------------------------------------------------------------------------ E4M3


def e4m3_encode(x: Tensor, *, saturate: bool = False) -> Tensor:
    """E4M3 bytes of ``x``, rounded to nearest even, same shape.

    A value that rounds past 448 becomes NaN with its sign, as the part's conversion gives it;
    ``saturate`` clamps to +-448 first, as the kernels do where an input can exceed it. NaN stays.
    """
    x = _as_fp32(x)
    if saturate:
        x = x.clamp(-E4M3_MAX, E4M3_MAX)
    # torch's cast saturates, so what lies past the last midpoint is made NaN here
    code = x.to(torch.float8_e4m3fn).view(torch.uint8)
    return code if saturate else code | ((x.abs() > _E4M3_LAST) * E4M3_NAN).to(torch.uint8)


def e4m3_decode(code: Tensor) -> Tensor:
    """fp32 values of E4M3 bytes; 0x7F and 0xFF are NaN."""
    return _as_bytes(code, "E4M3 codes").view(torch.float8_e4m3fn).float()


# ------------------------------------------------------------------------------------------ E2M1


def e2m1_encode(x: Tensor) -> Tensor:
    """E2M1 codes 0..15 of ``x``, one a byte: nearest even, past 6 saturates. NaN is refused."""
    x = _as_fp32(x)
    if bool(torch.isnan(x).any()):
        raise ValueError("E2M1 has no NaN, and the tensor to encode holds one")
    a = x.abs()
    # codes step by 0.5 below 2, by 1 below 4, by 2 above: the coarsest grid that applies is the
    # least of the three, and torch.round goes to even, which is the even code on each grid
    code = torch.minimum(torch.round(a * 2), torch.round(a) + 2)
    code = torch.minimum(code, torch.round(a * 0.5) + 4).clamp_(max=7)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_decode(code: Tensor) -> Tensor:
    """fp32 values of E2M1 codes 0..15, one a byte."""
    code = _as_bytes(code, "E2M1 codes")
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES))
    return values[code.to(torch.int64)]


def e2m1_decode_packed(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> fp32 [..., K] values, without the codes in between."""
    packed = _as_bytes(packed, "packed E2M1")
    pairs = e2m1_decode(e2m1_unpack(torch.arange(256, dtype=torch.uint8)[:, None]))
    if packed.device.type != "cpu":
        return pairs.to(packed.device)[packed.to(torch.int64)].flatten(-2)
    # numpy takes 8-byte entries by byte indices eight times as fast as torch by int64 ones
    taken = pairs.view(torch.int64).flatten().numpy()[packed.numpy()]
    return torch.from_numpy(taken).view(torch.float32)


def e2m1_pack(code: Tensor) -> Tensor:
    """[..., K] codes -> [..., K/2] bytes, the lower k in the low nibble."""
    code = _as_bytes(code, "E2M1 codes")
    if code.shape[-1] % 2:
        raise ValueError(f"E2M1 packs pairs, so K must be even, got {code.shape[-1]}")
    return code[..., 0::2] | (code[..., 1::2] << 4)


def e2m1_unpack(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes 0..15."""
    packed = _as_bytes(packed, "packed E2M1")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


# ------------------------------------------------------------------------------------------ E8M0


def e8m0_decode(byte: Tensor) -> Tensor:
    """fp32 values 2^(b - 127) of E8M0 bytes; 255 is NaN."""
    byte = _as_bytes(byte, "E8M0 scales")
    # the byte is the exponent field, but 0 means 2^-127 (a subnormal), not zero
    bits = byte.to(torch.int32) << 23
    bits = torch.where(byte == 0, 1 << 22, bits)
    return torch.where(byte == E8M0_NAN, torch.nan, bits.view(torch.float32))


def mx_scale_byte(amax: Tensor) -> Tensor:
    """E8M0 byte of an MXFP8 block by the round-up rule, bit by bit as the kernels compute it.

    With a = amax * fp32(1/448): a's biased exponent, plus one where its mantissa is not zero,
    clamped to 1..254, so a zero block gives 1 and a NaN amax 254.
    """
    return _exponent_up(_as_fp32(amax) * _INV_E4M3_MAX)


def _exponent_up(a: Tensor) -> Tensor:
    """The E8M0 byte of the least power of two not below ``a`` (fp32, >= 0), within 1..254."""
    bits = a.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)
    return exponent.clamp_(1, 254).to(torch.uint8)


def _inverse_scale(byte: Tensor) -> Tensor:
    """fp32 2^(127 - b) for bytes 1..254."""
    return e8m0_decode(254 - byte)


# ------------------------------------------------------------------------------------ quantizers


def _mx_blocks(x: Tensor) -> Tensor:
    """[..., K] -> fp32 [..., K/32, 32]."""
    x = _as_fp32(x)
    if x.shape[-1] % MX_BLOCK:
        raise ValueError(f"an MX row must be a multiple of {MX_BLOCK} long, got {x.shape[-1]}")
    return x.unflatten(-1, (-1, MX_BLOCK))


def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 of ``x`` [..., K]: (E4M3 bytes [..., K], E8M0 bytes [..., K/32])."""
    blocks = _mx_blocks(x)
    scale = mx_scale_byte(blocks.abs().amax(-1))
    code = e4m3_encode(blocks * _inverse_scale(scale)[..., None], saturate=True)
    return code.flatten(-2), scale


def dequantize_mxfp8(code: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., K] of MXFP8 elements [..., K] and scales [..., K/32]."""
    _check_mx(code.shape, scale.shape, per_byte=1)
    return _apply_mx(e4m3_decode(code), scale)


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4 of ``x`` [..., K]: (packed E2M1 [..., K/2], E8M0 [..., K/32]).

    The scale is rounded up (the least 2^e with amax / 2^e <= 6), as MXFP8's is, so no element is
    clipped; the specification fixes the rule for MXFP8 only. Non-finite input is refused.
    """
    blocks = _mx_blocks(x)
    rows = blocks.flatten(0, -2)
    parts = [_mxfp4_blocks(part) for part in rows.split(CHUNK_BLOCKS)]
    packed = torch.cat([packed for packed, _ in parts]).reshape(*x.shape[:-1], x.shape[-1] // 2)
    return packed, torch.cat([scale for _, scale in parts]).reshape(blocks.shape[:-1])


def _mxfp4_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n, 32] -> (packed [n, 16], scale bytes [n])."""
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("MXFP4 holds finite values only, and the tensor to quantize does not")
    scale = _exponent_up(amax / E2M1_MAX)
    return e2m1_pack(e2m1_encode(blocks * _inverse_scale(scale)[..., None])), scale


def dequantize_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., K] of packed E2M1 [..., K/2] and scales [..., K/32]."""
    _check_mx(packed.shape, scale.shape, per_byte=2)
    return _apply_mx(e2m1_decode_packed(packed), scale)


def _check_mx(elements: torch.Size, scales: torch.Size, per_byte: int) -> None:
    k = elements[-1] * per_byte
    if elements[:-1] != scales[:-1] or k != scales[-1] * MX_BLOCK:
        raise ValueError(
            f"MX scales must be one per {MX_BLOCK} elements, "
            f"got {tuple(scales)} for {(*elements[:-1], k)}"
        )


def _apply_mx(values: Tensor, scale: Tensor) -> Tensor:
    return (values.unflatten(-1, (-1, MX_BLOCK)) * e8m0_decode(scale)[..., None]).flatten(-2)


def quantize_ptpc(w: Tensor) -> tuple[Tensor, Tensor]:
    """PTPC FP8 of a weight ``w`` [N, K]: (E4M3 bytes [N, K], fp32 scale [N]).

    scale = amax / 448 of the row, at least 1e-30.
    """
    w = _as_fp32(w)
    scale = (w.abs().amax(-1) / E4M3_MAX).clamp_(min=PTPC_MIN_SCALE)
    return e4m3_encode(w / scale[..., None], saturate=True), scale


def dequantize_ptpc(code: Tensor, scale: Tensor) -> Tensor:
    """fp32 [N, K] of PTPC bytes [N, K] and row scales [N]."""
    return e4m3_decode(code) * scale[..., None]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per-row FP8 of activations or cache heads [..., K]: (E4M3 bytes, fp32 scale [...]).

    scale = amax / 448 by true division, 1.0 where amax is 0 (K1's input and its K and V scales).
    """
    x = _as_fp32(x)
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / E4M3_MAX)
    return e4m3_encode(x / scale[..., None]), scale
