"""safetensors -> LayerWeights: one layer of a published or saved checkpoint, one tensor at a time.

Takes the published names (with or without ``language_model.``) and transformers' own, plain and
quantized tensors alike; it renames and quantizes, and knows no kernel's byte order. Names: the
published checkpoint and transformers' conversion table for ``minimax_m3_vl``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m3lab.model.formats import (
    E8M0_NAN,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_ptpc,
    quantize_mxfp4,
    quantize_ptpc,
)
from m3lab.model.shapes import MX_BLOCK, ModelShape
from m3lab.model.weights import (
    PROJECTIONS,
    Experts,
    LayerWeights,
    empty_experts,
    expert_entries,
    weight_specs,
)

INDEX_NAME = "model.safetensors.index.json"
LAYER_PREFIXES = (
    "language_model.model.layers.{}.",  # the published multimodal checkpoint
    "model.layers.{}.",  # its text model alone, and transformers' text-only class
    "model.language_model.layers.{}.",  # transformers' multimodal class, as its modules are named
)
FLOATS = {"BF16", "F16", "F32"}
# A layer's tensor -> the names it goes by after the layer's prefix: published, transformers'.
NAMES: dict[str, tuple[str, ...]] = {
    "g_in": ("input_layernorm.weight",),
    "g_post": ("post_attention_layernorm.weight",),
    "g_q": ("self_attn.q_norm.weight",),
    "g_k": ("self_attn.k_norm.weight",),
    "g_iq": ("self_attn.index_q_norm.weight", "self_attn.indexer.q_norm.weight"),
    "g_ik": ("self_attn.index_k_norm.weight", "self_attn.indexer.k_norm.weight"),
    "w_q": ("self_attn.q_proj.weight",),
    "w_k": ("self_attn.k_proj.weight",),
    "w_v": ("self_attn.v_proj.weight",),
    "w_o": ("self_attn.o_proj.weight",),
    "w_iq": ("self_attn.index_q_proj.weight", "self_attn.indexer.q_proj.weight"),
    "w_ik": ("self_attn.index_k_proj.weight", "self_attn.indexer.k_proj.weight"),
    "w_gate": ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
    "bias": (
        "block_sparse_moe.e_score_correction_bias",
        "mlp.gate.e_score_correction_bias",
        "block_sparse_moe.gate.e_score_correction_bias",
    ),
}
MOE_NAMES = ("block_sparse_moe", "mlp")
SCALE_SUFFIXES = ("_scale_inv", "_scale")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: which tensor or file, what was expected and found."""


Kind = Literal["float", "ptpc", "mxfp8", "mxfp4"]


@dataclass
class Stored:
    """A matrix [N, K] as a checkpoint holds it: fp32 values, or bytes with their scales."""

    kind: Kind
    data: Tensor
    scale: Tensor | None = None

    def values(self) -> Tensor:
        """fp32 [N, K]."""
        if self.scale is None:
            return self.data
        if self.kind == "ptpc":
            return dequantize_ptpc(self.data, self.scale)
        if self.kind == "mxfp8":
            return dequantize_mxfp8(self.data, self.scale)
        return dequantize_mxfp4(self.data, self.scale)

    def as_ptpc(self) -> tuple[Tensor, Tensor]:
        """E4M3 bytes [N, K] and fp32 row scales [N]; taken as they are where so stored."""
        if self.kind == "ptpc" and self.scale is not None:
            return self.data, self.scale
        return quantize_ptpc(self.values())

    def as_mxfp4(self) -> tuple[Tensor, Tensor]:
        """Packed E2M1 [N, K/2] and E8M0 [N, K/32]; taken as they are where so stored."""
        if self.kind == "mxfp4" and self.scale is not None:
            return self.data, self.scale
        return quantize_mxfp4(self.values())


class Shards:
    """The tensors of a safetensors file, or of a directory of them, opened as they are needed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[Path, Any] = {}
        if self.path.is_file():
            self._files = dict.fromkeys(self._handle(self.path).keys(), self.path)
        elif (self.path / INDEX_NAME).is_file():
            self._files = self._indexed(self.path / INDEX_NAME)
        else:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{self.path}: no safetensors file and no {INDEX_NAME}")
            self._files = {name: f for f in files for name in self._handle(f).keys()}  # noqa: SIM118

    def _indexed(self, index: Path) -> dict[str, Path]:
        try:
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): self.path / shard for name, shard in shards.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{index}: not an index with a weight_map ({exc})") from exc

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), "pt").__enter__()
            except (SafetensorError, OSError) as exc:
                raise CheckpointError(f"{file}: not a whole safetensors file ({exc})") from exc
        return self._open[file]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def head(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype as the file spells it, shape) of a tensor, without reading it."""
        try:
            part = self._handle(self._files[name]).get_slice(name)
        except SafetensorError as exc:
            raise CheckpointError(
                f"{name}: not in {self._files[name]}, where the index has it"
            ) from (exc)
        return part.get_dtype(), tuple(part.get_shape())

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """A tensor, or its slice ``entry`` along the first dimension; 8-bit types as uint8."""
        handle = self._handle(self._files[name])
        try:
            t = handle.get_tensor(name) if entry is None else handle.get_slice(name)[entry]
        except (SafetensorError, RuntimeError) as exc:
            raise CheckpointError(f"{name}: cannot be read ({exc})") from exc
        return t.contiguous().view(torch.uint8) if t.element_size() == 1 else t

    def close(self) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_layer(
    path: str | Path,
    layer: int,
    shape: ModelShape | None = None,
    *,
    experts: Experts = "all",
) -> LayerWeights:
    """Layer ``layer`` of the checkpoint at ``path`` (a directory, or one safetensors file).

    ``shape``: the model's; None reads the directory's config.json. ``experts`` as in
    ``random_layer``: the routed experts to load, None for attention and router only.

    bf16 (fp16, fp32) matrices are quantized while they load: projections to PTPC FP8, experts to
    MXFP4. What already is PTPC FP8 or MXFP4 is taken as it is; an MXFP8 shared expert too, while
    other MXFP8 matrices are requantized to what the kernels take. Raises CheckpointError naming
    the tensor, the expected and the found shape where one is missing, misshapen, of another
    dtype or not finite, and naming the file where it is not a whole safetensors file.
    """
    if shape is None:
        config = Path(path) / "config.json"
        if not config.is_file():
            raise CheckpointError(f"{path}: the model shape must be given, there is no config.json")
        shape = ModelShape.from_config(config)
    with Shards(path) as shards:
        return _Loader(shards, shape, layer).load(experts)


class _Loader:
    """One layer's names and checks over open shards."""

    def __init__(self, shards: Shards, shape: ModelShape, layer: int) -> None:
        self.shards, self.shape = shards, shape
        self.prefix = self._find_prefix(layer)

    def _find_prefix(self, layer: int) -> str:
        prefixes = [p.format(layer) for p in LAYER_PREFIXES]
        for prefix in prefixes:
            if prefix + NAMES["g_in"][0] in self.shards:
                return prefix
        raise CheckpointError(
            f"layer {layer} is not in {self.shards.path}: expected "
            f"{prefixes[0]}{NAMES['g_in'][0]} of shape ({self.shape.hidden},), found no such "
            f"tensor, nor under {' or '.join(prefixes[1:])}"
        )

    def load(self, experts: Experts) -> LayerWeights:
        specs = weight_specs(self.shape)
        t: dict[str, Tensor] = {}
        for name in ("g_in", "g_post", "g_q", "g_k", "g_iq", "g_ik", "w_gate", "bias"):
            size, dtype = specs[name]
            t[name] = self.float_tensor(self.find(NAMES[name], size), size).to(dtype)
        for p in PROJECTIONS:
            size, _ = specs[f"w_{p}"]
            stored = self.matrix(self.find(NAMES[f"w_{p}"], size), size)
            t[f"w_{p}"], t[f"s_{p}"] = stored.as_ptpc()
        entries = expert_entries(self.shape, experts)
        if not entries:
            return LayerWeights(self.shape, **t, present=())
        t |= empty_experts(self.shape)
        for e in entries[:-1]:
            self._put(t, e, *self.routed(e))
        gate_up, down = self.shared()
        if all(m.kind == "mxfp8" for m in (*gate_up, down)):
            t |= _mxfp8_tables(gate_up, down)
            entries = entries[:-1]
        else:
            self._put(t, self.shape.experts, gate_up, down)
        return LayerWeights(self.shape, **t, present=entries)

    def _put(
        self, t: dict[str, Tensor], entry: int, gate_up: Sequence[Stored], down: Stored
    ) -> None:
        """An expert into its entry of the MXFP4 tables (gate_up: gate and up, or both in one)."""
        row = 0
        for part in gate_up:
            w, s = part.as_mxfp4()
            t["w13"][entry, row : row + w.shape[0]] = w
            t["s13"][entry, row : row + w.shape[0]] = s
            row += w.shape[0]
        t["w2"][entry], t["s2"][entry] = down.as_mxfp4()

    # --- an expert's matrices ---

    def routed(self, e: int) -> tuple[list[Stored], Stored]:
        """A routed expert: ([gate, up], down), or ([gate and up], down) where stored so."""
        m = self.shape
        both, down = (m.experts, 2 * m.inter, m.hidden), (m.experts, m.hidden, m.inter)
        for moe in MOE_NAMES:
            packed = f"{self.prefix}{moe}.experts."
            if packed + "gate_up_proj" in self.shards:
                w2 = self.find((f"{moe}.experts.down_proj",), down)
                gate_up = self.matrix(packed + "gate_up_proj", both, entry=e)
                return [gate_up], self.matrix(w2, down, entry=e)
        return self._three(f"experts.{e}", ("w1", "w3", "w2"))

    def shared(self) -> tuple[list[Stored], Stored]:
        """The shared expert, in the same two forms."""
        m = self.shape
        for moe in MOE_NAMES:
            both = f"{self.prefix}{moe}.shared_experts.gate_up_proj.weight"
            if both in self.shards:
                down = (m.hidden, m.inter)
                w2 = self.find((f"{moe}.shared_experts.down_proj.weight",), down)
                return [self.matrix(both, (2 * m.inter, m.hidden))], self.matrix(w2, down)
        return self._three("shared_experts", ("gate_proj", "up_proj", "down_proj"))

    def _three(self, expert: str, parts: Sequence[str]) -> tuple[list[Stored], Stored]:
        m = self.shape
        sizes = ((m.inter, m.hidden), (m.inter, m.hidden), (m.hidden, m.inter))
        found = []
        for part, size in zip(parts, sizes, strict=True):
            names = tuple(f"{moe}.{expert}.{part}.weight" for moe in MOE_NAMES)
            found.append(self.matrix(self.find(names, size), size))
        return found[:2], found[2]

    # --- single tensors ---

    def find(self, names: Sequence[str], size: tuple[int, ...]) -> str:
        """The full name of a tensor that goes by one of ``names`` in this layer."""
        for name in names:
            if self.prefix + name in self.shards:
                return self.prefix + name
        raise CheckpointError(
            f"{self.prefix}{names[0]}: expected shape {size}, found no such tensor in "
            f"{self.shards.path}"
        )

    def float_tensor(self, name: str, size: tuple[int, ...]) -> Tensor:
        """A bf16, fp16 or fp32 tensor of shape ``size`` as finite fp32."""
        dtype, found = self.shards.head(name)
        if dtype not in FLOATS:
            raise CheckpointError(
                f"{name}: expected {' or '.join(sorted(FLOATS))} of shape {size}, "
                f"found {dtype} of shape {found}"
            )
        _check_shape(name, size, found)
        return _finite(name, self.shards.read(name).float())

    def matrix(self, name: str, size: tuple[int, ...], entry: int | None = None) -> Stored:
        """A weight of logical shape ``size`` (with ``entry``: that slice of its first dimension).

        Plain floats; E4M3 with a scale per row (fp32) or per 32 columns (E8M0); packed E2M1, half
        as many columns, with E8M0 scales. 8-bit elements may be labelled as plain bytes.
        """
        dtype, found = self.shards.head(name)
        if dtype in FLOATS:
            _check_shape(name, size, found)
            return Stored("float", _finite(name, self.shards.read(name, entry).float()))
        packed = (*size[:-1], size[-1] // 2)
        if dtype == "F4" or (dtype in ("U8", "I8") and found == packed):
            _check_shape(name, size if dtype == "F4" else packed, found)
            scale = self._block_scale(name, size, entry)
            return Stored("mxfp4", self.shards.read(name, entry), scale)
        if dtype not in ("F8_E4M3", "U8", "I8"):
            raise CheckpointError(
                f"{name}: expected floats, E4M3 or MXFP4 of shape {size}, "
                f"found {dtype} of shape {found}"
            )
        _check_shape(name, size, found)
        scale_name = self._scale_name(name, size)
        scale_dtype, scale_size = self.shards.head(scale_name)
        if scale_dtype in FLOATS and scale_size in (size[:-1], (*size[:-1], 1)):
            scale = _finite(scale_name, self.shards.read(scale_name, entry).float().flatten())
            kind: Kind = "ptpc"
        else:
            scale, kind = self._block_scale(name, size, entry), "mxfp8"
        elements = self.shards.read(name, entry)
        _no_nan(name, (elements & 0x7F) == 0x7F)
        return Stored(kind, elements, scale)

    def _scale_name(self, name: str, size: tuple[int, ...]) -> str:
        for suffix in SCALE_SUFFIXES:
            if name + suffix in self.shards:
                return name + suffix
        dtype, found = self.shards.head(name)
        raise CheckpointError(
            f"{name}: expected floats of shape {size}, or bytes with a {SCALE_SUFFIXES[0]} or "
            f"{SCALE_SUFFIXES[1]} tensor beside them, found {dtype} of shape {found} alone"
        )

    def _block_scale(self, name: str, size: tuple[int, ...], entry: int | None) -> Tensor:
        """The E8M0 scales of an MX tensor, one per 32 columns."""
        scale = self._scale_name(name, size)
        dtype, found = self.shards.head(scale)
        expected = (*size[:-1], size[-1] // MX_BLOCK)
        if dtype not in ("U8", "I8", "F8_E8M0"):
            raise CheckpointError(
                f"{scale}: expected E8M0 bytes of shape {expected}, found {dtype} of shape {found}"
            )
        _check_shape(scale, expected, found)
        t = self.shards.read(scale, entry)
        _no_nan(scale, t == E8M0_NAN)
        return t


def _mxfp8_tables(gate_up: Sequence[Stored], down: Stored) -> dict[str, Tensor]:
    """An MXFP8 shared expert's four tables, as stored."""
    scales = [part.scale for part in gate_up if part.scale is not None]
    assert down.scale is not None
    return {
        "shared_w13": torch.cat([part.data for part in gate_up]),
        "shared_s13": torch.cat(scales),
        "shared_w2": down.data,
        "shared_s2": down.scale,
    }


def _check_shape(name: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(f"{name}: expected shape {expected}, found {found}")


def _finite(name: str, t: Tensor) -> Tensor:
    _no_nan(name, ~t.isfinite())
    return t


def _no_nan(name: str, bad: Tensor) -> None:
    n = int(bad.sum())
    if n:
        raise CheckpointError(
            f"{name}: expected finite values of shape {tuple(bad.shape)}, found {n} that are not"
        )
