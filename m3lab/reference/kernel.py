"""The kernel reference: the layer with every quantization and rounding of the kernels in place.

Each stage is a function of plain tensors, so that it can be fed with a kernel's own published
inputs to that stage and compared with what the kernel published. Sums run in torch's order, not the
kernel's; integer outcomes follow the kernel's rules exactly. This module is the public face; the
stages live beside it.
"""

from m3lab.reference.attention import (
    NEG,
    QuantizedRow,
    SplitPartials,
    merge,
    merge_nearest,
    merged,
    split,
)
from m3lab.reference.context import Context, Inserted, Row, gather, step_rows
from m3lab.reference.experts import (
    expert_down,
    expert_intermediates,
    expert_mid,
    expert_partial,
    swiglu,
)
from m3lab.reference.layer import (
    AttentionHalf,
    LayerStep,
    MlpHalf,
    PreAttention,
    attention_half,
    insert,
    layer_step,
    mlp_half,
    pre_attention,
    score_rows,
)
from m3lab.reference.output import all_reduce, h_mid, output_partial
from m3lab.reference.pre_attn import (
    CacheEntry,
    NormedInput,
    block_scores,
    cache_entry,
    index_key_entry,
    input_norm,
    norm_rope,
    project,
    rope_table,
    score_scale,
)
from m3lab.reference.router import (
    Route,
    RouterScores,
    post_norm,
    route,
    router_logits,
    router_scores,
    routing_key,
)
from m3lab.reference.selection import Selection, context_blocks, index_key, select, sparse_table
from m3lab.reference.shard import RankShard

__all__ = [
    "NEG",
    "AttentionHalf",
    "CacheEntry",
    "Context",
    "Inserted",
    "LayerStep",
    "MlpHalf",
    "NormedInput",
    "PreAttention",
    "QuantizedRow",
    "RankShard",
    "Route",
    "RouterScores",
    "Row",
    "Selection",
    "SplitPartials",
    "all_reduce",
    "attention_half",
    "block_scores",
    "cache_entry",
    "context_blocks",
    "expert_down",
    "expert_intermediates",
    "expert_mid",
    "expert_partial",
    "gather",
    "h_mid",
    "index_key",
    "index_key_entry",
    "input_norm",
    "insert",
    "layer_step",
    "merge",
    "merge_nearest",
    "merged",
    "mlp_half",
    "norm_rope",
    "output_partial",
    "post_norm",
    "pre_attention",
    "project",
    "rope_table",
    "route",
    "router_logits",
    "router_scores",
    "routing_key",
    "score_rows",
    "score_scale",
    "select",
    "sparse_table",
    "split",
    "step_rows",
    "swiglu",
]
