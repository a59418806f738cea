"""Checkpoints that transformers wrote load to its own weights; broken ones name what is broken."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from m3lab.model import formats as f
from m3lab.model.checkpoint import CheckpointError, Shards, load_layer
from m3lab.model.shapes import ModelShape
from m3lab.model.weights import LayerWeights, random_layer

LAYER = 1  # of the tiny model: layer 0 is dense
EXPERTS = [0, 77]


# --------------------------------------------------------- what transformers saves and we load


@dataclass
class Saved:
    path: Path
    layer: torch.nn.Module


def tiny_text_config():
    c = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
    return c.MiniMaxM3VLTextConfig(
        hidden_size=2048,
        intermediate_size=128,
        shared_intermediate_size=128,
        dense_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        vocab_size=32,
        bos_token_id=0,
        eos_token_id=1,
        max_position_embeddings=4096,
        layer_types=["full_attention", "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    )


def make(form: str):
    """A tiny model of random bf16 weights, and its sparse layer."""
    modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
    from transformers.models.minimax_m3_vl import MiniMaxM3VLConfig

    torch.manual_seed(7)
    torch.set_default_dtype(torch.bfloat16)
    try:
        if form == "text":
            model = modeling.MiniMaxM3VLForCausalLM(tiny_text_config())
            layer = model.model.layers[LAYER]
        else:
            vision = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
            config = MiniMaxM3VLConfig(
                text_config=tiny_text_config().to_dict(),
                vision_config={**vision, "num_hidden_layers": 1},
                projector_hidden_size=64,
                merged_hidden_size=256,
            )
            model = modeling.MiniMaxM3SparseForConditionalGeneration(config)
            layer = model.model.language_model.layers[LAYER]
    finally:
        torch.set_default_dtype(torch.float32)
    for name, p in (*layer.named_parameters(), *layer.named_buffers()):
        if "norm" in name or "bias" in name:  # initialized alike: make each its own
            p.data.normal_(0, 0.1)
    return model, layer


@pytest.fixture(scope="module", params=["multimodal", "text"])
def saved(request, tmp_path_factory) -> Saved:
    path = tmp_path_factory.mktemp(request.param)
    model, layer = make(request.param)
    model.save_pretrained(path, max_shard_size="60MB")
    return Saved(path, layer)


@pytest.fixture(scope="module")
def loaded(saved) -> LayerWeights:
    return load_layer(saved.path, LAYER, experts=EXPERTS)


def test_both_forms_are_sharded_and_name_their_tensors_their_own_way(saved):
    names = json.loads((saved.path / "model.safetensors.index.json").read_text())["weight_map"]
    published = f"language_model.model.layers.{LAYER}.block_sparse_moe.experts.77.w1.weight"
    own = f"model.layers.{LAYER}.mlp.experts.gate_up_proj"
    assert (published in names) != (own in names)
    assert len(set(names.values())) > 1


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("g_in", "input_layernorm.weight"),
        ("g_post", "post_attention_layernorm.weight"),
        ("g_q", "self_attn.q_norm.weight"),
        ("g_k", "self_attn.k_norm.weight"),
        ("g_iq", "self_attn.indexer.q_norm.weight"),
        ("g_ik", "self_attn.indexer.k_norm.weight"),
        ("w_gate", "mlp.gate.weight"),
        ("bias", "mlp.gate.e_score_correction_bias"),
    ],
)
def test_plain_tensors_are_the_models(saved, loaded, ours, theirs):
    state = saved.layer.state_dict()
    assert torch.equal(getattr(loaded, ours).float(), state[theirs].float())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("q", "q_proj"),
        ("k", "k_proj"),
        ("v", "v_proj"),
        ("o", "o_proj"),
        ("iq", "indexer.q_proj"),
        ("ik", "indexer.k_proj"),
    ],
)
def test_projections_are_the_models_quantized(saved, loaded, ours, theirs):
    weight = saved.layer.state_dict()[f"self_attn.{theirs}.weight"].float()
    code, scale = f.quantize_ptpc(weight)
    assert torch.equal(getattr(loaded, f"w_{ours}"), code)
    assert torch.equal(getattr(loaded, f"s_{ours}"), scale)


@pytest.mark.parametrize("expert", [*EXPERTS, 128])
def test_experts_are_the_models_quantized(saved, loaded, expert):
    mlp = saved.layer.mlp
    if expert == 128:
        gate_up, down = mlp.shared_experts.gate_up_proj.weight, mlp.shared_experts.down_proj.weight
    else:
        gate_up, down = mlp.experts.gate_up_proj[expert], mlp.experts.down_proj[expert]
    for name, weight in (("13", gate_up), ("2", down)):
        code, scale = f.quantize_mxfp4(weight.detach())
        assert torch.equal(getattr(loaded, f"w{name}")[expert], code)
        assert torch.equal(getattr(loaded, f"s{name}")[expert], scale)


def test_only_what_was_asked_for_is_read(saved, monkeypatch):
    read = []
    plain = Shards.read

    def recorded(self, name, entry=None):
        read.append((name, entry))
        return plain(self, name, entry)

    monkeypatch.setattr(Shards, "read", recorded)
    layer = load_layer(saved.path, LAYER, experts=[77])
    assert layer.present == (77, 128)
    routed = [(n, e) for n, e in read if ".experts." in n]
    assert all(e == 77 or ".77." in n for n, e in routed)
    assert len(routed) in (2, 3)
    assert len(set(read)) == len(read)


def test_a_dense_layer_and_a_layer_past_the_last_are_refused(saved):
    with pytest.raises(CheckpointError, match=r"layers\.0\..*index.*expected shape"):
        load_layer(saved.path, 0)
    with pytest.raises(CheckpointError, match="layer 2 is not in"):
        load_layer(saved.path, 2)


@pytest.mark.slow
def test_every_expert_of_a_saved_model_loads(saved):
    layer = load_layer(saved.path, LAYER)
    assert layer.present == tuple(range(129))
    packed, scale = f.quantize_mxfp4(saved.layer.mlp.experts.down_proj.detach())
    assert torch.equal(layer.w2[:128], packed)
    assert torch.equal(layer.s2[:128], scale)


# ---------------------------------------------------------------- one small layer, made by hand

SMALL = ModelShape(hidden=2048, q_heads=2, kv_heads=1, index_heads=1, inter=128, shared_inter=128)
P = "model.layers.3."
SHARED = P + "block_sparse_moe.shared_experts."
EXPERT = P + "block_sparse_moe.experts.9."


@pytest.fixture(scope="module")
def source() -> LayerWeights:
    return random_layer(SMALL, experts=[9], shared_fp8=True)


@pytest.fixture
def tensors(source) -> dict[str, torch.Tensor]:
    """bf16 tensors of one layer by published names, expert 9 and the shared expert included."""
    attention = {
        "q_proj": "w_q",
        "k_proj": "w_k",
        "v_proj": "w_v",
        "o_proj": "w_o",
        "index_q_proj": "w_iq",
        "index_k_proj": "w_ik",
    }
    t = {f"{P}self_attn.{n}.weight": source.dequant(w).bfloat16() for n, w in attention.items()}
    for name, ours in (("q", "g_q"), ("k", "g_k"), ("index_q", "g_iq"), ("index_k", "g_ik")):
        t[f"{P}self_attn.{name}_norm.weight"] = getattr(source, ours)
    t[P + "input_layernorm.weight"] = source.g_in
    t[P + "post_attention_layernorm.weight"] = source.g_post
    t[P + "block_sparse_moe.gate.weight"] = source.w_gate
    t[P + "block_sparse_moe.e_score_correction_bias"] = source.bias
    gate, up = source.dequant("w13", 9).chunk(2)
    for name, w in (("w1", gate), ("w3", up), ("w2", source.dequant("w2", 9))):
        t[f"{EXPERT}{name}.weight"] = w.bfloat16()
    gate, up = source.dequant("shared_w13").chunk(2)
    for name, w in (("gate", gate), ("up", up), ("down", source.dequant("shared_w2"))):
        t[f"{SHARED}{name}_proj.weight"] = w.bfloat16()
    return {name: x.contiguous() for name, x in t.items()}


def load(path: Path, tensors: dict[str, torch.Tensor], experts=(9,)) -> LayerWeights:
    file = path / "model.safetensors"
    save_file(tensors, file)
    return load_layer(file, 3, SMALL, experts=experts)


def test_a_single_file_loads_with_a_given_shape(tmp_path, tensors):
    layer = load(tmp_path, tensors)
    assert layer.present == (9, 128)
    assert torch.equal(layer.g_ik, tensors[P + "self_attn.index_k_norm.weight"])
    assert load(tmp_path, tensors, experts=None).w13 is None


def test_a_directory_without_a_config_needs_a_shape(tmp_path, tensors):
    save_file(tensors, tmp_path / "part.safetensors")
    assert load_layer(tmp_path, 3, SMALL, experts=None).shape == SMALL
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load_layer(tmp_path, 3)


def test_projections_stored_as_fp8_with_row_scales_are_taken_as_they_are(tmp_path, tensors, source):
    for name, ours in (("q", "q"), ("index_k", "ik")):
        key = f"{P}self_attn.{name}_proj.weight"
        tensors[key] = getattr(source, f"w_{ours}").view(torch.float8_e4m3fn)
        scale = getattr(source, f"s_{ours}")
        tensors[key + "_scale"] = scale[:, None] if ours == "q" else scale
    layer = load(tmp_path, tensors, experts=None)
    for ours in ("q", "ik"):
        assert torch.equal(getattr(layer, f"w_{ours}"), getattr(source, f"w_{ours}"))
        assert torch.equal(getattr(layer, f"s_{ours}"), getattr(source, f"s_{ours}"))


def as_mxfp4(tensors, source, label=torch.uint8) -> None:
    parts = {
        "w1": (source.w13[9][:128], source.s13[9][:128]),
        "w3": (source.w13[9][128:], source.s13[9][128:]),
        "w2": (source.w2[9], source.s2[9]),
    }
    for name, (w, s) in parts.items():
        tensors[f"{EXPERT}{name}.weight"] = w.clone().view(label)
        tensors[f"{EXPERT}{name}.weight_scale"] = s.clone()


@pytest.mark.parametrize("label", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_mxfp4_experts_are_taken_as_they_are(tmp_path, tensors, source, label):
    as_mxfp4(tensors, source, label)
    layer = load(tmp_path, tensors)
    for name in ("w13", "s13", "w2", "s2"):
        assert torch.equal(getattr(layer, name)[9], getattr(source, name)[9])


def as_mxfp8(tensors, source, label, scale_label) -> None:
    parts = {
        "gate": (source.shared_w13[:128], source.shared_s13[:128]),
        "up": (source.shared_w13[128:], source.shared_s13[128:]),
        "down": (source.shared_w2, source.shared_s2),
    }
    for name, (w, s) in parts.items():
        tensors[f"{SHARED}{name}_proj.weight"] = w.clone().view(label)
        tensors[f"{SHARED}{name}_proj.weight_scale_inv"] = s.clone().view(scale_label)


@pytest.mark.parametrize("label", [torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("scale_label", [torch.float8_e8m0fnu, torch.uint8])
def test_an_mxfp8_shared_expert_is_taken_as_it_is(tmp_path, tensors, source, label, scale_label):
    as_mxfp8(tensors, source, label, scale_label)
    layer = load(tmp_path, tensors)
    assert layer.present == (9,)
    for name in ("shared_w13", "shared_s13", "shared_w2", "shared_s2"):
        assert torch.equal(getattr(layer, name), getattr(source, name))


def test_mxfp8_matrices_elsewhere_are_requantized(tmp_path, tensors, source):
    down = f.dequantize_mxfp4(source.w2[9], source.s2[9])
    code, scale = f.quantize_mxfp8(down)
    tensors[EXPERT + "w2.weight"] = code.view(torch.float8_e4m3fn)
    tensors[EXPERT + "w2.weight_scale_inv"] = scale
    layer = load(tmp_path, tensors)
    assert torch.equal(layer.dequant("w2", 9), f.dequantize_mxfp4(*f.quantize_mxfp4(down)))


# ------------------------------------------------------------------------------- what is broken

Q = P + "self_attn.q_proj.weight"


def edited(tensors, name, change) -> dict[str, torch.Tensor]:
    tensors[name] = change(tensors[name])
    return tensors


@pytest.mark.parametrize(
    "name",
    [
        Q,
        P + "self_attn.index_k_norm.weight",
        P + "block_sparse_moe.e_score_correction_bias",
        EXPERT + "w3.weight",
        SHARED + "down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named_with_the_shape_it_should_have(tmp_path, tensors, name):
    size = tuple(tensors.pop(name).shape)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, tensors)
    assert str(error.value).startswith(f"{name}: expected shape {size}, found no such tensor")


@pytest.mark.parametrize("name", [Q, P + "input_layernorm.weight", EXPERT + "w2.weight"])
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path, tensors, name):
    size = tuple(tensors[name].shape)
    edited(tensors, name, lambda t: t[:-1].contiguous())
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, tensors)
    found = (size[0] - 1, *size[1:])
    assert str(error.value) == f"{name}: expected shape {size}, found {found}"


@pytest.mark.parametrize("name", [Q, P + "input_layernorm.weight", SHARED + "up_proj.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_is_not_finite_is_named(tmp_path, tensors, name, value):
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[5] = value
    with pytest.raises(CheckpointError, match=f"^{name}: expected finite values .* found 1 that"):
        load(tmp_path, tensors)


def test_integers_where_floats_belong_are_named_with_their_dtype(tmp_path, tensors):
    edited(tensors, P + "input_layernorm.weight", lambda t: t.int())
    with pytest.raises(CheckpointError, match=r"expected BF16 or F16 or F32 .* found I32 of shape"):
        load(tmp_path, tensors)


def test_a_matrix_of_integers_is_refused(tmp_path, tensors):
    edited(tensors, Q, lambda t: t.int())
    with pytest.raises(CheckpointError, match=r"q_proj.*found I32 of shape \(256, 2048\)"):
        load(tmp_path, tensors)


def test_bytes_without_scales_are_refused(tmp_path, tensors):
    edited(tensors, Q, lambda t: t.to(torch.float8_e4m3fn))
    with pytest.raises(CheckpointError, match=r"found F8_E4M3 of shape .* alone"):
        load(tmp_path, tensors)


def test_scales_of_another_dtype_or_count_are_refused(tmp_path, tensors, source):
    as_mxfp4(tensors, source)
    good = tensors[EXPERT + "w2.weight_scale"]
    tensors[EXPERT + "w2.weight_scale"] = good.float()
    with pytest.raises(CheckpointError, match=r"w2\.weight_scale: expected E8M0 .* found F32"):
        load(tmp_path, tensors)
    tensors[EXPERT + "w2.weight_scale"] = good[:, :2].contiguous()
    with pytest.raises(CheckpointError, match=r"expected shape \(2048, 4\), found \(2048, 2\)"):
        load(tmp_path, tensors)


def test_nan_bytes_in_scales_or_elements_are_refused(tmp_path, tensors, source):
    as_mxfp8(tensors, source, torch.uint8, torch.uint8)
    down = SHARED + "down_proj.weight"
    tensors[down + "_scale_inv"][3, 1] = 0xFF
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale_inv: expected finite"):
        load(tmp_path, tensors)
    tensors[down + "_scale_inv"][3, 1] = 120
    tensors[down][0, 0] = 0x7F
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: expected finite"):
        load(tmp_path, tensors)


def test_a_truncated_file_is_named(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    whole = file.read_bytes()
    for size in (len(whole) - 1, 100, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors"):
            load_layer(file, 3, SMALL)


def test_a_directory_of_nothing_and_a_path_to_nothing_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_layer(tmp_path, 3, SMALL)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_layer(tmp_path / "none", 3, SMALL)


def test_an_index_that_does_not_tell_the_truth_is_named(tmp_path, tensors):
    index = tmp_path / "model.safetensors.index.json"
    save_file(tensors, tmp_path / "a.safetensors")
    files = dict.fromkeys(tensors, "a.safetensors")

    def write(weight_map: object) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write({**files, Q: "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"b\.safetensors: not a whole safetensors file"):
        load_layer(tmp_path, 3, SMALL)
    tensors.pop(Q)
    save_file(tensors, tmp_path / "a.safetensors")
    write(files)
    with pytest.raises(CheckpointError, match=rf"{Q}: not in .*a\.safetensors"):
        load_layer(tmp_path, 3, SMALL)
    for content in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match="not an index with a weight_map"):
            load_layer(tmp_path, 3, SMALL)
