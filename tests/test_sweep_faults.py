"""Faults around a sweep: two at once, a full disk, what a killed run leaves, folders that are none.

Cases are stood in for: what counts here is what becomes of the rows and what is said.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from m3lab.sweep import results, runner
from m3lab.sweep.params import ParamsError
from m3lab.sweep.results import ResultsError, load_run, read_rows


@pytest.fixture
def params(tmp_path):
    path = tmp_path / "four.yaml"
    path.write_text("grid: {tokens: [1, 2], context: [100, 200], solo: true}\nnotebooks: []\n")
    return path


def row_of(case, status="passed"):
    code = results.code_fingerprint()
    return {
        **runner._identity(case),
        "status": status,
        "error": None,
        "case_s": 0.1,
        "code": code,
    }


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(runner, "run_in_process", lambda case, stop=None, jobs=1: row_of(case))


def run(params, tmp_path, **options):
    options = {"results_dir": tmp_path / "results", "run": "r", "jobs": 1} | options
    return runner.sweep(params, report=False, **options)


def test_a_second_sweep_of_a_run_is_refused_while_the_first_writes(params, tmp_path, at_once):
    folder = results.open_folder(tmp_path / "results", "r")
    with (
        results.held(folder),
        pytest.raises(ResultsError, match=r"another sweep is writing to .*results/r; .*--run"),
    ):
        run(params, tmp_path)
    assert run(params, tmp_path).passed


def test_a_killed_sweep_does_not_keep_its_run(params, tmp_path, at_once):
    folder = results.open_folder(tmp_path / "results", "r")
    hold = "import sys, time; from pathlib import Path; from m3lab.sweep import results\n"
    hold += "with results.held(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)\n"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ResultsError, match="another sweep"):
        run(params, tmp_path)
    other.kill()
    other.wait()
    assert run(params, tmp_path).passed


def test_a_full_disk_ends_the_sweep_at_once_and_keeps_the_rows_there(params, tmp_path, monkeypatch):
    write_rows, kept = results.write_rows, []

    def fills_up(folder, rows):
        kept.append(len(rows))
        if len(kept) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        write_rows(folder, rows)

    def third_takes_long(case, stop=None, jobs=1):
        if case.name == "s2_c100_tp4_solo":
            return row_of(case, "stopped" if stop.wait(60) else "passed")
        return row_of(case)

    monkeypatch.setattr(runner, "run_in_process", third_takes_long)
    monkeypatch.setattr(results, "write_rows", fills_up)
    clock = time.monotonic()
    with pytest.raises(OSError, match="No space left"):
        run(params, tmp_path, jobs=2)
    assert time.monotonic() - clock < 30
    assert [r["status"] for r in read_rows(tmp_path / "results" / "r")] == ["passed"]


def test_what_a_killed_write_left_is_gone_after_the_next_sweep(params, tmp_path, at_once):
    folder, left = results.open_folder(tmp_path / "results", "r"), []

    def stopped(path):
        left.append(path.name)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # where a kill would leave the file
        results.write_atomic(folder / "cases.parquet", stopped)
    for name in left:
        (folder / name).write_text("half a f")
    assert left
    assert run(params, tmp_path).passed
    assert {p.name for p in folder.iterdir()} == {"run.json", "cases.parquet"}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"run": "r"}'])
def test_a_run_json_that_describes_no_run_is_refused_by_name(params, tmp_path, at_once, text):
    folder = run(params, tmp_path).path
    (folder / "run.json").write_text(text)
    for use in (lambda: load_run(folder), lambda: run(params, tmp_path)):
        with pytest.raises(ResultsError, match=r"results/r/run.json: (cannot be read|not a run's)"):
            use()


def test_a_parquet_file_of_something_else_is_refused_by_name(params, tmp_path, at_once):
    import pandas as pd

    folder = run(params, tmp_path).path
    pd.DataFrame({"a": [1]}).to_parquet(folder / "cases.parquet")
    with pytest.raises(ResultsError, match=r"cases.parquet: not the rows of a run, it lacks code"):
        run(params, tmp_path)


@pytest.mark.parametrize("only", [",", "tokens=1,", " , c100"])
def test_an_empty_term_selects_nothing_by_accident(params, tmp_path, at_once, only):
    with pytest.raises(ParamsError, match="an empty term"):
        run(params, tmp_path, only=only)


@pytest.mark.parametrize("name", ["../quick", "99_none"])
def test_a_notebook_that_is_not_one_of_ours_is_refused_with_the_file(
    params, tmp_path, at_once, name
):
    params.write_text(params.read_text().replace("[]", f"['{name}']"))
    with pytest.raises(ParamsError, match=r"four.yaml: notebooks: no notebook .*there are 00_tour"):
        run(params, tmp_path)


def test_a_report_of_a_run_without_a_row_says_that_there_is_nothing(params, tmp_path, at_once):
    from m3lab.report.html import make_report

    folder = run(params, tmp_path).path
    (folder / "cases.parquet").unlink()
    with pytest.raises(ResultsError, match="results/r: no case of this run has ended yet"):
        make_report(folder)


@pytest.mark.parametrize("change", ["not json", "{}", "another model", "never ended"])
def test_a_run_of_other_builds_or_a_broken_one_is_not_the_previous_run(
    params, tmp_path, at_once, change
):
    from m3lab.report.html import previous_run

    first = run(params, tmp_path, run="first").path
    second = run(params, tmp_path, run="second").path
    meta = results.read_meta(second / "run.json")
    results.write_json(second / "run.json", meta | {"start": meta["start"] + "later"})
    assert previous_run(second) == first
    meta = results.read_meta(first / "run.json")
    other = {
        "another model": meta | {"parameters": meta["parameters"] | {"model": {"hidden": 2048}}},
        "never ended": meta | {"end": None},
    }
    (first / "run.json").write_text(json.dumps(other[change]) if change in other else change)
    assert previous_run(second) is None


def test_an_interrupted_sweep_counts_the_cases_it_was_asked_for(params, tmp_path, monkeypatch):
    def stop_in_the_second(case, stop=None, jobs=1):
        if stop.is_set():
            return row_of(case, "stopped")
        if case.name != "s1_c100_tp4_solo":
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(10)
            return row_of(case, "stopped")
        return row_of(case)

    monkeypatch.setattr(runner, "run_in_process", stop_in_the_second)
    done = run(params, tmp_path)
    assert (done.asked, len(done.rows), done.interrupted) == (4, 1, True)


def test_files_are_utf_8_whatever_the_locale(params, tmp_path):
    """A word outside ASCII in, and a report (which has some) out, under the C locale."""
    params.write_text("title: prüfen\ncases: [{context: 100, solo: true}]\n", encoding="utf-8")
    code = """
import sys
from pathlib import Path
from m3lab.sweep import params, results
results.write_json(Path(sys.argv[2]), {"title": params.load(sys.argv[1]).title})
"""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, params, tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **plain})
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == {"title": "prüfen"}


def test_an_archive_unpacked_inside_another_checkout_has_no_revision(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "archive").mkdir()
    monkeypatch.setattr(results, "HOUSE", tmp_path / "archive")
    assert results.git_state() == {"revision": None, "dirty": None}
