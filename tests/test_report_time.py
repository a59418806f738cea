"""Modelled time in reports: taken from the rows, always called modelled, absent from old rows."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from m3lab.clock.clock import Hop
from m3lab.report import html, plots, tables
from m3lab.sweep.cases import packed
from m3lab.sweep.results import HOUSE, Run, read_rows, write_rows

SAMPLE = Path(__file__).parent.parent / "results" / "sample"
NEW = ("tuning", "timeline", "clock", "modelled_us", "modelled", "stamps", "waits")
HOPS = [
    Hop("o_proj.py:9", "o_proj", (0, 3), (1, 7), 5.0, 9.0, 10.0),
    Hop("down.py:7", "down", (1, 7), (1, 0), 11.0, 20.0, 21.0),
]


def nested(clock="c1", hops=()):
    """A row's ``modelled`` text."""
    path = [hop.__dict__ for hop in hops]
    return json.dumps(
        {"part": "MI355X", "clock": clock, "rank_modelled_us": {}, "critical_path": path}
    )


def us_of(row):
    """A made-up modelled time that every value of a case changes."""
    return 10 * row["tokens"] + row["context"] / 1000 + row["npes"] + row["tp"] / 100


def untimed_rows():
    """The sample's rows up to 8,192 keys as they were before there was a clock."""
    rows = [row for row in read_rows(SAMPLE) if row["context"] <= 8192]
    return [{k: v for k, v in row.items() if k not in NEW} for row in rows]


def timed_rows():
    """The sample's plain rows with made-up modelled times, one with stamps of its four ranks."""
    rows = [
        row
        | {"tuning": "{}", "timeline": False, "clock": True}
        | {"modelled_us": us_of(row), "modelled": nested(), "stamps": None}
        for row in untimed_rows()
        if "timeline" not in row["name"]
    ]
    ticks = torch.zeros(256, 32, dtype=torch.int64)
    ticks[:, 0], ticks[:, 4], ticks[:, 11] = 210, 1000, 2000 + torch.arange(256)
    stamped = next(row for row in rows if row["name"] == "s1_c8192_tp4") | {
        "name": "s1_c8192_tp4_timeline",
        "key": "stamped",
        "timeline": True,
        "modelled": nested(hops=HOPS),
        "stamps": packed([ticks] * 4),
    }
    return [*rows, stamped]


def few(rows):
    """Enough for every section of a report."""
    return [row for row in rows if row["tokens"] < 4 and row["context"] > 2048]


@pytest.fixture(scope="module")
def timed():
    return pd.DataFrame(timed_rows())


@pytest.fixture(scope="module")
def untimed():
    return pd.DataFrame(untimed_rows())


@pytest.fixture
def folder(tmp_path):
    """A run folder of some of the timed rows, and one whose knob costs 2 modelled us."""
    target = tmp_path / "run"
    target.mkdir()
    shutil.copy(SAMPLE / "run.json", target)
    rows = few(timed_rows())
    base = next(row for row in rows if row["name"] == "s1_c8192_tp4")
    turned = base | {"name": "s1_c8192_tp4_score_copies1", "key": "turned"}
    turned |= {"tuning": '{"score_copies": 1}', "modelled_us": base["modelled_us"] + 2}
    write_rows(target, [*rows, turned])
    return target


# --- tables ---


def test_a_times_row_is_the_rows_time_beside_its_memory_bytes_at_7_2_terabytes_a_second(timed):
    table = tables.times(timed).set_index("case")
    for case in timed.to_dict("records"):
        floors = json.loads(case["floors"]).values()
        memory = sum(f["weights"] + f["cache"] + f["inputs"] for f in floors)
        row = table.loc[case["name"]]
        assert row["modelled us"] == us_of(case)
        assert row["byte floor us"] == pytest.approx(memory / 7.2e6)
        assert row["ratio"] == pytest.approx(us_of(case) * 7.2e6 / memory)
    assert table.loc["s1_c8192_tp4", "byte floor us"] == pytest.approx(7.3, abs=0.05)  # k4.md


def test_times_are_printed_by_width_ranks_and_context_a_column_a_token_count(timed):
    grid = tables.times_by(timed)
    assert grid.loc[(4, "solo", 8192), ("4 tokens", "modelled us")] == pytest.approx(49.232)
    assert grid.loc[(4, "four ranks", 100), ("1 token", "modelled us")] == pytest.approx(14.14)
    assert len(grid) == 8


def test_a_case_with_knobs_or_a_timeline_is_in_no_comparison_of_plain_cases(timed):
    turned = timed[timed["name"] == "s1_c8192_tp4"].assign(
        name="s1_c8192_tp4_score_copies1", tuning='{"score_copies": 1}', modelled_us=999.0
    )
    both = pd.concat([turned, timed], ignore_index=True)
    pd.testing.assert_frame_equal(tables.times_by(both), tables.times_by(timed))
    names = set(tables.plain(tables.times(both))["case"])
    assert not [name for name in names if "score_copies" in name or "timeline" in name]
    assert len(tables.plain(both, "name")) == 24


def test_builds_of_other_knobs_or_with_stamps_are_builds_of_their_own(timed):
    turned = timed[timed["name"] == "s1_c8192_tp4"].assign(tuning='{"poll_all": true}')
    labels = set(tables.builds(pd.concat([timed, turned])))
    assert labels >= {
        "1 token, four ranks",
        "1 token, four ranks, timeline",
        "1 token, four ranks, poll_all True",
    }


def test_rows_of_before_the_clock_are_still_read(untimed):
    assert tables.timed(untimed).empty
    assert tables.times(untimed).empty
    assert tables.times_by(untimed).empty
    assert tables.stamped(untimed) == []
    assert tables.clocks(untimed) == set()
    row = untimed.iloc[0].to_dict()
    assert (tables.stamps(row), tables.hops(row), tables.knobs(row)) == ([], [], {})
    assert tables.waits(row) is None
    assert "modelled us" not in tables.summary(untimed)
    assert len(tables.builds(untimed)) == 10
    assert plots.time_figures(untimed) == []


def test_a_run_of_some_cases_with_a_clock_shows_those(timed):
    some = timed.copy()
    some.loc[some["npes"] > 1, ["modelled_us", "modelled"]] = None
    assert set(tables.times(some)["npes"]) == {1}
    shown = tables.summary(some)["modelled us"]
    assert shown["s1_c100_tp4_solo"] == "11.1"
    assert shown["s1_c100_tp4"] == ""


def test_hops_come_back_as_the_clock_gave_them(timed):
    (case,) = tables.stamped(timed)
    assert tables.hops(case) == HOPS


def test_times_of_two_runs_are_compared_case_by_case(timed):
    older = timed.iloc[2:].copy()
    older["modelled_us"] += 2.5
    table = tables.compared(tables.times, timed, older, ["modelled us"], ["case"])
    assert len(table) == len(timed) - 2
    assert table["modelled us", "change"].to_numpy() == pytest.approx(-2.5)


# --- figures ---

MAKERS = {
    "tokens": plots.time_by_tokens,
    "context": plots.time_by_context,
    "tp": plots.time_by_tp,
}


@pytest.mark.parametrize(("axis", "make"), MAKERS.items())
def test_a_time_figure_says_modelled_in_its_title_its_axes_and_its_legend(timed, axis, make):
    fig = make(timed)
    assert fig.get_suptitle().startswith("Modelled: ")
    above, below = fig.axes[0], fig.axes[2]
    assert "modelled us" in above.get_ylabel()
    assert "modelled" in below.get_ylabel()
    labels = [t.get_text() for a in fig.axes if a.get_legend() for t in a.get_legend().texts]
    assert labels[0] == "modelled"
    assert labels[1].startswith("byte floor")


@pytest.mark.parametrize(("axis", "make"), MAKERS.items())
def test_modelled_is_dashed_with_hollow_marks_and_the_floor_is_not(timed, axis, make):
    fig = make(timed)
    series = {"tokens": 4, "context": 3, "tp": 3}[axis]
    for panel in fig.axes[:2]:
        assert len(panel.lines) == 2 * series
        for line in panel.lines:
            modelled = max(line.get_ydata()) > 10.5  # no floor of the sample is
            assert line.is_dashed() == modelled
            assert (line.get_markerfacecolor() == "white") == modelled
    assert all(line.is_dashed() for panel in fig.axes[2:] for line in panel.lines)


def test_the_lines_are_the_tables_numbers_and_the_panels_tell_solo_from_all_ranks(timed):
    fig = plots.time_by_tokens(timed)
    for panel, ranks in zip(fig.axes[:2], (1, 4), strict=True):
        assert panel.get_title(loc="left").startswith("solo" if ranks == 1 else "all ranks")
        line = panel.lines[-2]  # of the longest context
        wanted = [10 * t + 8.192 + ranks + 0.04 for t in (1, 2, 4)]
        assert list(line.get_ydata()) == pytest.approx(wanted)


def test_the_title_goes_from_the_axiss_first_value_to_its_last(timed):
    title = plots.time_by_context(timed).get_suptitle().replace("\N{NO-BREAK SPACE}", " ")
    assert title.startswith("Modelled: 14.1 us at context 100, 22.2 us at context 8,192, ")
    assert title.endswith("times the byte floor (all ranks, W = 4, 1 token)")


def test_another_width_is_not_averaged_into_a_figure_of_tokens(timed):
    wider = timed.assign(tp=8, modelled_us=1e6, name=timed["name"].str.replace("tp4", "tp8"))
    fig = plots.time_by_tokens(pd.concat([wider, timed], ignore_index=True))
    assert max(max(line.get_ydata()) for axis in fig.axes for line in axis.lines) < 100
    assert "W\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}4" in fig.axes[0].get_title(loc="left")


def test_a_run_has_the_time_figures_of_the_axes_that_it_varies(timed):
    assert plots.time_figures(timed) == [plots.time_by_tokens, plots.time_by_context]
    assert plots.time_figures(timed[timed["tokens"] == 2]) == [plots.time_by_context]


def test_a_run_without_a_clock_gets_a_sentence_for_a_figure(untimed):
    run = Run(SAMPLE, {}, untimed)
    assert "no case of this run has a modelled time" in (
        plots.show(plots.time_by_tokens, run).data.lower()
    )


# --- the report ---


def test_the_note_links_to_what_the_model_gets_wrong_where_a_link_works(timed, tmp_path):
    inside = html.time_note(Run(SAMPLE, {}, timed)).data
    assert "none is measured" in inside
    assert "(../../docs/model.md#what-it-gets-wrong-and-why)" in inside
    outside = html.time_note(Run(tmp_path, {}, timed)).data
    assert "`docs/model.md`" in outside
    assert ".." not in outside
    page = (HOUSE / "docs" / "model.md").read_text()
    assert "\n## What it gets wrong, and why\n" in page


def test_the_report_shows_modelled_time_the_timeline_and_keeps_a_trace(folder):
    text = html.make_report(folder, notebooks=["20_report"]).read_text()
    assert "Every time of this kernel is modelled, none is measured" in text
    assert "traces/s1_c8192_tp4_timeline.json.gz" in text
    kept = {p.stem for p in (folder / "figures").glob("*.svg")}
    assert kept >= {"time_by_tokens", "time_by_context", "timeline_s1_c8192_tp4_timeline"}
    assert "ablation" in kept
    assert re.search(r"score_copies = 1</td>.*?>22.23</td>\s*<td[^>]*>24.23<", text, re.DOTALL)
    packed_trace = (folder / "traces" / "s1_c8192_tp4_timeline.json.gz").read_bytes()
    trace = json.loads(gzip.decompress(packed_trace))
    assert len({e["pid"] for e in trace["traceEvents"]}) == 4  # ranks
    assert trace["otherData"]["time"] == "modelled"


@pytest.mark.slow
def test_the_report_of_rows_without_a_clock_says_that_there_is_no_time(folder, untimed):
    write_rows(folder, few(untimed_rows()))
    text = html.make_report(folder, notebooks=["20_report"]).read_text()
    assert "No case of this run has a modelled time" in text
    assert "No case of this run has a timeline" in text
    assert "No case of this run turns a knob" in text
    assert "none is measured" not in text


def test_a_comparison_tells_when_the_clock_changed_between_the_runs(folder):
    older = folder.parent / "older"
    older.mkdir()
    meta = json.loads((folder / "run.json").read_text())
    (older / "run.json").write_text(json.dumps(meta | {"start": "2020-01-01T00:00:00+00:00"}))
    write_rows(older, [row | {"modelled": nested("c0")} for row in few(timed_rows())])
    html.make_report(folder, notebooks=["21_compare"])
    cells = json.loads((folder / "21_compare.ipynb").read_text())["cells"]
    shown = json.dumps([cell.get("outputs") for cell in cells])
    assert "The clock or its constants changed between the runs" in shown
    assert "modelled us" in shown
