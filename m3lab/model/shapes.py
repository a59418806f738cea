"""Shapes of the model, of one rank's shard of it, and of the paged caches.

Plain Python, importable everywhere: no torch, no flydsl. ``ModelShape`` holds what the published
configuration says, ``RankShape`` divides it over a tensor-parallel width, ``IndexHeads`` and
``CacheLayout`` are build choices. Every dimension a kernel, a reference or an allocator uses comes
from here; the defaults are MiniMax-M3's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TP_WIDTHS = (1, 2, 4, 8)
MAX_TOKENS = 16  # rows of one decode step
PAGE_TOKENS = 16  # tokens of one cache page
MX_BLOCK = 32  # consecutive k that share one E8M0 scale


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and constants of the MiniMax-M3 sparse layer.

    Source: the published configuration as transformers' ``MiniMaxM3VLTextConfig`` reads it.
    ``hidden`` may be smaller (a multiple of 2048) and so may ``inter`` (a multiple of 128 per
    rank): the kernel's structure allows it and unit tests use it.
    """

    hidden: int = 6144
    q_heads: int = 64
    kv_heads: int = 4
    head_dim: int = 128
    rope_dim: int = 64
    rope_theta: float = 5e6
    rms_eps: float = 1e-6
    index_heads: int = 4
    index_dim: int = 128
    sparse_block: int = 128
    topk_blocks: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    experts: int = 128
    top_k: int = 4
    inter: int = 3072
    shared_inter: int = 3072
    route_scale: float = 2.0
    shared_weight: float = 1.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    max_context: int = 1 << 20

    def __post_init__(self) -> None:
        if self.hidden < 2048 or self.hidden % 2048:
            raise ValueError(f"hidden size must be a positive multiple of 2048, got {self.hidden}")
        for name in ("q_heads", "kv_heads", "index_heads", "inter"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                "query heads must be a multiple of kv heads, "
                f"got {self.q_heads} and {self.kv_heads}"
            )
        if self.head_dim != 128 or self.index_dim != 128:
            raise ValueError(
                f"head and index dims must be 128, got {self.head_dim} and {self.index_dim}"
            )
        if self.experts != 128 or self.top_k != 4:
            raise ValueError(
                "the router is built for 128 experts and top 4, "
                f"got {self.experts} experts and top {self.top_k}"
            )
        if self.shared_inter != self.inter:
            raise ValueError(
                "the shared expert must be as wide as a routed one, "
                f"got {self.shared_inter} and {self.inter}"
            )
        if self.sparse_block != 128 or self.topk_blocks != 16:
            raise ValueError(
                "attention selects 16 blocks of 128 keys, "
                f"got {self.topk_blocks} blocks of {self.sparse_block}"
            )
        if not 0 < self.rope_dim <= self.head_dim or self.rope_dim % 2:
            raise ValueError(
                f"RoPE dims must be even and in 2..{self.head_dim}, got {self.rope_dim}"
            )
        if not 512 <= self.max_context <= 1 << 20 or self.max_context % 512:
            raise ValueError(
                "the longest context must be a multiple of 512 in 512..1048576, "
                f"got {self.max_context}"
            )

    @property
    def sm_scale(self) -> float:
        """Attention scale, head_dim ** -0.5."""
        return float(self.head_dim) ** -0.5

    @property
    def max_blocks(self) -> int:
        """Sparse blocks of the longest context (8192 at 1M keys)."""
        return self.max_context // self.sparse_block

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path) -> ModelShape:
        """The shape a ``config.json`` describes (a mapping, or the path of the file).

        A multimodal configuration's ``text_config`` is used when there is one. A missing key takes
        MiniMax-M3's value; a value the layer cannot have raises ValueError naming it. Key names:
        transformers' ``MiniMaxM3VLTextConfig``, and the ``sparse_attention_config`` that it reads.
        """
        data = _config_of(config)
        legacy = _section(data, "sparse_attention_config")
        rope = _section(data, "rope_parameters")
        base = cls()

        def number(name: str, *candidates: tuple[Mapping[str, Any], str]) -> Any:
            for source, key in candidates:
                value = source.get(key)
                if value is None:
                    continue
                default = getattr(base, name)
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ValueError(f"{key} must be a number, got {value!r}")
                if isinstance(default, int) and value != int(value):
                    raise ValueError(f"{key} must be an integer, got {value!r}")
                return type(default)(value)
            return getattr(base, name)

        head_dim = number("head_dim", (data, "head_dim"))
        rotary = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
        if rotary is None:
            rope_dim = number("rope_dim", (data, "rotary_dim"))
        elif isinstance(rotary, bool) or not isinstance(rotary, int | float):
            raise ValueError(f"partial_rotary_factor must be a number, got {rotary!r}")
        else:
            rope_dim = int(head_dim * rotary)
        return cls(
            hidden=number("hidden", (data, "hidden_size")),
            q_heads=number("q_heads", (data, "num_attention_heads")),
            kv_heads=number("kv_heads", (data, "num_key_value_heads")),
            head_dim=head_dim,
            rope_dim=rope_dim,
            rope_theta=number("rope_theta", (rope, "rope_theta"), (data, "rope_theta")),
            rms_eps=number("rms_eps", (data, "rms_norm_eps")),
            index_heads=number(
                "index_heads", (legacy, "sparse_num_index_heads"), (data, "index_n_heads")
            ),
            index_dim=number("index_dim", (legacy, "sparse_index_dim"), (data, "index_head_dim")),
            sparse_block=number(
                "sparse_block", (legacy, "sparse_block_size"), (data, "index_block_size")
            ),
            topk_blocks=number(
                "topk_blocks", (legacy, "sparse_topk_blocks"), (data, "index_topk_blocks")
            ),
            local_blocks=number(
                "local_blocks", (legacy, "sparse_local_block"), (data, "index_local_blocks")
            ),
            experts=number("experts", (data, "num_local_experts"), (data, "num_experts")),
            top_k=number("top_k", (data, "num_experts_per_tok")),
            inter=number("inter", (data, "intermediate_size")),
            shared_inter=number("shared_inter", (data, "shared_intermediate_size")),
            route_scale=number("route_scale", (data, "routed_scaling_factor")),
            swiglu_alpha=number("swiglu_alpha", (data, "swiglu_alpha")),
            swiglu_limit=number("swiglu_limit", (data, "swiglu_limit")),
            max_context=number("max_context", (data, "max_position_embeddings")),
        )


def _section(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested part of the configuration; empty when it is not there."""
    section = data.get(key) or {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{key} must be a mapping, got {section!r}")
    return section


def _config_of(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The text model's configuration: a mapping as given, or the content of a JSON file."""
    data: Any = config
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as exc:
            raise ValueError(f"{path}: cannot read the model configuration ({exc})") from exc
        except json.JSONDecodeError as exc:
            raise ValueError(f"{path}: not a JSON model configuration ({exc})") from exc
    if isinstance(data, Mapping):
        data = data.get("text_config") or data
    if not isinstance(data, Mapping):
        raise ValueError(f"a model configuration must be a JSON object, got {type(data).__name__}")
    return data


@dataclass(frozen=True)
class RankShape:
    """One rank's share of ``model`` at tensor-parallel width ``tp`` (1, 2, 4 or 8).

    Heads and expert columns are sharded; every rank holds every expert. At ``tp`` = 8 two ranks
    share each kv head.
    """

    model: ModelShape = field(default_factory=ModelShape)
    tp: int = 4

    def __post_init__(self) -> None:
        if self.tp not in TP_WIDTHS:
            raise ValueError(f"TP width must be one of {TP_WIDTHS}, got {self.tp}")
        if self.model.inter % (128 * self.tp):
            raise ValueError(
                "the expert intermediate must be a multiple of 128 on every rank, "
                f"got {self.model.inter} over {self.tp} ranks"
            )
        if self.model.q_heads % self.tp:
            raise ValueError(
                f"query heads must divide over the ranks, got {self.model.q_heads} over {self.tp}"
            )

    @property
    def hidden(self) -> int:
        return self.model.hidden

    @property
    def q_heads(self) -> int:
        """Query heads of this rank (16 at tp 4)."""
        return self.model.q_heads // self.tp

    @property
    def kv_heads(self) -> int:
        """KV heads this rank holds; at least one."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def index_heads(self) -> int:
        """Index query heads of this rank in the one-head build; at least one."""
        return max(1, self.model.index_heads // self.tp)

    @property
    def heads_per_kv(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def o_k(self) -> int:
        """K of this rank's output projection: its query heads * head_dim (2048 at tp 4)."""
        return self.q_heads * self.model.head_dim

    @property
    def inter(self) -> int:
        """Expert intermediate rows of this rank (768 at tp 4)."""
        return self.model.inter // self.tp

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused q | k | v | index q | index k projection (one-head build)."""
        m = self.model
        return (self.q_heads + 2 * self.kv_heads + self.index_heads + 1) * m.head_dim

    def kv_range(self, rank: int) -> range:
        """The model's kv heads that ``rank`` holds."""
        first = rank * self.model.kv_heads // self.tp
        return range(first, first + self.kv_heads)


@dataclass(frozen=True)
class IndexHeads:
    """Index query heads a build scores: ``count`` 1 (its own), or 4 with ``own`` = this rank."""

    count: int = 1
    own: int = 0

    def __post_init__(self) -> None:
        if self.count not in (1, 4):
            raise ValueError(f"index heads must be 1 or 4, got {self.count}")
        if not 0 <= self.own < self.count:
            raise ValueError(f"the own index head must be in 0..{self.count - 1}, got {self.own}")


ONE_INDEX_HEAD = IndexHeads()


@dataclass(frozen=True)
class CacheLayout:
    """How the paged K and V caches lie in memory.

    ``page_stride``: page ids from one block id to the next: 8 (K and V in planes of their own) or
    16 (one allocation, a block's 8 K pages then its 8 V pages). ``static_scale``: one fp32 scale
    per cache instead of one per token and kv head.
    """

    page_stride: int = 8
    static_scale: bool = False

    def __post_init__(self) -> None:
        if self.page_stride not in (8, 16):
            raise ValueError(f"page stride must be 8 or 16, got {self.page_stride}")
