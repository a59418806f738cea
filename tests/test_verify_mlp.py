"""The verdicts on router and experts: green on the reference's own values, red on one wrong one."""

from collections import Counter
from copy import deepcopy

import pytest
import torch
from reference_views import NoBuild, published

from m3lab.model.shapes import ModelShape, RankShape
from m3lab.reference import exact
from m3lab.step import DecodeStep, StepResult
from m3lab.verify import verify

MODEL = ModelShape(hidden=2048, inter=512, shared_inter=512)
EIGHT = ModelShape(hidden=2048, inter=1024, shared_inter=1024)


@pytest.fixture(scope="module", autouse=True)
def _without_building():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m3lab.step.step.build_for", lambda step: NoBuild())
        yield


def whole(tokens=2, shape=None, **options):
    options = {"context": 300, "until": None} | options
    return DecodeStep(shape or RankShape(MODEL, 4), tokens, **options).prepare()


@pytest.fixture(scope="module")
def four_ranks():
    return whole()


@pytest.fixture(scope="module")
def right_result(four_ranks):
    return published(four_ranks)


@pytest.fixture
def result(right_result):
    """The right result, to be spoiled."""
    return deepcopy(right_result)


def failed(step: DecodeStep, result: StepResult) -> set[str]:
    return {v.name for v in verify(step, result) if not v.passed and v.against == "stage"}


# --- green ---


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_kernel_that_rounds_as_the_reference_passes_at_every_token_count(tokens):
    step = whole(tokens, npes=1)
    verdicts = verify(step, published(step))
    assert all(v.passed for v in verdicts)
    assert {v.name for v in verdicts} >= {
        *("xn8", "xsc", "sigmoid", "keys", "copies", "sel", "picks", "weights"),
        *("mid", "ffn", "ffn_sum", "ar_out", "nan"),
    }


def test_four_ranks_pass_and_every_rank_is_compared_with_the_first(four_ranks, right_result):
    verdicts = verify(four_ranks, right_result)
    assert all(v.passed for v in verdicts)
    count = Counter(v.name for v in verdicts if v.against == "stage")
    assert count["ffn"] == 16  # every rank's rows at every rank
    assert count["mid"] == count["xn8"] == 4
    assert count["ranks"] == 3


def test_eight_ranks_pass():
    step = whole(2, RankShape(EIGHT, 8))
    verdicts = verify(step, published(step))
    assert all(v.passed for v in verdicts)


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_several_kv_heads_pass(tp):
    step = whole(2, RankShape(MODEL, tp), context=[2200, 300])
    assert len(step.selections[0]) == 2 * (4 // tp)
    verdicts = verify(step, published(step))
    assert all(v.passed for v in verdicts)


def test_a_wrong_page_under_the_second_kv_head_is_noticed():
    step = whole(1, RankShape(MODEL, 2), npes=1, context=2200)
    result = published(step)
    result.ranks[0].table[0, 130 + 5] += 1
    assert failed(step, result) == {"sparse_table"}


def test_a_kernel_cut_after_the_router_is_judged_to_there():
    step = whole(2, npes=1, until="router")
    verdicts = verify(step, published(step))
    assert all(v.passed for v in verdicts)
    assert "keys" in {v.name for v in verdicts}
    assert not {"sel", "mid", "ffn", "ar_out"} & {v.name for v in verdicts}


def test_formats_move_the_result_by_some_percent_and_the_chain_by_nothing(four_ranks, right_result):
    verdicts = verify(four_ranks, right_result)
    errors = {(v.against, v.name): v.error for v in verdicts if v.rank == 0}
    assert 1e-2 < errors["exact", "ar_out"] < 1.2e-1
    assert errors["chained", "ar_out"] == 0.0


def test_the_exact_rows_of_all_ranks_are_the_exact_layers(four_ranks):
    from m3lab.verify.mlp import _Exact, _Tables

    a = torch.randn(2, MODEL.hidden)
    w = four_ranks.weights
    picks = exact.route_rows(w, MODEL, a)[1]
    numbers = _Exact(four_ranks, a, picks)
    got = sum(numbers.partial(_Tables(four_ranks, rank)) for rank in range(4))
    want = exact.mlp_half(w, MODEL, a + four_ranks.inputs.h_in.float(), picks).out
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


# --- red ---


@pytest.mark.parametrize(
    ("field", "failing"),
    [
        ("weights", {"weights", "ffn", "ar_out", "ranks"}),
        ("intermediates", {"mid", "ffn", "ar_out"}),
        ("ffn", {"ffn", "ffn_sum"}),
        ("ar_out", {"ar_out", "ffn_sum", "ranks"}),
        ("sigmoids", {"sigmoid", "keys", "copies", "ranks", "weights"}),
    ],
)
def test_one_wrong_value_fails_its_stage_and_those_it_feeds_only(
    four_ranks, result, field, failing
):
    views = result.ranks[2]
    at = (0,) * views[field].ndim
    if field == "sigmoids":  # of an expert that is chosen, so that its weight is off too
        at = (0, 0, int(views["experts"][0, 0]))
    views[field][at] += 50 * views[field].abs().max()
    assert failed(four_ranks, result) == failing


def test_one_wrong_fp8_element_fails_the_row_and_the_intermediates_made_of_it(four_ranks, result):
    result.ranks[1]["xn8"][1, 7] ^= 0x80
    result.ranks[1]["xn8"][1, 7] |= 0x70
    assert failed(four_ranks, result) == {"xn8", "mid", "ranks"}


def test_a_wrong_scale_byte_away_from_an_edge_fails(four_ranks, result):
    result.ranks[1]["xsc"][0, 3] += 2
    assert {"xsc", "xn8"} <= failed(four_ranks, result)


def test_one_copy_of_the_scores_that_differs_fails_as_a_copy_alone(four_ranks, result):
    result.ranks[3]["keys"][5, 1, 99] += 128
    assert failed(four_ranks, result) == {"copies", "ranks"}


def test_an_expert_that_the_keys_do_not_name_fails_the_record(four_ranks, result):
    views = result.ranks[0]
    others = [e for e in four_ranks.experts if e not in views["experts"][1].tolist()]
    views["experts"][1, 3] = others[0]
    assert {"sel", "picks", "mid", "ffn"} <= failed(four_ranks, result)


def test_two_swapped_slots_fail_the_record(four_ranks, result):
    record = result.ranks[0]["experts"]
    record[0, [0, 1]] = record[0, [1, 0]]
    assert "sel" in failed(four_ranks, result)


def test_an_id_that_is_no_expert_fails_and_breaks_nothing(four_ranks, result):
    result.ranks[0]["experts"][0, 0] = 1 << 20
    assert {"sel", "picks"} <= failed(four_ranks, result)


def test_an_expert_outside_the_pool_makes_nan_and_never_passes(four_ranks, result):
    absent = next(e for e in range(128) if e not in four_ranks.experts)
    result.ranks[0]["experts"][0, 2] = absent
    assert {"sel", "picks", "mid", "ffn", "ar_out"} <= failed(four_ranks, result)


@pytest.mark.parametrize(
    "field", ["sp_l", "attnq", "a", "xn8", "xsc", "sigmoids", "intermediates", "ffn"]
)
def test_a_nan_in_any_format_is_counted(four_ranks, result, field):
    tensor = result.ranks[3][field]
    bytes_of_nan = {"attnq": 0x7F, "xn8": 0xFF, "xsc": 0xFF}
    tensor[(0,) * tensor.ndim] = bytes_of_nan.get(field, torch.nan)
    found = [v for v in verify(four_ranks, result) if v.name == "nan" and not v.passed]
    assert [(v.rank, v.error) for v in found] == [(3, 1.0)]


def test_a_padding_rows_values_are_nobodys_business():
    step = whole(2, npes=1, pad_rows=1)
    result = published(step)
    views = result.ranks[0]
    for name in ("xn8", "xsc", "experts", "weights", "intermediates", "ar_out", "h_mid"):
        tensor = views[name]
        tensor[1] = torch.nan if tensor.is_floating_point() else 0x7F
    for name in ("keys", "sigmoids", "ffn"):
        views[name][:, 1] = 0
    assert failed(step, result) == {"h_mid"}  # the output projection's rows are compared whole


# --- what the step lays out ---


def test_every_token_is_routed_inside_the_pool_and_by_its_own_scores():
    step = whole(4, npes=1)
    picks = published(step).ranks[0]["experts"][:, :4]
    assert set(picks.flatten().tolist()) <= set(step.experts)
    assert len({tuple(row) for row in picks.tolist()}) > 1
    assert len(step.experts) == 8


def test_an_absent_experts_scales_are_nan_and_its_elements_unwritten():
    step = whole(1, npes=1)
    placed = step._ranks[0].placed
    absent = next(e for e in range(128) if e not in step.experts)
    per_expert = placed["s2"].nbytes // 129
    scales = placed["s2"].read(torch.uint8, (per_expert,), absent * per_expert)
    assert (scales == 0xFF).all()
    memory = placed["w2"].memory
    size = placed["w2"].nbytes // 129
    for expert, written in ((absent, False), (step.experts[0], True), (128, True)):
        start = placed["w2"].offset + expert * size
        assert bool(memory.defined[start : start + size].all()) == written
        assert bool(memory.defined[start : start + size].any()) == written


def test_a_nan_row_picks_experts_that_the_pool_always_holds():
    step = whole(1, npes=1)
    xn = torch.full((1, MODEL.hidden), torch.nan)
    from m3lab.reference import kernel as ref

    scores = ref.router_scores(xn, step.weights.w_gate, step.weights.bias)
    picks = ref.route(*scores, 2.0, 1.0).experts[0, :4].tolist()
    assert set(picks) <= set(step.experts)


def test_weights_are_drawn_once_a_process_whatever_the_step():
    assert whole(1, npes=1).weights is whole(3, npes=1, context=100).weights


@pytest.mark.parametrize("experts", [[1, 2, 3], [0, 1, 2, 128], [-1, 0, 1, 2]])
def test_a_pool_that_cannot_route_a_token_is_refused(experts):
    with pytest.raises(ValueError, match=r"at least 4 ids in 0\.\.127, got"):
        whole(1, npes=1, experts=experts)
