"""A run's folder: writing it whole or not at all, and reading it back.

``results/<run>/`` holds ``run.json`` (what ran, where, with what), ``cases.parquet`` (one row a
case), executed notebooks, figures and ``report.html``. Every file is written under a temporary
name and renamed, so a killed run leaves whole files only. What is in a row: ``m3lab.sweep.cases``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

PACKAGE = Path(__file__).resolve().parent.parent
HOUSE = PACKAGE.parent
NOTEBOOK_DIR = HOUSE / "notebooks"
RESULTS = Path("results")
VERSIONS_OF = (
    "m3lab",
    "torch",
    "flydsl",
    "numpy",
    "pandas",
    "pyarrow",
    "papermill",
    "nbconvert",
    "matplotlib",
    "pydantic",
)
RUN_KEYS = {"run", "params_file", "parameters", "environment", "start", "end"}  # of run.json
UNFINISHED = ".unfinished-"  # a file that is being written, before it is renamed
# Files that look at results and decide none: a change in them does not make rows stale.
DECIDING = ("sweep/cases.py", "report/floors.py", "report/handoffs.py")  # all the same
LOOKING_ONLY = ("cli.py", "doctor.py", "report/", "sweep/")


class ResultsError(ValueError):
    """A results folder that cannot be written, or holds no run: one sentence."""


@dataclass(frozen=True)
class Run:
    """A run read back: its folder, ``run.json`` as a dict, one row a case."""

    path: Path
    meta: dict[str, Any]
    cases: pd.DataFrame

    @property
    def name(self) -> str:
        return str(self.meta["run"])


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` on a temporary sibling of ``path`` and rename it there."""
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f"{UNFINISHED}{path.stem}-", suffix=path.suffix
    )
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_json(path: Path, data: Any) -> None:
    text = json.dumps(data, indent=1, sort_keys=True) + "\n"
    write_atomic(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_rows(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """``rows`` as the folder's ``cases.parquet``."""
    frame = pd.DataFrame(list(rows))
    write_atomic(folder / "cases.parquet", lambda p: frame.to_parquet(p, index=False))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that are there; none when the file is missing."""
    path = folder / "cases.parquet"
    if not path.exists():
        return []
    try:
        frame = pd.read_parquet(path)
    except Exception as exc:
        raise ResultsError(
            f"{path}: not a readable parquet file ({exc}); move it away to run its cases again"
        ) from exc
    if absent := {"key", "name", "status", "code"} - set(frame.columns):
        raise ResultsError(f"{path}: not the rows of a run, it lacks {', '.join(sorted(absent))}")
    return [
        {k: None if _missing(v) else v for k, v in row.items()} for row in frame.to_dict("records")
    ]


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value != value)


def open_folder(results: Path, name: str) -> Path:
    """``results/name``, made if needed and proved writable; ResultsError otherwise."""
    if not name or name.startswith(".") or "/" in name:
        raise ResultsError(f"a run's name is a plain folder name, got {name!r}")
    folder = results / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise ResultsError(
            f"cannot write results to {folder}: {exc.strerror or exc}; "
            "give a writable folder with --results"
        ) from exc
    return folder


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep ``folder`` for this process; ResultsError when another one writes to it.

    Two sweeps of one run would each write the rows that it knows and lose the other's. The lock
    goes with the process, however it ends.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(
                f"another sweep is writing to {folder}; wait for its end, or give another name "
                "with --run"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def clear_unfinished(folder: Path) -> None:
    """Remove the temporary files that a killed process left (see ``write_atomic``)."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink(missing_ok=True)


def read_meta(path: Path) -> dict[str, Any]:
    """A ``run.json``; ResultsError when it is not one."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        absent = RUN_KEYS - set(meta)
    except (OSError, ValueError, TypeError) as exc:
        raise ResultsError(f"{path}: cannot be read as a run's description ({exc})") from exc
    if absent or not isinstance(meta, dict):
        raise ResultsError(
            f"{path}: not a run's description, it lacks {', '.join(sorted(absent)) or 'keys'}"
        )
    return meta


def load_run(run: str | Path, results: str | Path = RESULTS) -> Run:
    """The run at path ``run``, or named ``run`` under ``results``."""
    path = Path(run)
    if not (path / "run.json").exists():
        path = Path(results) / str(run)
    if not (path / "run.json").exists():
        there = sorted(p.parent.name for p in Path(results).glob("*/run.json"))
        known = f"runs there: {', '.join(there)}" if there else "no run is there yet"
        raise ResultsError(f"no run {str(run)!r} here or under {results} ({known})")
    meta = read_meta(path / "run.json")
    return Run(path, meta, pd.DataFrame(read_rows(path)))


def now() -> str:
    """UTC, to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def code_fingerprint(package: Path = PACKAGE) -> str:
    """Digest of the package's source that decides a row, the clock's constants included: rows of
    other code are run again."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *(package / "clock").rglob("*.yaml")]):
        name = path.relative_to(package).as_posix()
        if not name.startswith(LOOKING_ONLY) or name in DECIDING:
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@cache
def clock_fingerprint(package: Path = PACKAGE) -> str:
    """Digest of the interpreter and the clock's constants: times of other clocks compare badly."""
    digest = hashlib.sha256()
    for folder, pattern in (("interpreter", "*.py"), ("clock", "*.py"), ("clock", "*.yaml")):
        for path in sorted((package / folder).rglob(pattern)):
            name = path.relative_to(package).as_posix()
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def git_state() -> dict[str, Any]:
    """Revision of the source tree and whether it had uncommitted changes; None where unknown."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(HOUSE), *args], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None or not Path(top).samefile(HOUSE):  # an unpacked archive, even inside a checkout
        return {"revision": None, "dirty": None}
    status = git("status", "--porcelain")
    return {"revision": git("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def environment() -> dict[str, Any]:
    """What made a result: revision, versions, machine."""
    versions: dict[str, str | None] = {}
    for name in VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "git": git_state(),
        "code": code_fingerprint(),
        "versions": versions,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "device": device(),
        "argv0": Path(sys.argv[0]).name,
    }


def device() -> str:
    """The device a launch would use: a ROCm GPU's name, or the interpreter on the CPU."""
    import torch

    if getattr(torch.version, "hip", None) and torch.cuda.is_available():
        return f"hip: {torch.cuda.get_device_name(0)}"
    return "interpreter on the CPU (no AMD GPU here)"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
