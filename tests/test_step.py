"""DecodeStep: what it refuses, what it lays out, and that its verdicts notice a wrong kernel."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from reference_views import NoBuild, published

from m3lab.interpreter import Memory
from m3lab.layout.shard import prepare
from m3lab.model.shapes import CacheLayout, ModelShape, RankShape
from m3lab.model.weights import random_layer
from m3lab.step.step import SPARE_BLOCKS, DecodeStep, StepInputs, check_inputs, check_pointers
from m3lab.verify import same_bits, verify

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), 4)


@pytest.fixture(autouse=True)
def _without_building(monkeypatch):
    monkeypatch.setattr("m3lab.step.step.build_for", lambda step: NoBuild())


def small(tokens=2, **options):
    return DecodeStep(SMALL, tokens, **{"context": 300, "npes": 1} | options)


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tokens": 0}, ["tokens", "1..16", "0"]),
        ({"tokens": 17}, ["tokens", "1..16", "17"]),
        ({"tokens": "four"}, ["tokens", "1..16", "'four'"]),
        ({"tokens": 3, "q_len": 2}, ["multiple of q_len", "3", "2"]),
        ({"tokens": 2, "pad_rows": 2}, ["pad_rows", "2"]),
        ({"tokens": 4, "q_len": 2, "pad_rows": 1}, ["pad_rows", "multiple of q_len"]),
        ({"npes": 2}, ["npes", "1 (solo)", "4", "2"]),
        ({"context": 0}, ["context", "1..1048576", "0"]),
        ({"context": 2**20 + 1}, ["context", "1..1048576", "1048577"]),
        ({"context": [300, 300, 300]}, ["one per live request (2)", "3"]),
        ({"until": "experts"}, ["until", "o_proj", "'experts'"]),
        ({"backend": "cuda"}, ["backend", "interpreter", "'cuda'"]),
        ({"backend": "hip"}, ["hip", "not built yet"]),
        ({"context": "many"}, ["context", "integer in 1..1048576", "'many'"]),
        ({"context": 2.5}, ["context", "integer", "2.5"]),
        ({"context": [300, 1.5]}, ["context", "integer", "1.5"]),
        ({"q_len": "1"}, ["q_len", "integer", "'1'"]),
        ({"seed": -1}, ["seed", "0..2147483647", "-1"]),
        ({"layer": 128}, ["layer", "0..127", "128"]),
    ],
)
def test_a_step_that_cannot_be_is_refused_in_one_sentence(options, parts):
    with pytest.raises(ValueError) as caught:
        small(**options)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("shape", [4, SMALL.model])
def test_a_step_of_what_is_no_rank_shape_is_refused(shape):
    with pytest.raises(ValueError, match=f"a RankShape, got {type(shape).__name__}"):
        DecodeStep(shape)


@pytest.mark.parametrize("value", [None, [1.0]])
def test_a_layer_without_one_of_its_tensors_is_refused_by_name(value):
    layer = random_layer(SMALL.model, 0, experts=None)
    with pytest.raises(ValueError, match=rf"w_o must be .*got {type(value).__name__}"):
        replace(layer, w_o=value)


def test_a_kv_head_without_an_index_head_is_refused():
    shape = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512, kv_heads=8), 4)
    with pytest.raises(ValueError, match="an index head per kv head, got 1 and 2"):
        DecodeStep(shape, 1)


@pytest.mark.parametrize("tp", [0, 3, 16])
def test_a_tp_width_that_no_shard_has_is_refused(tp):
    with pytest.raises(ValueError, match=rf"TP width must be one of \(1, 2, 4, 8\), got {tp}"):
        RankShape(tp=tp)


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("h_in", torch.zeros(2, 2048), ["h_in", "bfloat16 [2, 2048]", "float32"]),
        ("h_in", torch.zeros(1, 2048).bfloat16(), ["h_in", "[2, 2048]", "[1, 2048]"]),
        ("q", torch.zeros(2, 16, 128).bfloat16(), ["q", "[2, 64, 128]", "[2, 16, 128]"]),
        ("q", torch.zeros(2, 64, 128).half(), ["q", "bfloat16", "float16"]),
        ("iq", torch.zeros(2, 4, 64).bfloat16(), ["iq", "[2, 4, 128]", "[2, 4, 64]"]),
        ("iq", [[1.0]], ["iq", "tensor", "list"]),
        ("scores", torch.zeros(2, 4, 9), ["scores", "[2, 4, 3]", "[2, 4, 9]"]),
        ("contexts", [], ["contexts", "[300, 300]", "[]"]),
        ("contexts", None, ["contexts", "a list", "NoneType"]),
    ],
)
def test_a_tensor_of_the_wrong_type_or_shape_is_named_with_what_was_expected(field, value, parts):
    step = small()
    inputs = replace(step.random_inputs(), **{field: value})
    with pytest.raises(ValueError) as caught:
        check_inputs(step, inputs)
    for part in parts:
        assert part in str(caught.value)


def test_weights_that_are_shuffled_already_or_of_another_model_are_refused():
    layer = random_layer(SMALL.model, 0, experts=None)
    with pytest.raises(ValueError, match=r"weights must be LayerWeights.*got PreparedLayer"):
        small().prepare(weights=prepare(layer, SMALL, 0))
    with pytest.raises(ValueError, match=r"of the step's model .*hidden=6144.*hidden=2048"):
        DecodeStep(RankShape(tp=4), 1, context=300, npes=1).prepare(weights=layer)


def test_an_address_that_no_wide_load_may_use_is_named():
    with pytest.raises(ValueError, match="w_o: the address must be a multiple of 16, got 0x1008"):
        check_pointers({"h_in": 0x1000, "rank": 3, "w_o": 0x1008})


# --- what is laid out ---


def test_rows_of_a_verified_request_see_one_key_less_each_towards_the_first():
    step = small(4, q_len=2, context=[300, 500])
    assert step.seq_lens == [299, 300, 499, 500]
    assert small(4, pad_rows=1, context=300).seq_lens == [300, 300, 300, 0]


def test_selected_blocks_have_ids_of_their_own_and_the_others_share_unwritten_ones():
    step = small(2, context=[5000, 3000]).prepare()
    rows = [step.selections[0][row].blocks.tolist() for row in range(2)]
    chosen = [int(step.block_table[row, b]) for row in range(2) for b in rows[row]]
    assert len(set(chosen)) == len(chosen) == 32
    others = {
        int(step.block_table[row, b])
        for row, n in enumerate((5000, 3000))
        for b in range(-(-n // 128))
        if b not in rows[row]
    }
    assert len(others) <= SPARE_BLOCKS
    assert not others & set(chosen)
    assert 0 not in chosen
    assert chosen != sorted(chosen)


def test_a_padding_row_has_page_zero_and_length_zero():
    step = small(2, pad_rows=1, context=300).prepare()
    assert step.block_table[1].tolist() == [0, 0, 0]
    rank = step._ranks[0]
    assert rank.placed["seq_lens"].read(torch.int32, (2,)).tolist() == [300, 0]


def test_the_scores_lie_in_their_region_under_this_steps_tag_only_where_they_are_read():
    step = small(2, context=[2049, 300]).prepare()
    rank = step._ranks[0]
    step.mailboxes.next_step()
    rank.begin()
    values, current = rank.scratch.view("iscore", step=1, layer=step.layer, tokens=2)
    assert current is not None
    assert torch.equal(values[0, 0, :17], step.scores[0][0])
    assert int(current.sum()) == 17
    step.mailboxes.next_step()
    rank.begin()
    assert not rank.scratch.view("iscore", step=1, layer=step.layer)[1].any()


def test_each_rank_selects_by_its_own_index_head():
    step = DecodeStep(SMALL, 1, context=5000, npes=4).prepare()
    picks = {tuple(step.selections[rank][0].blocks.tolist()) for rank in range(4)}
    assert len(picks) == 4


def test_given_scores_replace_the_references():
    step = small(1, context=2304)
    scores = torch.arange(18.0).repeat(1, 4, 1)
    step.prepare(inputs=replace(step.random_inputs(), scores=scores))
    assert step.selections[0][0].blocks.tolist() == [*range(16, 1, -1), 17]


def test_the_same_seed_gives_the_same_step():
    a, b, c = (small(1, seed=seed).random_inputs() for seed in (5, 5, 6))
    assert torch.equal(a.h_in, b.h_in)
    assert torch.equal(a.contexts[0].k(0), b.contexts[0].k(0))
    assert not torch.equal(a.h_in, c.h_in)


def test_closing_twice_is_allowed():
    step = small().prepare()
    step.close()
    step.close()


# --- the verdicts ---


@pytest.fixture
def result(right_step, right_result):
    """The right step's result, to be spoiled."""
    return deepcopy(right_result)


@pytest.fixture(scope="module")
def right_step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m3lab.step.step.build_for", lambda step: NoBuild())
        return DecodeStep(SMALL, 2, context=[2200, 300], npes=4).prepare()


@pytest.fixture(scope="module")
def right_result(right_step):
    return published(right_step)


def test_a_kernel_that_rounds_as_the_reference_passes_every_verdict(right_step):
    verdicts = verify(right_step, published(right_step))
    assert all(v.passed for v in verdicts)
    names = {v.name for v in verdicts if v.against == "stage"}
    assert names == {
        *("sparse_table", "sp_o", "sp_m", "sp_l", "attnq", "partial", "a", "a_sum", "h_mid"),
        *("ranks", "nan"),
    }
    exact = {v.name: v.error for v in verdicts if v.against == "exact"}
    assert 1e-3 < exact["a"] < 1.2e-1  # fp8 on the way: neither nothing nor everything


@pytest.mark.parametrize(
    ("field", "failing"),
    [
        ("sp_o", {"sp_o", "attnq"}),
        ("sp_m", {"sp_m", "attnq"}),
        ("sp_l", {"sp_l", "attnq"}),
        ("attnq_s", {"attnq", "partial", "a"}),
        ("partials", {"partial", "a_sum"}),
        ("a", {"a", "a_sum", "h_mid", "ranks"}),
        ("h_mid", {"h_mid", "ranks"}),
    ],
)
def test_one_wrong_value_fails_its_stage_and_those_it_feeds_only(
    right_step, result, field, failing
):
    tensor = getattr(result.ranks[2], field)
    at = (0,) * tensor.ndim
    tensor[at] = tensor[at] + 50 * tensor.abs().max()
    found = {v.name for v in verify(right_step, result) if not v.passed and v.against == "stage"}
    assert found == failing


def test_one_wrong_page_id_fails_the_selection_alone(right_step, result):
    result.ranks[1].table[1, 3] += 1
    failed = [v for v in verify(right_step, result) if not v.passed]
    assert [(v.name, v.rank, v.row) for v in failed] == [("sparse_table", 1, 1)]


def test_page_ids_past_the_selection_and_the_spare_word_are_nobodys_business(right_step, result):
    result.ranks[1].table[1, 3 * 8 : 128] = 77
    result.ranks[1].table[1, 129] = 77
    assert all(v.passed for v in verify(right_step, result))


def test_a_region_that_was_not_published_fails_by_name(right_step, result):
    result.ranks[3].missing.append("sp_l")
    failed = [v for v in verify(right_step, result) if not v.passed]
    assert [(v.name, v.rank, v.note) for v in failed] == [
        ("sp_l", 3, "not published by this launch")
    ]


def test_a_nan_never_passes(right_step, result):
    result.ranks[0].a[0, 0] = torch.nan
    failed = {v.name for v in verify(right_step, result) if not v.passed}
    assert {"a", "a_sum"} <= failed


def test_two_launches_are_the_same_only_bit_for_bit(right_result, result):
    first, second = right_result, result
    assert same_bits(first, second, 1).passed
    second.ranks[3].sp_o[0, 0, 0, 0] = -second.ranks[3].sp_o[0, 0, 0, 0]
    assert not same_bits(first, second, 1).passed


def test_solo_is_the_ranks_own_partial_sum():
    step = small(2, context=[2200, 300]).prepare()
    result = published(step)
    assert torch.equal(result.ranks[0].a, result.ranks[0].partials[0])
    assert all(v.passed for v in verify(step, result))


@pytest.mark.parametrize("layout", [CacheLayout(16), CacheLayout(8, True), CacheLayout(16, True)])
def test_every_cache_layout_holds_the_same_request(layout):
    step = small(1, context=300, layout=layout, memory=Memory()).prepare()
    assert verify(step, published(step))


def test_inputs_are_a_plain_dataclass_a_user_can_make():
    step = small(1, context=130)
    own = StepInputs(
        h_in=torch.ones(1, 2048).bfloat16(),
        q=torch.ones(1, 64, 128).bfloat16(),
        iq=torch.ones(1, 4, 128).bfloat16(),
        contexts=step.random_inputs().contexts,
    )
    assert step.prepare(own).inputs is own
