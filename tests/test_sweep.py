"""Sweeps: nothing finished is lost or run twice, a fault costs one case, files are whole."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from m3lab.sweep import results, runner
from m3lab.sweep.cases import Case
from m3lab.sweep.params import ParamsError, load
from m3lab.sweep.results import ResultsError, load_run, read_rows, write_atomic, write_rows

PARAMS = """
grid: {tokens: [1, 2], context: [100, 200], solo: true}
notebooks: []
"""


@pytest.fixture
def params(tmp_path):
    path = tmp_path / "four.yaml"
    path.write_text(PARAMS)
    return path


def row_of(case, status="passed", **fields):
    return {
        **runner._identity(case),
        "status": status,
        "error": None,
        "case_s": 0.1,
        "code": results.code_fingerprint(),
        **fields,
    }


@pytest.fixture
def ran(monkeypatch):
    """Cases pass at once, without a process; the list of those that ran."""
    names = []

    def at_once(case, stop=None, jobs=1):
        names.append(case.name)
        return row_of(case)

    monkeypatch.setattr(runner, "run_in_process", at_once)
    return names


def run(params, tmp_path, **options):
    options = {"results_dir": tmp_path / "results", "run": "r", "jobs": 1} | options
    return runner.sweep(params, report=False, **options)


def test_every_case_runs_once_and_has_a_row(params, tmp_path, ran):
    done = run(params, tmp_path)
    assert len(ran) == 4
    assert done.passed
    assert {r["key"] for r in read_rows(done.path)} == {r["key"] for r in done.rows}


def test_a_second_sweep_runs_nothing_again(params, tmp_path, ran):
    run(params, tmp_path)
    again = run(params, tmp_path)
    assert len(ran) == 4
    assert again.skipped == 4
    assert again.passed


def test_a_case_whose_row_is_missing_is_the_only_one_run(params, tmp_path, ran):
    folder = run(params, tmp_path).path
    write_rows(folder, [r for r in read_rows(folder) if r["name"] != "s2_c100_tp4_solo"])
    run(params, tmp_path)
    assert ran[4:] == ["s2_c100_tp4_solo"]


def test_a_row_that_other_code_made_is_made_again(params, tmp_path, ran):
    folder = run(params, tmp_path).path
    rows = read_rows(folder)
    rows[0]["code"] = "other"
    write_rows(folder, rows)
    run(params, tmp_path)
    assert ran[4:] == [rows[0]["name"]]


@pytest.mark.parametrize("status", ["error", "crashed", "timeout"])
def test_a_case_that_did_not_finish_is_tried_again(params, tmp_path, ran, status):
    folder = run(params, tmp_path).path
    rows = read_rows(folder)
    rows[2]["status"] = status
    write_rows(folder, rows)
    assert run(params, tmp_path).passed
    assert ran[4:] == [rows[2]["name"]]


def test_one_failed_case_fails_the_sweep_and_costs_no_other(params, tmp_path, monkeypatch):
    def second_fails(case, stop=None, jobs=1):
        return row_of(case, "failed" if case.name == "s1_c200_tp4_solo" else "passed")

    monkeypatch.setattr(runner, "run_in_process", second_fails)
    done = run(params, tmp_path)
    assert not done.passed
    assert [r["status"] for r in done.rows].count("passed") == 3


def test_other_parameters_do_not_go_into_the_same_run(params, tmp_path, ran):
    run(params, tmp_path)
    params.write_text(PARAMS.replace("200", "300"))
    with pytest.raises(ResultsError, match=r"other parameters.*--run"):
        run(params, tmp_path)


def test_only_keeps_the_cases_that_match_every_term(params, tmp_path, ran):
    run(params, tmp_path, only="tokens=2,c200")
    assert ran == ["s2_c200_tp4_solo"]
    run(params, tmp_path, only="solo=true,tokens=1")
    assert ran[1:] == ["s1_c100_tp4_solo", "s1_c200_tp4_solo"]
    with pytest.raises(ParamsError, match=r"--only tokens=9: no case matches; the cases are s1_c"):
        run(params, tmp_path, only="tokens=9")
    with pytest.raises(ParamsError, match="unknown key"):
        run(params, tmp_path, only="colour=2")


def test_a_notebook_that_is_not_there_is_refused_before_anything_runs(params, tmp_path, ran):
    params.write_text(PARAMS.replace("[]", "[99_none]"))
    with pytest.raises(ParamsError, match=r"no notebook '99_none'; there are .*20_report"):
        run(params, tmp_path)
    assert not ran


def test_jobs_below_one_are_refused(params, tmp_path, ran):
    with pytest.raises(ParamsError, match="--jobs must be at least 1, got 0"):
        run(params, tmp_path, jobs=0)


@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_a_stop_keeps_what_is_done_and_the_next_goes_on(params, tmp_path, monkeypatch, late_s):
    ran = []

    def stop_in_the_third(case, stop=None, jobs=1):
        if stop.is_set():
            return row_of(case, "stopped")
        ran.append(case.name)
        if len(ran) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.wait(5)
            time.sleep(late_s)
            return row_of(case, "stopped")
        return row_of(case)

    monkeypatch.setattr(runner, "run_in_process", stop_in_the_third)
    done = run(params, tmp_path)
    assert done.interrupted
    assert not done.passed
    assert [r["status"] for r in read_rows(done.path)] == ["passed", "passed"]
    assert json.loads((done.path / "run.json").read_text())["interrupted"]
    again = run(params, tmp_path)
    assert again.passed
    assert ran[3:] == ["s2_c100_tp4_solo", "s2_c200_tp4_solo"]


# --- a case's own process ---


def script(tmp_path, monkeypatch, body):
    """Let the child be a shell script instead of Python; ``$3`` is where its row goes."""
    path = tmp_path / "child"
    path.write_text("#!/bin/sh\ncat > /dev/null\n" + body)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_crash_becomes_a_row_with_the_last_lines_it_printed(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "echo 'the end is near' >&2\nkill -SEGV $$\n")
    row = runner.run_in_process(Case())
    assert row["status"] == "crashed"
    assert "code -11" in row["error"]
    assert "the end is near" in row["error"]
    assert row["key"] == Case().key


def test_a_case_past_its_time_is_ended_with_its_children(tmp_path, monkeypatch):
    marker = tmp_path / "child.pid"
    script(tmp_path, monkeypatch, f"sleep 60 &\necho $! > {marker}\nwait\n")
    clock = time.monotonic()
    row = runner.run_in_process(Case(timeout_s=1))
    assert row["status"] == "timeout"
    assert "no result after 1 s" in row["error"]
    assert time.monotonic() - clock < 20
    state = Path(f"/proc/{marker.read_text().strip()}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child's child lives on"
        time.sleep(0.05)


def test_a_row_the_child_wrote_comes_back_with_the_cases_own_values(tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, """echo '{"status": "passed", "error": null}' > "$3"\n""")
    row = runner.run_in_process(Case(tokens=2, context=77))
    assert (row["status"], row["tokens"], row["context"], row["npes"]) == ("passed", 2, 77, 4)


def test_the_smoke_case_passes_in_a_process_of_its_own():
    pytest.importorskip("flydsl")
    case = load(Path(__file__).parent.parent / "params" / "smoke.yaml").expand()[0]
    row = runner.run_in_process(case)
    assert row["status"] == "passed", row["error"]
    assert row["checks_failed"] == 0
    assert row["stage_sp_o"] <= 2e-3
    assert row["stage_sparse_table"] == 0
    assert json.loads(row["isa"])["vgpr_spills"] == 0
    assert {e["buffer"] for e in json.loads(row["counters"])["bytes"]} >= {"w_o", "k_cache", "lds"}


NARROW = (("hidden", 2048), ("inter", 512), ("shared_inter", 512))


@pytest.mark.parametrize(("repetitions", "tuning"), [(2, ()), (1, (("score_copies", 1),))])
def test_a_rows_modelled_time_and_stamps_are_those_of_the_step_itself(repetitions, tuning):
    pytest.importorskip("flydsl")
    import torch

    from m3lab import DecodeStep
    from m3lab.clock.clock import Clock
    from m3lab.report import handoffs, tables
    from m3lab.sweep.cases import run_case

    case = Case(
        context=100, solo=True, model=NARROW, repetitions=repetitions, tuning=tuning, timeline=True
    )
    row = {**runner._identity(case), **run_case(case)}
    assert row["status"] == "passed", row["error"]
    with DecodeStep(
        case.shape, 1, context=100, npes=1, until=None, timeline=True, tuning=case.knobs
    ) as step:
        clock = Clock()
        result = step.run(clock=clock)
        waits = handoffs.waits(handoffs.polls(step, clock))
    pd.testing.assert_frame_equal(tables.waits(row), waits, check_dtype=False, check_exact=True)
    assert len(waits)
    assert row["modelled_us"] == clock.modelled().step_modelled_us > 0
    nested = json.loads(row["modelled"])
    assert nested["part"] == clock.part.name
    assert nested["rank_modelled_us"] == {"0": row["modelled_us"]}
    assert tables.hops(row) == clock.critical_path() != []
    assert tables.knobs(row) == dict(tuning)
    (stamps,) = tables.stamps(row)
    assert stamps.dtype == torch.int64
    assert torch.equal(stamps, result.stamps[0])


def test_without_a_clock_a_row_has_no_modelled_time():
    pytest.importorskip("flydsl")
    from m3lab.sweep.cases import run_case

    case = Case(context=100, solo=True, model=NARROW, until="o_proj", clock=False)
    row = run_case(case)
    assert row["status"] == "passed", row["error"]
    assert all(row[name] is None for name in ("modelled_us", "modelled", "stamps", "waits"))


def test_stamps_of_several_ranks_come_back_as_they_were():
    import torch

    from m3lab.report import tables
    from m3lab.sweep.cases import packed

    ranks = [torch.randint(0, 1 << 30, (256, 32), generator=torch.Generator()) for _ in range(4)]
    back = tables.stamps({"npes": 4, "stamps": packed(ranks)})
    assert all(torch.equal(a, b) for a, b in zip(ranks, back, strict=True))
    assert packed([]) is None
    assert tables.stamps({"npes": 4, "stamps": None}) == tables.stamps({"npes": 4}) == []


def test_what_decides_a_row_is_in_the_codes_digest_and_what_looks_at_it_is_not(tmp_path):
    names = {
        "in": (
            "kernels/attention/select.py",
            "kernels/tuning.py",
            "report/floors.py",
            "clock/devices/x.yaml",
            "report/handoffs.py",
            "sweep/cases.py",
        ),
        "out": ("report/ablation.py", "report/timeline.py", "report/html.py", "sweep/runner.py"),
    }
    for name in (*names["in"], *names["out"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    digest = results.code_fingerprint.__wrapped__
    for kind, group in names.items():
        for name in group:
            before = digest(tmp_path)
            (tmp_path / name).write_text("changed")
            assert (digest(tmp_path) != before) == (kind == "in"), name


def test_an_error_inside_a_case_is_a_row_not_an_exception(monkeypatch):
    from m3lab.sweep import cases

    monkeypatch.setattr(cases, "_measure", lambda case: 1 / 0)
    row = cases.run_case(Case())
    assert row["status"] == "error"
    assert "ZeroDivisionError" in row["error"]


# --- files ---


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "kept.txt"
    path.write_text("old")

    def half(target):
        target.write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_a_results_folder_that_cannot_be_written_is_named(params, tmp_path, ran):
    blocked = tmp_path / "results"
    blocked.write_text("a file, not a folder")
    with pytest.raises(ResultsError, match=f"cannot write results to {blocked}.*--results"):
        run(params, tmp_path)
    assert not ran


@pytest.mark.parametrize("name", ["../up", ".hidden", ""])
def test_a_runs_name_is_a_plain_folder_name(tmp_path, name):
    with pytest.raises(ResultsError, match="plain folder name"):
        results.open_folder(tmp_path, name)


def test_a_run_that_is_not_there_is_refused_with_those_that_are(params, tmp_path, ran):
    run(params, tmp_path)
    with pytest.raises(ResultsError, match=r"no run 'absent' .*runs there: r"):
        load_run("absent", tmp_path / "results")
    assert load_run("r", tmp_path / "results").meta["seed"] == 0


def test_a_run_names_what_made_it(params, tmp_path, ran):
    meta = load_run(run(params, tmp_path).path).meta
    made = meta["environment"]
    assert made["versions"]["torch"]
    assert set(made["git"]) == {"revision", "dirty"}
    assert made["device"]
    assert meta["parameters"]["grid"]["tokens"] == [1, 2]
    assert meta["start"] <= meta["end"]
    assert not meta["interrupted"]


def test_a_runs_start_is_its_first_unless_other_code_makes_every_row_anew(params, tmp_path, ran):
    path = run(params, tmp_path).path / "run.json"
    meta = json.loads(path.read_text()) | {"start": "2026-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(meta))
    run(params, tmp_path)
    assert json.loads(path.read_text())["start"] == meta["start"]
    meta["environment"]["code"] = "other"
    path.write_text(json.dumps(meta))
    run(params, tmp_path)
    assert json.loads(path.read_text())["start"] > meta["start"]


def test_a_broken_rows_file_is_named(tmp_path):
    (tmp_path / "cases.parquet").write_text("not parquet")
    with pytest.raises(ResultsError, match=r"cases.parquet: not a readable parquet file"):
        read_rows(tmp_path)


@pytest.mark.slow
def test_a_dask_cluster_runs_the_cases(params, tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    params.write_text("cases: [{tokens: 1, context: 64, solo: true}]\nnotebooks: []\n")
    with distributed.LocalCluster(1, threads_per_worker=1, dashboard_address=None) as cluster:
        done = run(params, tmp_path, scheduler=cluster.scheduler_address)
    assert done.passed


def test_a_scheduler_that_does_not_answer_is_named(params, tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    with pytest.raises(ParamsError, match=r"--scheduler tcp://127.0.0.1:9: no Dask scheduler"):
        run(params, tmp_path, scheduler="tcp://127.0.0.1:9")
