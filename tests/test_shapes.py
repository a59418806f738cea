"""The shape a published configuration describes, and what the ranks make of it."""

import json

import pytest

from m3lab.model.shapes import TP_WIDTHS, CacheLayout, IndexHeads, ModelShape, RankShape

ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}


def text_config(**changes):
    config = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    options = {"rope_parameters": ROPE, "max_position_embeddings": 1 << 20, **changes}
    return config.MiniMaxM3VLTextConfig(**options)


def test_transformers_defaults_are_the_default_shape():
    assert ModelShape.from_config(text_config().to_dict()) == ModelShape()


def test_every_dimension_is_read_from_transformers_names():
    changed = {
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "index_n_heads": 2,
        "index_local_blocks": 3,
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
        "routed_scaling_factor": 1.5,
        "swiglu_alpha": 1.5,
        "swiglu_limit": 6.0,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
        },
    }
    assert ModelShape.from_config(text_config(**changed).to_dict()) == ModelShape(
        hidden=2048,
        q_heads=8,
        kv_heads=2,
        rope_dim=128,
        rope_theta=1e4,
        rms_eps=1e-5,
        index_heads=2,
        local_blocks=3,
        inter=256,
        shared_inter=256,
        route_scale=1.5,
        swiglu_alpha=1.5,
        swiglu_limit=6.0,
        max_context=4096,
    )


def test_a_config_file_of_the_multimodal_model_gives_its_text_model(tmp_path):
    path = tmp_path / "config.json"
    text = text_config(hidden_size=4096).to_dict()
    path.write_text(json.dumps({"hidden_size": 64, "text_config": text}))
    assert ModelShape.from_config(path) == ModelShape(hidden=4096)
    assert ModelShape.from_config(str(path)).hidden == 4096


def test_published_sparse_attention_names_win_over_the_flat_ones():
    config = {
        "index_n_heads": 4,
        "sparse_attention_config": {"sparse_num_index_heads": 2, "sparse_local_block": 2},
        "rotary_dim": 32,
    }
    shape = ModelShape.from_config(config)
    assert (shape.index_heads, shape.local_blocks, shape.rope_dim) == (2, 2, 32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 3000}, "multiple of 2048, got 3000"),
        ({"hidden_size": "6144"}, "hidden_size must be a number, got '6144'"),
        ({"hidden_size": 6144.5}, "hidden_size must be an integer, got 6144.5"),
        ({"num_attention_heads": 6}, "multiple of kv heads, got 6 and 4"),
        ({"head_dim": 64, "rotary_dim": 32}, "dims must be 128, got 64"),
        ({"num_local_experts": 64}, "got 64 experts and top 4"),
        ({"num_experts_per_tok": 8}, "got 128 experts and top 8"),
        ({"shared_intermediate_size": 1024}, "got 1024 and 3072"),
        ({"index_topk_blocks": 32}, "got 32 blocks of 128"),
        ({"index_block_size": 64}, "got 16 blocks of 64"),
        ({"max_position_embeddings": 1 << 21}, "got 2097152"),
        ({"rotary_dim": 7}, "got 7"),
        ([], "must be a JSON object, got list"),
    ],
)
def test_a_configuration_the_layer_cannot_have_is_refused(config, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(path)


def test_an_unreadable_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the model configuration"):
        ModelShape.from_config(tmp_path / "none.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(ValueError, match=r"bad\.json: not a JSON model configuration"):
        ModelShape.from_config(bad)


# the specification's table of a rank's share, by tp width
RANK_TABLE = {
    1: {
        "q_heads": 64,
        "kv_heads": 4,
        "index_heads": 4,
        "qkv_rows": 9856,
        "o_k": 8192,
        "inter": 3072,
    },
    2: {
        "q_heads": 32,
        "kv_heads": 2,
        "index_heads": 2,
        "qkv_rows": 4992,
        "o_k": 4096,
        "inter": 1536,
    },
    4: {
        "q_heads": 16,
        "kv_heads": 1,
        "index_heads": 1,
        "qkv_rows": 2560,
        "o_k": 2048,
        "inter": 768,
    },
    8: {"q_heads": 8, "kv_heads": 1, "index_heads": 1, "qkv_rows": 1536, "o_k": 1024, "inter": 384},
}


@pytest.mark.parametrize("tp", TP_WIDTHS)
def test_a_ranks_share_is_the_specifications(tp):
    shape = RankShape(tp=tp)
    assert {name: getattr(shape, name) for name in RANK_TABLE[tp]} == RANK_TABLE[tp]


def test_two_ranks_of_tp_8_share_a_kv_head():
    assert [list(RankShape(tp=8).kv_range(r)) for r in range(8)] == [
        [0], [0], [1], [1], [2], [2], [3], [3]
    ]  # fmt: skip
    assert [list(RankShape(tp=2).kv_range(r)) for r in range(2)] == [[0, 1], [2, 3]]


def test_shapes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="got 3"):
        RankShape(tp=3)
    with pytest.raises(ValueError, match="got 512 over 8 ranks"):
        RankShape(ModelShape(inter=512, shared_inter=512), 8)
    with pytest.raises(ValueError, match="got 4 over 8"):
        RankShape(ModelShape(q_heads=4, kv_heads=4), 8)


def test_build_choices_out_of_range_are_refused():
    with pytest.raises(ValueError, match="got 2"):
        IndexHeads(2, 0)
    with pytest.raises(ValueError, match=r"0\.\.3, got 4"):
        IndexHeads(4, 4)
    with pytest.raises(ValueError, match="got 12"):
        CacheLayout(page_stride=12)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"rope_parameters": 3}, "rope_parameters must be a mapping, got 3"),
        ({"sparse_attention_config": [1]}, r"sparse_attention_config must be a mapping, got \[1\]"),
        ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number, got 'half'"),
        ({"num_key_value_heads": 0}, "kv_heads must be at least 1, got 0"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_refused_by_key(config, part):
    with pytest.raises(ValueError, match=part):
        ModelShape.from_config(config)
