"""The command line: exit codes, and one clear sentence for each kind of bad input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from m3lab import cli
from m3lab.compile.trace import cache_dir
from m3lab.doctor import examine

ROOT = Path(__file__).parent.parent


def m3lab(capsys, *arguments):
    """(exit code, stdout, stderr) of the command in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in arguments])
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out, printed.err


def refused(capsys, *arguments):
    code, _, err = m3lab(capsys, *arguments)
    assert code == 2
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("m3lab: ")
    return lines[0]


def test_bad_parameters_are_one_sentence_and_exit_code_2(capsys, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("grid: {tokens: [1, 99]}")
    text = refused(capsys, "sweep", bad, "--results", tmp_path / "r")
    assert f"{bad}: grid.tokens.1: must be an integer in 1..16, got 99" in text
    assert not (tmp_path / "r").exists()


def test_an_unknown_key_is_one_sentence_and_exit_code_2(capsys, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("cases: [{tokens: 1}]\nbackends: hip")
    assert "backends: unknown key" in refused(capsys, "sweep", bad)


def test_an_unwritable_results_folder_is_one_sentence_and_exit_code_2(capsys, tmp_path):
    blocked = tmp_path / "results"
    blocked.write_text("")
    text = refused(capsys, "sweep", ROOT / "params/smoke.yaml", "--results", blocked)
    assert f"cannot write results to {blocked}" in text


def test_a_report_of_a_run_that_is_not_there_is_one_sentence(capsys, tmp_path):
    assert "no run 'r7'" in refused(capsys, "report", "r7", "--results", tmp_path)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--tokens", "17"], "tokens must be in 1..16, got 17"),
        (["--tp", "3"], "TP width must be one of (1, 2, 4, 8), got 3"),
        (["--page-stride", "12"], "page stride must be 8 or 16, got 12"),
        (["--until", "mlp"], "until must be one of o_proj, router or None, got 'mlp'"),
        (["--emit", "ptx"], "--emit must be asm or object, got 'ptx'"),
        (["--compare", "absent.s"], "absent.s: cannot read it as assembly text"),
    ],
)
def test_a_build_that_cannot_be_is_one_sentence(capsys, options, part):
    assert part in refused(capsys, "build", *options)


def test_an_unknown_command_or_option_ends_with_code_2(capsys):
    assert m3lab(capsys, "swep")[0] == 2
    assert m3lab(capsys, "sweep", "x.yaml", "--colour", "red")[0] == 2


@pytest.mark.parametrize("command", ["sweep", "report", "build", "doctor"])
def test_each_command_explains_itself(capsys, command):
    code, out, _ = m3lab(capsys, command, "--help")
    assert code == 0
    assert "--help" in out


def test_doctor_names_every_piece_and_says_whether_the_quick_sweep_can_run(capsys):
    code, out, _ = m3lab(capsys, "doctor")
    for piece in ("python", "torch", "flydsl", "AMD GPU", "ld.lld", "memory", "build cache"):
        assert piece in out
    assert code == (0 if all(f.ok for f in examine() if f.needed) else 2)


def test_sweep_exits_1_when_a_case_fails_and_0_when_all_pass(capsys, tmp_path, monkeypatch):
    from m3lab.sweep import results, runner

    status = "failed"

    def at_once(case, stop=None, jobs=1):
        return {
            **runner._identity(case),
            "status": status,
            "error": None,
            "case_s": 0.1,
            "code": results.code_fingerprint(),
        }

    monkeypatch.setattr(runner, "run_in_process", at_once)
    arguments = ["sweep", ROOT / "params/smoke.yaml", "--no-report", "--results", tmp_path]
    code, out, _ = m3lab(capsys, *arguments, "--run", "a")
    assert (code, "0 of 1 cases passed" in out) == (1, True)
    status = "passed"
    code, out, _ = m3lab(capsys, *arguments, "--run", "b")
    assert (code, "1 of 1 cases passed" in out) == (0, True)


NO_FLYDSL = """
import importlib.abc, importlib.util, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "flydsl" or name.startswith("flydsl."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "flydsl" else find(name, *a)
"""


def without_flydsl(code, tmp_path):
    """Run Python ``code`` where neither it nor a child of it has flydsl, or a cached build."""
    (tmp_path / "sitecustomize.py").write_text(NO_FLYDSL)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "M3LAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)},
        timeout=240,
    )


def test_the_package_imports_and_makes_references_without_flydsl(tmp_path):
    code = """
import sys, m3lab
m3lab.RankShape, m3lab.random_layer, m3lab.DecodeStep, m3lab.shuffle_weight, m3lab.reference
assert "flydsl" not in sys.modules
"""
    done = without_flydsl(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_build_without_flydsl_is_one_sentence_that_names_it(tmp_path):
    done = without_flydsl("from m3lab import cli; cli.main(['build'])", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "needs FlyDSL" in done.stderr
    assert "pip install flydsl==0.5.0" in done.stderr


def test_a_sweep_without_flydsl_says_so_for_the_case_and_does_not_exit_0(tmp_path):
    arguments = [
        "sweep",
        str(ROOT / "params/smoke.yaml"),
        "--no-report",
        "--results",
        str(tmp_path / "r"),
    ]
    done = without_flydsl(f"from m3lab import cli; cli.main({arguments})", tmp_path)
    assert done.returncode == 1
    assert "needs FlyDSL" in done.stderr
    assert "pip install flydsl==0.5.0" in done.stderr
    assert "0 of 1 cases passed" in done.stdout


def test_doctor_without_flydsl_says_so_and_ends_with_code_2(tmp_path):
    done = without_flydsl("from m3lab import cli; cli.main(['doctor'])", tmp_path)
    assert done.returncode == 2
    assert "pip install flydsl==0.5.0" in done.stdout


def test_a_warning_is_one_sentence_without_a_line_of_code():
    code = """
import warnings
from m3lab import cli
cli.app = lambda arguments: warnings.warn("the build cache x cannot be written", stacklevel=1)
cli.main([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "m3lab: the build cache x cannot be written\n"


def test_the_caches_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("M3LAB_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
