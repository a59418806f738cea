"""Parameter files: what they accept, and the one sentence for each thing wrong with them."""

from pathlib import Path

import pytest

from m3lab.sweep.cases import Case
from m3lab.sweep.params import ParamsError, load, parse

MODEL = (("hidden", 2048), ("inter", 512), ("shared_inter", 512))
PARAMS = Path(__file__).parent.parent / "params"


def sentence(data: dict) -> str:
    with pytest.raises(ParamsError) as caught:
        parse(data, "some.yaml")
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("some.yaml: ")
    return text


@pytest.mark.parametrize("path", sorted(PARAMS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_committed_parameter_file_is_valid(path):
    assert load(path).expand()


def test_the_quick_sweep_covers_what_it_promises():
    cases = load(PARAMS / "quick.yaml").expand()
    plain = {
        (c.tokens, c.context, c.npes)
        for c in cases
        if (c.q_len, c.pad_rows, c.page_stride, c.static_scale, c.model) == (1, 0, 8, False, ())
    }
    contexts = (100, 2048, 2049, 8192, 262144)
    assert plain == {(t, c, n) for t in (1, 2, 4) for c in contexts for n in (1, 4)}
    assert any(c.q_len > 1 for c in cases)
    assert any(c.pad_rows for c in cases)
    assert any(c.page_stride == 16 for c in cases)
    peers = {(c.tokens, c.tp, c.npes) for c in cases if c.static_scale}
    assert peers == {(t, 4, 4) for t in (1, 2, 4)}  # the form of isa_report.peer_table


def test_the_full_grid_is_every_token_count_and_width_that_is_built():
    cases = load(PARAMS / "full.yaml").expand()
    assert {c.tokens for c in cases} == {1, 2, 3, 4}
    assert {(c.tp, c.npes) for c in cases} == {(w, n) for w in (2, 4, 8) for n in (1, w)}
    assert {c.context for c in cases} == {1, 100, 2048, 2049, 8192, 65536}
    assert {c.until for c in cases} == {None}


@pytest.mark.parametrize(
    ("grid", "varied"),
    [
        ({"tokens": [1, 2]}, ["10_sweep_tokens"]),
        ({"context": [1, 2]}, ["11_sweep_context"]),
        ({"tp": [2, 4]}, ["12_sweep_tp"]),
        ({"solo": [True, False]}, []),
        ({"tokens": [1, 2], "tp": [4, 8]}, ["10_sweep_tokens", "12_sweep_tp"]),
    ],
)
def test_the_notebooks_are_those_of_what_the_cases_differ_in(grid, varied):
    assert parse({"grid": grid}, "x").notebooks == [*varied, "20_report"]
    assert parse({"grid": grid, "notebooks": ["20_report"]}, "x").notebooks == ["20_report"]


def test_a_truncated_build_is_a_case_of_its_own():
    whole, half = (parse({"grid": {}} | u, "x").expand()[0] for u in ({}, {"until": "o_proj"}))
    assert whole.until is None
    assert whole.name + "_o_proj" == half.name


def test_a_grid_is_the_product_of_its_axes_and_a_scalar_is_a_list_of_one():
    cases = parse({"grid": {"tokens": [1, 2], "context": [100, 200, 300], "tp": 4}}, "x").expand()
    assert [(c.tokens, c.context) for c in cases] == [
        (t, c) for t in (1, 2) for c in (100, 200, 300)
    ]


def test_a_case_that_grid_and_list_both_name_runs_once():
    both = {"grid": {"tokens": 2, "context": 300}, "cases": [{"tokens": 2, "context": 300}]}
    assert len(parse(both, "x").expand()) == 1


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"grid": {"tokens": [1, 17]}}, ["grid.tokens.1", "1..16", "17"]),
        ({"grid": {"tokens": 0}}, ["grid.tokens.0", "1..16", "0"]),
        ({"grid": {"tokens": [True]}}, ["grid.tokens.0", "1..16", "True"]),
        ({"grid": {"tokens": ["two"]}}, ["grid.tokens.0", "1..16", "'two'"]),
        ({"grid": {"tokens": []}}, ["grid.tokens", "at least one", "[]"]),
        ({"cases": [{"context": 2**20 + 1}]}, ["cases.0.context", "1..1048576", "1048577"]),
        ({"grid": {"tp": 3}}, ["grid.tp.0", "1, 2, 4, 8", "3"]),
        ({"grid": {"page_stride": 12}}, ["grid.page_stride.0", "8, 16", "12"]),
        ({"grid": {"solo": "maybe"}}, ["grid.solo.0", "false, true", "'maybe'"]),
        ({"grid": {"tokenz": 1}}, ["grid.tokenz", "unknown key", "tokens, context"]),
        ({"grid": {}, "colour": 3}, ["colour", "unknown key", "3", "backend"]),
        ({"cases": [{"ranks": 4}]}, ["cases.0.ranks", "unknown key", "solo"]),
        ({"grid": {}, "backend": "cuda"}, ["backend", "auto, interpreter, hip", "'cuda'"]),
        ({"grid": {}, "until": "mlp"}, ["until", "o_proj, router", "'mlp'"]),
        ({"grid": {}, "seed": -1}, ["seed", "0..", "-1"]),
        ({"grid": {}, "model": {"hiden": 1}}, ["model.hiden", "unknown key", "hidden"]),
        ({"grid": {}, "model": {"hidden": 5000}}, ["model", "2048", "5000"]),
        ({"grid": {}, "model": {"hidden": "wide"}}, ["model.hidden", "integer", "'wide'"]),
        ({"grid": {}, "model": {"rms_eps": None}}, ["model.rms_eps", "a number", "None"]),
        ({"grid": {}, "model": {"kv_heads": 0}}, ["model", "kv_heads", "at least 1", "0"]),
        ({"grid": 3}, ["grid: must be a mapping of keys, got 3"]),
        ({"cases": {"tokens": 1}}, ["cases: must be a list, got {'tokens': 1}"]),
        ({"grid": {}, "notebooks": "20_report"}, ["notebooks: must be a list", "'20_report'"]),
        ({"seed": 1}, ["names no case"]),
        ({"grid": {"tuning": {"copies": 1}}}, ["grid.tuning.0.copies", "is no knob", "poll_all"]),
        ({"grid": {"tuning": [{}, {"score_copies": 3}]}}, ["grid.tuning.1.score_copies", "3"]),
        (
            {"cases": [{"tuning": {"score_copies": 3}}]},
            ["tuning.score_copies: must be one"],
        ),
        ({"cases": [{"tuning": {"poll_all": 1}}]}, ["tuning.poll_all", "False, True", "got 1"]),
        ({"cases": [{"tuning": "poll_all"}]}, ["cases.0.tuning", "mapping of knobs", "'poll_all'"]),
        ({"cases": [{"tuning": [{}]}]}, ["cases.0.tuning", "mapping of knobs", "[{}]"]),
        ({"grid": {"timeline": "yes"}}, ["grid.timeline.0", "false, true", "'yes'"]),
        ({"cases": [{"clock": None}]}, ["cases.0.clock", "false, true", "None"]),
    ],
)
def test_a_bad_value_is_named_with_its_key_range_and_value(data, parts):
    text = sentence(data)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ({"tokens": 3, "q_len": 2}, ["multiple of q_len", "3", "2"]),
        ({"tokens": 4, "q_len": 4, "context": 3}, ["at least q_len", "3", "4"]),
        ({"tokens": 2, "pad_rows": 2}, ["live row", "2"]),
        ({"tokens": 4, "q_len": 2, "pad_rows": 1}, ["whole requests", "1"]),
        ({"timeline": True, "clock": False}, ["timeline needs clock"]),
        ({"tokens": 3, "tuning": {"ug_by_token": True}}, ["ug_by_token", "256 CTAs", "3 tokens"]),
    ],
)
def test_a_combination_that_no_build_takes_is_refused_before_anything_is_built(case, parts):
    text = sentence({"cases": [case]})
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ({"backend": "hip"}, ["backend hip", "not built yet", "interpreter"]),
        ({"layers": 2}, ["layers 2", "not built yet", "use 1"]),
        ({"grid": {"tp": 1}}, ["not built yet", "64 query and 4 kv heads", "TP width 1"]),
        ({"grid": {"tokens": 5}}, ["tokens 5", "1..4"]),
        ({"model": {"max_context": 1024}}, ["max_context 1024", "got 2048"]),
    ],
)
def test_what_no_case_could_run_is_refused_before_anything_is_built(data, parts):
    text = sentence({"grid": {"context": 2048}} | data)
    for part in parts:
        assert part in text


def test_knobs_are_an_axis_of_the_grid_and_the_defaults_are_no_knobs():
    tuning = [{}, {"score_copies": 8}, {"score_copies": 1, "poll_all": True}]
    cases = parse({"grid": {"tokens": [1, 2], "tuning": tuning}}, "x").expand()
    turned = (("poll_all", True), ("score_copies", 1))
    assert [(c.tokens, c.tuning) for c in cases] == [(1, ()), (1, turned), (2, ()), (2, turned)]
    assert cases[1].knobs.changes() == dict(turned)


def test_a_cases_name_tells_its_knobs_and_its_timeline():
    tuning = {"score_copies": 1, "pad_rows": False, "poll_all": True, "shared_after_routing": False}
    case = parse({"cases": [{"tuning": tuning, "timeline": True}]}, "x").expand()[0]
    knobs = "pad_rows_off_poll_all_score_copies1_shared_after_routing_off"
    assert case.name == f"s1_c2048_tp4_{knobs}_timeline"


def test_every_run_has_a_clock_unless_told_otherwise_and_no_timeline():
    case, without = parse({"cases": [{}, {"clock": False}]}, "x").expand()
    assert (case.clock, case.timeline, without.clock) == (True, False, False)


@pytest.mark.parametrize("tuning", [(("poll_all", False),), (("score_copies", 1), ("poll_all", 1))])
def test_a_case_holds_changed_knobs_only(tuning):
    with pytest.raises(ValueError, match=r"changed knobs, sorted|must be one of"):
        Case(tuning=tuning)


def test_several_problems_make_one_sentence_that_counts_the_others():
    text = sentence({"grid": {"tokens": 99, "tp": 3}})
    assert "99" in text
    assert "1 more problem" in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("grid: [1", "not valid YAML at line"),
        ("- 1\n- 2\n", "mapping"),
        ("", "an empty file"),
        ("title: \xfc", "UTF-8 text, byte 7 is 0xfc"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path, content, part):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ParamsError, match=part) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ParamsError, match=r"absent.yaml: cannot read"):
        load(tmp_path / "absent.yaml")


def test_a_case_survives_the_way_to_its_own_process():
    knobs = (("poll_all", True), ("score_copies", 1))
    case = Case(tokens=4, q_len=2, context=900, model=MODEL, tuning=knobs, timeline=True)
    assert Case.from_json(case.to_json()) == case


def test_the_key_tells_apart_every_value_but_the_time_limit():
    base = Case()
    others = [Case(seed=1), Case(context=99), Case(solo=True), Case(model=(("hidden", 2048),))]
    others += [Case(tuning=(("score_copies", n),)) for n in (1, 2)]
    others += [Case(timeline=True), Case(clock=False)]
    assert len({c.key for c in [base, *others]}) == 9
    assert Case(timeout_s=5).key == base.key
