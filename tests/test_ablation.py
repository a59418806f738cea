"""The ablation's table and chart on rows written by hand, and its parameter file."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from m3lab.kernels.tuning import Tuning
from m3lab.report import ablation
from m3lab.report.calibrate import ONE, ROWS, Row
from m3lab.sweep import params

FILE = Path(__file__).parent.parent / "params" / "ablation.yaml"


def row(tokens=1, us=30.0, knobs=None, **changes):
    """A finished row as a sweep writes it, as far as the ablation reads it."""
    shared = {
        "tokens": tokens, "context": 8192, "tp": 4, "solo": False, "npes": 4, "q_len": 1,
        "pad_rows": 0, "page_stride": 8, "static_scale": False, "backend": "auto", "until": None,
        "seed": 0, "layers": 1, "checks": False, "model": "{}", "timeline": False,
    } | changes  # fmt: skip
    name = "_".join([f"s{tokens}", *(f"{k}{v}" for k, v in (knobs or {}).items())])
    return shared | {"name": name, "tuning": json.dumps(knobs or {}), "modelled_us": us}


def run(*rows):
    return pd.DataFrame(rows)


PUBLISHED = (
    Row("a", "a time, no change", 30.0, 1, Tuning(poll_all=True)),
    Row("b", "to the default", -2.0, 1, Tuning(), Tuning(score_copies=1)),
    Row("c", "from the latest published", 1.5, 1, replace(ONE, poll_all=True), ONE),
    Row("d", "four tokens", 9.0, 4, Tuning(poll_all=True), Tuning()),
    Row("e", "of an earlier build", 7.0, 1, Tuning(poll_all=True, serial_rank=True),
        Tuning(serial_rank=True)),
    Row("f", "two at once", 5.0, 1, Tuning(pad_rows=False, spin_whole_row=True), Tuning()),
    Row("g", "of an earlier build alone", 3.0, 1, Tuning(merge_in_output=True, poll_all=True),
        Tuning(poll_all=True)),
)  # fmt: skip


@pytest.fixture
def rows_by_hand(monkeypatch):
    monkeypatch.setattr(ablation, "ROWS", PUBLISHED)


def test_a_turned_case_stands_beside_the_same_case_without_its_knobs():
    cases = run(
        row(1, 30.0), row(4, 50.0), row(4, 52.5, {"poll_all": True}),
        row(1, 27.0, {"score_copies": 1}),
    )  # fmt: skip
    table = ablation.table(cases)
    shown = table[["tokens", "knob", "base, modelled us", "modelled us", "change, modelled us"]]
    assert shown.to_numpy().tolist() == [
        [4, "poll_all = True", 50.0, 52.5, 2.5],
        [1, "score_copies = 1", 30.0, 27.0, -3.0],
    ]
    assert table["change, modelled %"].tolist() == pytest.approx([5.0, -10.0])
    assert ablation.left_out(cases) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("context", 2048), ("tp", 8), ("solo", True), ("static_scale", True), ("timeline", True),
     ("seed", 1), ("model", '{"hidden": 2048}'), ("page_stride", 16), ("until", "router")],
)  # fmt: skip
def test_a_case_of_another_form_is_no_base(name, value):
    cases = run(row(1, 30.0, **{name: value}), row(1, 31.0, {"poll_all": True}))
    assert ablation.table(cases).empty
    assert "default knobs: s1_poll_allTrue." in ablation.left_out(cases)
    with pytest.raises(ValueError, match="Left out, without a modelled case of the same form"):
        ablation.chart(cases)


def test_what_is_missing_in_a_row_is_missing_in_its_base_as_well():
    """A parquet file gives None back as None or as a NaN, by the column's other rows."""
    cases = run(row(1, 30.0, until=None), row(1, 31.0, {"poll_all": True}, until=float("nan")))
    assert len(ablation.table(cases)) == 1


def test_turned_cases_without_a_time_or_a_base_are_named_in_one_sentence():
    cases = run(
        row(1, None), row(1, 31.0, {"poll_all": True}), row(4, 50.0),
        row(4, None, {"pad_rows": False}), row(4, 51.0, {"serial_rank": True}),
    )  # fmt: skip
    assert list(ablation.table(cases)["case"]) == ["s4_serial_rankTrue"]
    assert ablation.left_out(cases) == (
        "Left out, without a modelled time: s4_pad_rowsFalse; and without a modelled case of the "
        "same form at the default knobs: s1_poll_allTrue."
    )


def test_a_run_that_turns_no_knob_says_so():
    """Rows made before there were knobs have no such column."""
    old = run(row(1, 30.0)).drop(columns=["tuning", "modelled_us"])
    for cases in (run(row(1, 30.0), row(4, 50.0)), old, run(row()).iloc[:0]):
        assert ablation.table(cases).empty
        assert ablation.left_out(cases).startswith("No case of this run turns a knob")
        assert ablation.readings(ablation.table(cases)) == []


# --- published changes ---


def test_a_published_change_counts_in_the_direction_in_which_the_knob_is_turned(rows_by_hand):
    assert ablation.published(1, {"score_copies": 1})[0] == 2.0  # published: back to the default
    assert ablation.published(1, {"poll_all": True}) == (1.5, PUBLISHED[2])
    assert ablation.published(4, {"poll_all": True})[0] == 9.0
    assert ablation.published(4, {"score_copies": 1}) is None
    assert ablation.published(1, {"score_copies": 2}) is None
    assert ablation.published(1, {"pad_rows": False}) is None  # only with another knob
    assert ablation.published(1, {"pad_rows": False, "spin_whole_row": True})[0] == 5.0


def test_a_change_of_an_earlier_build_counts_where_there_is_no_other_and_is_called_so(rows_by_hand):
    assert ablation.published(1, {"merge_in_output": True})[0] == 3.0
    cases = run(
        row(1, 30.0), row(1, 31.0, {"merge_in_output": True}), row(1, 31.0, {"poll_all": True})
    )
    table = ablation.table(cases)
    assert list(table["published of"]) == ["an earlier build", "the latest published schedule"]
    assert "measured by others on an earlier build: +3 us" in ablation.readings(table)[0]


def test_signs_are_compared_with_what_is_published(rows_by_hand):
    knobs = {"poll_all": True}
    cases = [row(1, 30.0), row(1, 31.0, knobs), row(1, 29.0, knobs), row(1, 30.001, knobs)]
    table = ablation.table(run(*cases, row(1, 33.0, {"serial_rank": True})))
    assert list(table["signs"]) == ["agree", "differ", "no change modelled", ""]
    assert list(table["published row"]) == ["c", "c", "c", ""]
    texts = ablation.readings(table)
    assert texts[0] == (
        "every thread polls every partition (1 token, four ranks): +1.00 us modelled (+3.3 %); "
        "published, measured by others on the latest published schedule: +1.5 us, the same sign, "
        "0.7 times the size."
    )
    assert "the other sign: do not trust the model on this knob" in texts[1]
    assert "no change modelled; published" in texts[2]
    assert (
        texts[3]
        == "one serial lane ranks a block (1 token, four ranks): +3.00 us modelled (+10.0 %)."
    )


def test_four_gpus_were_published_so_nothing_stands_beside_one_rank():
    cases = run(
        row(1, 30.0, solo=True, npes=1), row(1, 31.0, {"poll_all": True}, solo=True, npes=1)
    )
    assert list(ablation.table(cases)["published row"]) == [""]


def test_published_changes_of_the_calibration_are_found_by_their_knobs():
    """Every one that a build of ours shows is found from some single knob, with its own size."""
    for known in ROWS:
        if known.before is None:
            continue
        ends = [t.changes() for t in (known.before, known.after)]
        turned = {k: v for t in ends for k, v in t.items() if ends[0].get(k) != ends[1].get(k)}
        assert len(turned) == 1, known
        found = ablation.published(known.tokens, turned)
        assert found is not None, known
        assert abs(found[0]) == abs(found[1].published_us)


# --- words and picture ---


def test_a_knob_is_told_in_words_and_an_unknown_one_by_its_name():
    assert ablation.words({"score_copies": 1}) == "one copy of the router scores"
    assert ablation.words({"score_copies": 4}) == "4 copies of the router scores"
    assert ablation.words({"down_in_flight": 1}) == "down weights of one token in flight"
    assert ablation.words({"poll_all": True, "brand_new": 3}) == (
        "every thread polls every partition, brand_new = 3"
    )


def test_every_turned_knob_of_the_parameter_file_has_words_of_its_own():
    turned = [case.tuning for case in params.load(FILE).expand() if case.tuning]
    texts = {ablation.words(dict(knobs)) for knobs in turned}
    assert len(texts) == len(set(turned))
    assert not [text for text in texts if "=" in text]


def test_the_chart_has_a_panel_a_step_sorted_bars_and_published_marks(rows_by_hand):
    cases = run(
        row(1, 30.0), row(4, 50.0), row(1, 34.0, {"poll_all": True}),
        row(1, 29.0, {"score_copies": 1}), row(4, 51.0, {"serial_rank": True}),
    )  # fmt: skip
    fig = ablation.chart(cases)
    title = fig.get_suptitle()
    assert "costs up to 4.0 us (every thread polls every partition, 1 token)" in title
    assert "1 of 3 make the step faster; 1 of 2 signs agree with published changes" in title
    one, four = fig.axes
    assert [axis.get_title(loc="left") for axis in (one, four)] == [
        "1 token, four ranks", "4 tokens, four ranks",
    ]  # fmt: skip
    assert [bar.get_width() for bar in one.patches] == [-1.0, 4.0]  # upwards: the largest on top
    labels = [text.get_text() for text in one.get_yticklabels()]
    assert labels == ["one copy of the router scores", "every thread polls every partition"]
    assert list(one.lines[0].get_xdata()) == [2.0, 1.5]  # published, by the same order
    assert "us" in four.get_xlabel()
    legend = [text.get_text() for text in fig.legends[0].get_texts()]
    assert legend == ["modelled here", "published, others' builds, measured"]


def test_several_contexts_are_panels_of_their_own():
    cases = run(
        row(1, 30.0), row(1, 31.0, {"poll_all": True}), row(1, 20.0, context=100),
        row(1, 22.0, {"poll_all": True}, context=100),
    )  # fmt: skip
    titles = [axis.get_title(loc="left") for axis in ablation.chart(cases).axes]
    assert titles == ["1 token, four ranks, 100 keys", "1 token, four ranks, 8,192 keys"]


def test_a_title_does_not_boast_of_a_cost_that_is_none():
    cases = run(row(1, 30.0), row(1, 29.0, {"pad_rows": False}))
    assert "no turned knob makes the step slower" in ablation.chart(cases).get_suptitle()


# --- the parameter file ---


def test_the_ablation_turns_one_knob_at_a_time_against_a_default_of_each_token_count():
    cases = params.load(FILE).expand()
    assert {c.tokens for c in cases if not c.tuning} == {1, 4}
    assert {len(c.tuning) for c in cases} == {0, 1}
    assert {(c.npes, c.clock) for c in cases} == {(4, True)}
    defaults = {(c.tokens, c.context) for c in cases if not c.tuning}
    assert {(c.tokens, c.context) for c in cases} == defaults
    turned = {knobs[0][0] for c in cases if (knobs := c.tuning)}
    text = FILE.read_text()
    for name in Tuning.__dataclass_fields__:
        assert name in turned or name in text, f"{name} is neither turned nor left out in words"
