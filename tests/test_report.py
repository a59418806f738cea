"""Reports: tables and figures say what the rows hold, and the page is whole and self-contained."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import pandas as pd
import pytest

from m3lab.report import ablation, html, plots, tables
from m3lab.sweep.results import ResultsError, Run, load_run, read_rows, write_rows

SAMPLE = Path(__file__).parent.parent / "results" / "sample"


@pytest.fixture(scope="module")
def sample():
    return load_run(SAMPLE)


@pytest.fixture
def folder(tmp_path):
    """A run folder that may be changed: the sample's rows, nothing else."""
    target = tmp_path / "run"
    target.mkdir()
    for name in ("run.json", "cases.parquet"):
        shutil.copy(SAMPLE / name, target)
    return target


def edited(run, **changes):
    """The run with the first row's verdict fields changed."""
    cases = run.cases.copy()
    verdicts = json.loads(cases.loc[0, "verdicts"])
    verdicts[1] |= changes
    cases.loc[0, "verdicts"] = json.dumps(verdicts)
    return Run(run.path, run.meta, cases)


def test_the_sample_run_passed_every_check(sample):
    assert (sample.cases["status"] == "passed").all()
    assert tables.verdicts(sample.cases)["passed"].all()
    assert sample.cases["checks_failed"].sum() == 0


def test_the_verdict_line_counts_cases_and_checks(sample):
    cases = sample.cases
    n, checks = len(cases), len(tables.verdicts(cases))
    line = tables.verdict_line(cases)
    assert line == f"{n} of {n} cases passed; {checks} checks passed, 0 failed"


def test_a_case_without_verdicts_is_counted_as_not_finished(sample):
    cases = sample.cases.copy()
    cases.loc[0, ["status", "verdicts"]] = ["crashed", None]
    line = tables.verdict_line(cases)
    assert line.startswith(f"{len(cases) - 1} of {len(cases)} cases passed")
    assert line.endswith("1 cases did not finish")
    assert html.banner(Run(sample.path, sample.meta, cases)).data.count("NOT PASSED") == 1


def test_cases_that_have_not_run_are_counted_and_change_the_banner(sample):
    some = Run(sample.path, sample.meta, sample.cases.iloc[:5].reset_index(drop=True))
    text = html.banner(some).data
    assert "PASSED" in text
    assert f"{len(sample.cases) - 5} cases of quick.yaml have not run" in text
    assert html.GOOD in html.banner(sample).data
    assert html.GOOD not in text


def test_the_worst_error_and_its_case_stand_in_the_accuracy_table(sample):
    run = edited(sample, error=1.5e-3)
    name = json.loads(run.cases.loc[0, "verdicts"])[1]["name"]
    row = tables.accuracy(run.cases).loc["kernel reference, stage by stage", name]
    assert row["worst rel. L2"] == 1.5e-3
    assert row["worst in"] == run.cases.loc[0, "name"]
    assert "1 times under the bound" in plots.accuracy(run.cases).get_suptitle()


def test_a_title_states_a_failure_when_there_is_one(sample):
    run = edited(sample, error=0.4, passed=False)
    assert re.search(r"1 of \d+ comparisons exceed", plots.accuracy(run.cases).get_suptitle())


def test_bytes_are_per_rank_and_their_ratio_is_to_the_floor(sample):
    data = tables.moved_bytes(sample.cases)
    assert set(data["class"]) == set(tables.CLASSES)
    assert (data["ratio"] == data["moved"] / data["floor"]).all()
    weights = data[data["class"] == "weights"]
    assert (weights["ratio"] >= 1).all()
    one = weights[weights["tokens"] == 1]
    assert (one["ratio"] < 1.2).all()  # one rank's, not four


def test_one_tokens_floor_is_the_specs_52_3_megabytes(sample):
    rows = tables.streams(sample.cases)
    rows = rows[rows["case"] == "s1_c8192_tp4"].set_index("table")
    assert rows["floor"].sum() == pytest.approx(52.3e6, abs=0.1e6)  # k4.md
    assert rows.loc[["experts, up / gate", "experts, down"], "floor"].sum() == 5 * 7_520_256
    assert (rows["ratio"] >= 1).all()


def test_the_bytes_of_the_stages_are_all_bytes_but_the_openings(sample):
    moved = tables.moved_bytes(sample.cases).groupby("case")["moved"].sum()
    stages = tables.stage_bytes(sample.cases).groupby("case")["moved"].sum()
    opening = tables.stage_work(sample.cases).set_index("stage").loc["kernel"]
    opening = opening.set_index("case")["bytes"]
    assert (stages + opening).sub(moved).abs().max() < 1


def test_what_is_not_a_plain_case_of_the_grid_is_in_no_comparison_of_tokens(sample):
    table = tables.longest(tables.streams(sample.cases))
    assert set(table["case"]) == {f"s{t}_c262144_tp4" for t in (1, 2, 4)}
    assert len(set(tables.plain(tables.streams(sample.cases))["case"])) == 30  # of 38


def test_one_case_stands_for_each_token_count_of_a_run_of_several_widths(sample):
    rows = tables.streams(sample.cases[sample.cases["npes"] == 1])
    wider = rows.assign(tp=8, case=rows["case"].str.replace("tp4", "tp8"))
    both = tables.longest(pd.concat([wider, rows]))
    assert set(both["case"]) == {f"s{t}_c262144_tp4_solo" for t in (1, 2, 4)}
    odd = rows[rows["case"].str.contains("pad1")]
    assert len(tables.longest(pd.concat([odd, odd.assign(case="s4_c2049_tp4_q2")]))) == len(odd)


def test_lds_conflicts_are_cycles_over_the_cycles_without_any(sample):
    case = sample.cases[sample.cases["name"] == "s2_c8192_tp4"].iloc[0]
    counters = json.loads(case["counters"])
    ratio = counters["lds_cycles"]["down"] / counters["lds_ideal"]["down"]
    assert tables.lds_conflicts(sample.cases).loc["down", "2 tokens"] == round(ratio, 2)


def test_the_peers_figures_stand_beside_the_builds_of_its_form(sample):
    table = tables.peer(sample.cases)
    assert list(table.index.get_level_values(0).unique()) == [1, 2, 4]
    assert list(table.loc[(slice(None), "public peer"), "instructions"]) == [5390, 6622, 8321]
    case = sample.cases[sample.cases["name"] == "s4_c2049_tp4_static"].iloc[0]
    ours = json.loads(case["isa"])
    assert table.loc[(4, "this build"), "VGPR"] == ours["vgpr"]
    change = table.loc[(4, "change, %"), "VGPR"]
    assert change == pytest.approx(100 * (ours["vgpr"] - 183) / 183)
    assert tables.peer(sample.cases.assign(npes=1)).empty


def test_no_build_of_the_sample_spills_or_outgrows_lds(sample):
    figures = tables.builds(sample.cases)
    assert figures
    assert not [p for f in figures.values() for p in f.problems()]


def test_changes_between_runs_are_the_difference_of_shared_builds(sample):
    before = sample.cases.copy()
    isa = json.loads(before.loc[0, "isa"])
    isa["instructions"] -= 10
    for i, text in enumerate(before["isa"]):
        if json.loads(text)["name"] == isa["name"]:
            before.loc[i, "isa"] = json.dumps(isa)
    changes = tables.isa_changes(sample.cases, before)
    assert set(changes["instructions"]) == {0, 10}
    assert tables.isa_changes(sample.cases, before.iloc[:0]).empty


@pytest.mark.parametrize(
    "make",
    [
        plots.accuracy,
        plots.bytes_over_floor,
        plots.streams_over_floor,
        plots.bytes_by_context,
        plots.work_by_context,
        plots.isa_mix,
        plots.stage_work,
        plots.interpreter_wall,
    ],
    ids=lambda f: f.__name__,
)
def test_every_figure_has_a_finding_units_and_both_files(sample, make, tmp_path):
    fig = make(sample.cases)
    assert len(fig.get_suptitle()) > 20
    labels = [axis.get_xlabel() + axis.get_ylabel() for axis in fig.axes]
    assert any(labels)
    svg, png = plots.save(fig, tmp_path, make.__name__)
    assert svg.read_text().lstrip().startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_an_interpreters_seconds_are_never_called_a_kernels_time(sample):
    fig = plots.interpreter_wall(sample.cases)
    assert "not a GPU time" in fig.get_suptitle()
    assert all("interpreter" in a.get_ylabel() for a in fig.axes if a.get_ylabel())


def test_a_run_with_no_finished_case_says_so_instead_of_drawing(sample):
    empty = Run(sample.path, sample.meta, sample.cases.assign(verdicts=None))
    assert "nothing to draw" in plots.show(plots.accuracy, empty).data


def test_a_run_of_one_case_of_one_token_has_its_report(folder):
    write_rows(folder, [r for r in read_rows(folder) if r["tokens"] == 1][:1])
    text = html.make_report(folder).read_text()
    assert "1 token" in text
    assert "1 tokens" not in text


def test_the_report_is_one_page_without_code_or_outside_references(folder):
    page = html.make_report(folder, notebooks=["20_report"])
    text = page.read_text()
    cases = load_run(folder).cases
    pictures = 6 + len(plots.time_figures(cases)) + len(tables.stamped(cases))
    pictures += len(ablation.table(cases)) > 0
    assert text.count("data:image/svg+xml") == pictures
    assert "PASSED" in text
    assert "load_run(" not in text
    assert "Error" not in text
    assert not re.search(r'(src|href)="https?://', text)
    assert tempfile.gettempdir() not in text
    assert {p.name for p in (folder / "figures").iterdir()} >= {"accuracy.svg", "accuracy.png"}
    notebook = json.loads((folder / "20_report.ipynb").read_text())
    assert "input_path" not in notebook["metadata"]["papermill"]


def test_the_previous_run_is_the_latest_finished_one_that_began_before(folder):
    def run(name, start, end):
        there = folder.parent / name
        there.mkdir()
        meta = json.loads((folder / "run.json").read_text()) | {"start": start, "end": end}
        (there / "run.json").write_text(json.dumps(meta))
        return there

    assert html.previous_run(folder) is None
    run("older", "2026-01-01T00:00:00+00:00", "x")
    latest = run("old", "2026-01-02T00:00:00+00:00", "x")
    run("killed", "2026-01-03T00:00:00+00:00", None)
    run("newer", "2099-01-01T00:00:00+00:00", "x")
    assert html.previous_run(folder) == latest


def test_a_report_of_a_run_with_crashed_cases_is_made_and_says_not_passed(folder):
    rows = read_rows(folder)
    keep = ("key", "name", "npes", "tokens", "context", "solo", "code", "case_s")
    bad = {k: v for k, v in rows[0].items() if k in keep} | {
        "key": "x",
        "status": "crashed",
        "error": "the case's process ended with code -9",
    }
    write_rows(folder, [*rows[1:], bad])
    text = html.make_report(folder, notebooks=["20_report"]).read_text()
    assert "NOT PASSED" in text
    assert "ended with code -9" in text


def test_two_runs_are_compared_on_what_they_share(sample):
    older = sample.cases.iloc[1:].reset_index(drop=True)
    case = older.loc[0]
    counters = json.loads(case["counters"])
    entry = next(e for e in counters["bytes"] if e["buffer"] == "w_o")
    entry["bytes"] -= 4096 * int(case["npes"])
    older.loc[0, "counters"] = json.dumps(counters)
    keys = ["case", "class"]
    table = tables.compared(tables.moved_bytes, sample.cases, older, ["moved"], keys)
    change = table["moved", "change"]
    assert len(change) == 4 * len(older)
    assert change[case["name"], "weights"] == 4096
    assert change.abs().sum() == 4096


def test_the_comparison_notebook_runs_on_a_run_and_the_one_before(folder):
    html.make_report(folder, notebooks=["21_compare"])
    assert "builds they share" in (folder / "21_compare.ipynb").read_text()


@pytest.mark.slow
def test_a_report_without_any_finished_case_is_made(folder):
    write_rows(folder, [{**r, "status": "error", "verdicts": None} for r in read_rows(folder)])
    text = html.make_report(folder, notebooks=["10_sweep_tokens", "20_report"]).read_text()
    assert "nothing to draw" in text


def test_a_notebook_that_fails_is_named_with_its_error(folder, tmp_path, monkeypatch):
    source = json.loads((html.NOTEBOOK_DIR / "20_report.ipynb").read_text())
    for cell in source["cells"]:
        if cell["cell_type"] == "code" and "parameters" not in cell["metadata"].get("tags", []):
            cell["source"] = ["raise KeyError('lost')"]
            break
    broken = tmp_path / "20_report.ipynb"
    broken.write_text(json.dumps(source))
    monkeypatch.setattr(html, "NOTEBOOK_DIR", tmp_path)
    with pytest.raises(ResultsError, match=r"20_report.ipynb failed: KeyError: 'lost'"):
        html.make_report(folder, notebooks=["20_report"])
    assert not (folder / "report.html").exists()


def test_an_empty_table_stays_a_table():
    none = pd.DataFrame()
    assert tables.accuracy(none).empty
    assert tables.isa(none).empty
    assert tables.verdicts(none).empty
