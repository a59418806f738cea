"""The exact reference against transformers' MiniMaxM3VLDecoderLayer, which nobody here wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from m3lab.model.formats import dequantize_mxfp4
from m3lab.model.shapes import ModelShape
from m3lab.model.weights import LayerWeights, random_layer
from m3lab.reference import exact
from m3lab.reference.compare import rel_l2
from m3lab.reference.context import Row

SMALL = ModelShape(hidden=2048, q_heads=8, inter=128, shared_inter=128)
BOUND = 1e-5


@dataclass
class DenseContext:
    """A request's history as plain tensors [keys, ...], new keys' places included."""

    k: Tensor
    v: Tensor
    ik: Tensor
    length: int

    def _block(self, x: Tensor, block: int) -> Tensor:
        rows = x[block * 128 : (block + 1) * 128]
        return torch.cat([rows, rows.new_full((128 - len(rows), *rows.shape[1:]), torch.nan)])

    def keys(self, block: int) -> Tensor:
        return self._block(self.k, block)

    def values(self, block: int) -> Tensor:
        return self._block(self.v, block)

    def index_keys(self, block: int) -> Tensor:
        return self._block(self.ik, block)


def transformers_config(model: ModelShape):
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLTextConfig,
    )

    config = MiniMaxM3VLTextConfig(
        hidden_size=model.hidden,
        intermediate_size=model.inter,
        shared_intermediate_size=model.shared_inter,
        num_hidden_layers=1,
        num_attention_heads=model.q_heads,
        num_key_value_heads=model.kv_heads,
        index_n_heads=model.index_heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": model.rope_theta,
            "partial_rotary_factor": model.rope_dim / model.head_dim,
        },
        layer_types=["minimax_m3_sparse"],
        mlp_layer_types=["sparse"],
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def state_dict(layer: LayerWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """The dequantized weights under transformers' parameter names."""
    n, attn, mlp = layer.shape.experts, "self_attn", "mlp"
    w13 = torch.stack([dequantize_mxfp4(layer.w13[e], layer.s13[e]) for e in range(n + 1)])
    w2 = torch.stack([dequantize_mxfp4(layer.w2[e], layer.s2[e]) for e in range(n + 1)])
    named = {
        "input_layernorm.weight": layer.g_in,
        "post_attention_layernorm.weight": layer.g_post,
        f"{attn}.q_norm.weight": layer.g_q,
        f"{attn}.k_norm.weight": layer.g_k,
        f"{attn}.indexer.q_norm.weight": layer.g_iq,
        f"{attn}.indexer.k_norm.weight": layer.g_ik,
        f"{attn}.q_proj.weight": layer.dequant("w_q"),
        f"{attn}.k_proj.weight": layer.dequant("w_k"),
        f"{attn}.v_proj.weight": layer.dequant("w_v"),
        f"{attn}.o_proj.weight": layer.dequant("w_o"),
        f"{attn}.indexer.q_proj.weight": layer.dequant("w_iq"),
        f"{attn}.indexer.k_proj.weight": layer.dequant("w_ik"),
        f"{mlp}.gate.weight": layer.w_gate,
        f"{mlp}.gate.e_score_correction_bias": layer.bias,
        f"{mlp}.experts.gate_up_proj": w13[:n],
        f"{mlp}.experts.down_proj": w2[:n],
        f"{mlp}.shared_experts.gate_up_proj.weight": w13[n],
        f"{mlp}.shared_experts.down_proj.weight": w2[n],
    }
    return {name: t.to(dtype) for name, t in named.items()}


class Transformers:
    """transformers' one layer with a cache, fed a piece of a sequence at a time."""

    def __init__(self, layer: LayerWeights, dtype: torch.dtype = torch.float32):
        from transformers import DynamicCache
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
            MiniMaxM3VLDecoderLayer,
            MiniMaxM3VLRotaryEmbedding,
        )

        config = transformers_config(layer.shape)
        with torch.device("meta"):
            self.layer = MiniMaxM3VLDecoderLayer(config, 0)
        self.layer.load_state_dict(state_dict(layer, dtype), strict=True, assign=True)
        self.layer.eval()
        self.rotary = MiniMaxM3VLRotaryEmbedding(config)
        self.cache = DynamicCache(config=config)
        self.blocks = self.attention = None
        self.layer.self_attn.indexer.register_forward_hook(self._keep_blocks)
        self.layer.self_attn.register_forward_hook(self._keep_attention)

    def _keep_blocks(self, module, args, output) -> None:
        self.blocks = output[0]  # [index heads, rows, topk], -1 where unused

    def _keep_attention(self, module, args, output) -> None:
        self.attention = output[0][0]  # [rows, hidden]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        first = self.cache.get_seq_length()
        positions = torch.arange(first, first + len(x))[None]
        return self.layer(
            x[None],
            position_embeddings=self.rotary(x, positions),
            position_ids=positions,
            cache=self.cache,
        )[0]

    def context(self, new: int) -> DenseContext:
        """What is cached by now, with room for ``new`` keys (NaN until they are inserted)."""
        cached = self.cache.layers[0]

        def rows(x: Tensor) -> Tensor:  # [1, heads, keys, 128] -> [keys + new, heads, 128]
            x = x[0].transpose(0, 1)
            return torch.cat([x, x.new_full((new, *x.shape[1:]), torch.nan)])

        ik = rows(cached.idx_keys)[:, 0]
        return DenseContext(rows(cached.keys), rows(cached.values), ik, len(ik))


def prefilled(layer: LayerWeights, n_keys: int, seed: int = 0, chunk: int = 256):
    """transformers' layer after ``n_keys`` random tokens."""
    theirs = Transformers(layer)
    gen = torch.Generator().manual_seed(seed)
    for first in range(0, n_keys, chunk):
        theirs(torch.randn(min(chunk, n_keys - first), layer.shape.hidden, generator=gen))
    return theirs, gen


def check(layer: LayerWeights, theirs: Transformers, x: Tensor) -> exact.ExactStep:
    """One more step of ``x`` [q_len, hidden] on both sides."""
    context = theirs.context(len(x))
    want = theirs(x)
    ours = exact.layer_step(layer, layer.shape, 0.75 * x, 0.25 * x, [context], q_len=len(x))
    assert rel_l2(ours.attention.h_mid + ours.mlp.out, want) <= BOUND
    # what the layer adds, so that a large residual hides nothing
    print(
        "REL",
        rel_l2(ours.attention.a + ours.mlp.out, want - x),
        ours.attention.a.norm() / x.norm(),
        ours.mlp.out.norm() / x.norm(),
    )
    assert rel_l2(ours.attention.a + ours.mlp.out, want - x) <= BOUND
    for t in range(len(x)):
        for head in range(layer.shape.index_heads):
            chosen = [b for b in theirs.blocks[head, t].tolist() if b >= 0]
            assert sorted(ours.attention.blocks[t][head].tolist()) == sorted(chosen)
    return ours


@pytest.fixture(scope="module")
def small_layer() -> LayerWeights:
    return random_layer(SMALL, seed=3, experts="all")


@pytest.fixture(scope="module")
def after_17_blocks(small_layer):
    return prefilled(small_layer, 17 * 128 + 5)


def test_decode_past_16_blocks_agrees_with_transformers(small_layer, after_17_blocks):
    theirs, gen = after_17_blocks
    one = check(small_layer, theirs, torch.randn(1, SMALL.hidden, generator=gen))
    assert all(len(b) == 16 for b in one.attention.blocks[0])  # the selection is in force
    # a verify of two rows: each sees its own keys only, the second the first's
    check(small_layer, theirs, torch.randn(2, SMALL.hidden, generator=gen))


@pytest.mark.parametrize("n_keys", [1, 126, 127, 128])
def test_short_contexts_agree_with_transformers(small_layer, n_keys):
    theirs, gen = prefilled(small_layer, n_keys)
    check(small_layer, theirs, torch.randn(3, SMALL.hidden, generator=gen))


@pytest.mark.slow
def test_the_full_attention_shape_agrees_with_transformers():
    """MiniMax-M3's hidden size and heads; 128 experts of its width would be 29 GB in fp32."""
    layer = random_layer(ModelShape(inter=128, shared_inter=128), seed=5, experts="all")
    theirs, gen = prefilled(layer, 17 * 128 + 5)
    check(layer, theirs, torch.randn(2, layer.shape.hidden, generator=gen))


def test_fp64_differs_from_fp32_by_fp32_rounding_only(small_layer, after_17_blocks):
    theirs, gen = after_17_blocks
    x = torch.randn(2, SMALL.hidden, generator=gen)
    contexts = [theirs.context(2)]
    single = exact.layer_step(small_layer, SMALL, x, 0 * x, contexts, 2)
    double = exact.layer_step(small_layer, SMALL, x, 0 * x, contexts, 2, torch.float64)
    assert double.mlp.out.dtype == torch.float64
    assert 0 < rel_l2(single.mlp.out, double.mlp.out) <= BOUND


@pytest.mark.parametrize("seen", [1, 128, 300 * 128 - 5])
def test_block_scores_are_the_best_causal_key(seen):
    gen = torch.Generator().manual_seed(1)
    ik = torch.randn(300 * 128, 128, generator=gen)  # past one chunk of blocks
    iq = torch.randn(2, 128, generator=gen)
    dots = (iq @ ik.t()) * 128**-0.5 * math.log2(math.e)
    dots[:, seen - 1] = 100.0  # the row's own key is the best of its block
    ik[seen - 1] = torch.linalg.pinv(iq) @ torch.full((2,), 100.0 / (128**-0.5 * math.log2(math.e)))
    ik[seen:] *= 1e3  # keys the row does not see
    context = DenseContext(ik, ik, ik, len(ik))
    row = Row(0, seen)
    got = exact.block_scores(iq, row, context, 128**-0.5)
    want = dots[:, :seen].split(128, dim=-1)
    assert torch.allclose(got, torch.stack([b.amax(-1) for b in want], -1), rtol=1e-4)


def test_a_tie_of_experts_goes_to_the_lower():
    scores = torch.full((1, 128), 0.25)
    scores[0, [90, 17, 101, 5, 60]] = 0.75
    experts, weights = exact.choose_experts(scores, torch.zeros(128), SMALL)
    assert experts.tolist() == [[5, 17, 60, 90]]
    assert weights.tolist() == [[0.5] * 4]  # route_scale 2 over four equal scores


def test_the_bias_chooses_but_does_not_weigh():
    scores, bias = torch.full((1, 128), 0.5), torch.zeros(128)
    bias[[3, 4, 5, 6]] = 1.0
    scores[0, 3] = 0.1
    experts, weights = exact.choose_experts(scores, bias, SMALL)
    assert sorted(experts[0].tolist()) == [3, 4, 5, 6]
    assert weights.sum().item() == pytest.approx(2.0)
    assert weights[0, experts[0] == 3].item() == pytest.approx(2.0 * 0.1 / 1.6)


def test_rows_that_do_not_match_the_requests_are_refused(small_layer):
    x = torch.zeros(3, SMALL.hidden)
    with pytest.raises(ValueError, match="1 requests of 2 tokens are 2 rows, got 3"):
        exact.layer_step(small_layer, SMALL, x, x, [None], q_len=2)
