"""Running a sweep: every case in a process of its own, rows kept as they come, then the notebooks.

A crash or a time-out costs that case only; its row says what happened. A run goes on where it
stopped: a case is skipped when its row is there and was made by the same code. What a case does is
``m3lab.sweep.cases``; what the folder looks like is ``m3lab.sweep.results``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from m3lab.sweep import params as parameter_files
from m3lab.sweep import results
from m3lab.sweep.cases import Case
from m3lab.sweep.params import Params

CASE_MEMORY = 6 << 30  # bytes that a case of four ranks at full shapes stays well under
SETTLED = ("passed", "failed")  # a row with one of these is not run again


@dataclass(frozen=True)
class SweepResult:
    """What a sweep did. ``asked``: cases; ``rows``: all their rows, older ones included."""

    path: Path
    asked: int
    rows: list[dict[str, Any]]
    skipped: int
    interrupted: bool
    report: Path | None

    @property
    def passed(self) -> bool:
        """Every asked case has a row and every row passed."""
        return not self.interrupted and all(row["status"] == "passed" for row in self.rows)


def sweep(
    file: str | Path,
    *,
    run: str | None = None,
    jobs: int | None = None,
    scheduler: str | None = None,
    only: str | None = None,
    results_dir: str | Path = results.RESULTS,
    report: bool = True,
    echo: Callable[[str], None] | None = None,
) -> SweepResult:
    """Run the cases of parameter file ``file`` into ``results_dir/run`` and make its report.

    ``jobs`` cases run at a time on this machine (None: as many as its cores and memory allow);
    ``scheduler`` hands them to a Dask cluster instead. ``only`` keeps those that match its terms
    (see ``select``).
    Raises ParamsError or ResultsError before anything runs.
    """
    say = echo or print
    if jobs is None:
        jobs = default_jobs()
    if jobs < 1:
        raise parameter_files.ParamsError(f"--jobs must be at least 1, got {jobs}")
    given = parameter_files.load(file)
    cases = select(given.expand(), only)
    find_notebooks(given.notebooks or [], file)
    name = run or f"{Path(file).stem}-{results.code_fingerprint()[:8]}"
    folder = results.open_folder(Path(results_dir), name)
    with results.held(folder):
        return _sweep_into(folder, given, Path(file), cases, jobs, scheduler, report, say)


def _sweep_into(
    folder: Path,
    given: Params,
    file: Path,
    cases: list[Case],
    jobs: int,
    scheduler: str | None,
    report: bool,
    say: Callable[[str], None],
) -> SweepResult:
    """Run what ``folder`` lacks of ``cases``; the folder is this process's alone."""
    results.clear_unfinished(folder)
    rows = {row["key"]: row for row in results.read_rows(folder)}
    meta = _begin(folder, given, file)
    code = results.code_fingerprint()
    todo = [case for case in cases if not _settled(rows.get(case.key), code)]
    skipped = len(cases) - len(todo)
    if skipped:
        say(f"{skipped} of {len(cases)} cases are already in {folder}: skipped")

    def keep(row: dict[str, Any]) -> None:
        rows[row["key"]] = row
        results.write_rows(folder, rows.values())

    interrupted = _run_all(todo, jobs, scheduler, keep, say)
    meta |= {"end": results.now(), "interrupted": interrupted}
    results.write_json(folder / "run.json", meta)
    asked = [rows[case.key] for case in cases if case.key in rows]
    page = None
    if report and not interrupted and asked:
        from m3lab.report.html import make_report

        page = make_report(folder, notebooks=given.notebooks or [])
    return SweepResult(folder, len(cases), asked, skipped, interrupted, page)


def default_jobs() -> int:
    """One case a core, while each can have ``CASE_MEMORY``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        memory = CASE_MEMORY
    return max(1, min(cores or 1, memory // CASE_MEMORY))


def select(cases: list[Case], only: str | None) -> list[Case]:
    """The cases that match every comma-separated term of ``only``.

    A term is ``key=value`` of a case (``tokens=2``, ``solo=true``) or a part of its name
    (``c2049``). ParamsError when a key is unknown or nothing matches.
    """
    if not only:
        return cases
    kept = cases
    for term in (t.strip() for t in only.split(",")):
        if not term:
            raise parameter_files.ParamsError(
                f"--only {only}: an empty term; give key=value or a part of a case's name"
            )
        key, eq, value = term.partition("=")
        if eq and key not in Case.__dataclass_fields__:
            known = ", ".join(Case.__dataclass_fields__)
            raise parameter_files.ParamsError(f"--only {term}: unknown key; known keys are {known}")
        if eq:
            kept = [c for c in kept if str(getattr(c, key)).lower() == value.lower()]
        else:
            kept = [c for c in kept if term in c.name]
    if not kept:
        names = ", ".join(c.name for c in cases)
        raise parameter_files.ParamsError(f"--only {only}: no case matches; the cases are {names}")
    return kept


def find_notebooks(names: list[str], file: str | Path) -> list[Path]:
    """The paths of the notebooks that ``file`` names; ParamsError for one that does not exist."""
    paths = [results.NOTEBOOK_DIR / f"{name}.ipynb" for name in names]
    for name, path in zip(names, paths, strict=True):
        if "/" in name or not path.exists():
            there = ", ".join(sorted(p.stem for p in results.NOTEBOOK_DIR.glob("*.ipynb")))
            raise parameter_files.ParamsError(
                f"{file}: notebooks: no notebook {name!r}; there are {there or 'none'}"
            )
    return paths


def _settled(row: dict[str, Any] | None, code: str) -> bool:
    return row is not None and row["status"] in SETTLED and row["code"] == code


def _begin(folder: Path, given: Params, file: Path) -> dict[str, Any]:
    """Write ``run.json`` for a run that starts or goes on; refuse one of other parameters."""
    path = folder / "run.json"
    parameters = given.model_dump(mode="json")
    before: dict[str, Any] = {}
    if path.exists():
        before = results.read_meta(path)
        if before["parameters"] != parameters:
            raise results.ResultsError(
                f"run {folder.name} was made from other parameters ({before['params_file']}); "
                "give another name with --run"
            )
    made = results.environment()
    goes_on = before.get("environment", {}).get("code") == made["code"]  # else every row is remade
    meta = {
        "run": folder.name,
        "params_file": file.name,
        "parameters": parameters,
        "seed": given.seed,
        "environment": made,
        "start": before["start"] if goes_on else results.now(),
        "end": None,
        "interrupted": True,  # until the end is reached
    }
    results.write_json(path, meta)
    return meta


def _run_all(
    todo: list[Case],
    jobs: int,
    scheduler: str | None,
    keep: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> bool:
    """Run ``todo``, calling ``keep`` per row as it comes. True when stopped by Ctrl-C."""
    if not todo:
        return False
    stop = threading.Event()
    began, finished = time.monotonic(), 0
    # Without a terminal the bar is off and each finished case is a line of its own.
    bar = tqdm(total=len(todo), unit="case", dynamic_ncols=True, disable=None, desc=todo[0].name)
    try:
        with _executor(jobs, scheduler, stop) as submit, _stop_on_signal(stop):
            pending = {submit(case): case for case in todo}
            while pending:
                # once stopped, what had finished before is still kept
                stopping = stop.is_set()
                for future in _first_done(pending, bar, wait_s=0.0 if stopping else 1.0):
                    del pending[future]
                    row = future.result()
                    if row["status"] == "stopped":
                        continue
                    keep(row)
                    finished += 1
                    bar.update()
                    pace = (time.monotonic() - began) / finished
                    bar.write(_line(row, finished, len(todo), pace), file=sys.stderr)
                if stopping:
                    break
                if pending:
                    bar.set_description(next(iter(pending.values())).name)
    finally:
        bar.close()
    if stop.is_set():
        say(f"stopped: the {finished} cases finished now are kept; the same command goes on")
    return stop.is_set()


def _first_done(pending: dict[Any, Case], bar: tqdm, wait_s: float) -> set[Any]:
    """Futures that are done, after at most ``wait_s``: a nap, so that Ctrl-C and the bar live."""
    if isinstance(next(iter(pending)), Future):
        done, _ = wait(pending, timeout=wait_s, return_when=FIRST_COMPLETED)
    else:  # a Dask future: polled, so that no Dask import is needed here
        time.sleep(min(wait_s, 0.2))
        done = {future for future in pending if future.done()}
    bar.refresh()
    return set(done)


def _line(row: dict[str, Any], finished: int, total: int, pace: float) -> str:
    """One finished case; ``pace``: seconds a case so far."""
    left = (total - finished) * pace / 60
    text = f"[{finished}/{total}] {row['status']:8} {row['name']:34} {row['case_s']:6.1f} s"
    text += f"  ({60 / pace:.1f} cases/min, {left:.0f} min left)"
    return text + (f"  {row['error'].splitlines()[0][:300]}" if row.get("error") else "")


@contextmanager
def _stop_on_signal(stop: threading.Event) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into ``stop``: nothing new is kept, what is done stays.

    A second one raises KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _executor(
    jobs: int, scheduler: str | None, stop: threading.Event
) -> Iterator[Callable[[Case], Any]]:
    """A ``submit(case) -> future`` on local processes or on a Dask cluster."""
    if scheduler is None:
        pool = ThreadPoolExecutor(jobs)
        try:
            yield lambda case: pool.submit(run_in_process, case, stop, jobs)
        except BaseException:
            stop.set()  # a row that cannot be kept: end the cases that still run
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return
    try:
        from distributed import Client
    except ImportError as exc:
        raise parameter_files.ParamsError(
            "--scheduler needs Dask: pip install 'm3lab[dask]'"
        ) from exc
    try:
        client = Client(scheduler, timeout="5s")
    except (OSError, ValueError) as exc:
        raise parameter_files.ParamsError(
            f"--scheduler {scheduler}: no Dask scheduler answers there ({exc})"
        ) from exc
    with client:
        yield lambda case: client.submit(run_in_process, case, pure=False, retries=0)


def run_in_process(
    case: Case, stop: threading.Event | None = None, jobs: int = 1
) -> dict[str, Any]:
    """Run ``case`` in a Python process of its own and return its row, whatever happens to it.

    ``jobs``: how many such processes share the cores.
    """
    started, clock = results.now(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="m3lab-case-") as scratch:
        out = Path(scratch) / "row.json"
        log = Path(scratch) / "log.txt"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "m3lab.sweep.runner", str(out)],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours to handle
                env=_environment(jobs),
            )
            assert process.stdin is not None
            process.stdin.write(case.to_json().encode())
            process.stdin.close()
            ended = _await(process, case.timeout_s, stop)
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        if ended is not None:
            fields = {"status": ended, "error": f"no result after {case.timeout_s} s"}
        elif out.exists():
            fields = json.loads(out.read_text(encoding="utf-8"))
        else:
            last = "\n".join(text.splitlines()[-12:]) or "no output"
            fields = {
                "status": "crashed",
                "error": f"the case's process ended with {_ending(process.returncode)}: {last}",
            }
    return {
        **_identity(case),
        "started": started,
        "case_s": time.monotonic() - clock,
        "code": results.code_fingerprint(),
        **fields,
    }


def _ending(code: int) -> str:
    """An exit code in words: ``code -9 (SIGKILL, as when memory runs out)``."""
    if code >= 0:
        return f"code {code}"
    name = signal.Signals(-code).name if -code in {*signal.Signals} else "a signal"
    hint = ", as when memory runs out" if name == "SIGKILL" else ""
    return f"code {code} ({name}{hint})"


def _environment(jobs: int) -> dict[str, str]:
    """The child's environment. Torch threads beyond the cores spin on each other: many times
    slower, not a little, so the cores are divided (unless the user has set OMP_NUM_THREADS)."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONFAULTHANDLER": "1"}


def _identity(case: Case) -> dict[str, Any]:
    values = asdict(case)
    values["model"] = json.dumps(dict(case.model))
    values["tuning"] = json.dumps(dict(case.tuning))
    return {"key": case.key, "name": case.name, "npes": case.npes, **values}


def _await(
    process: subprocess.Popen[bytes], timeout_s: float, stop: threading.Event | None
) -> str | None:
    """None when the process ended by itself; else why it was ended, its children with it."""
    limit = time.monotonic() + timeout_s
    why = None
    while process.poll() is None:
        if stop is not None and stop.is_set():
            why = "stopped"
        elif time.monotonic() > limit:
            why = "timeout"
        if why:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return why
        time.sleep(0.05)
    return None


def _child(out: str) -> None:
    """The case's own process: a case as JSON on stdin, its row's fields to ``out``."""
    from m3lab.sweep.cases import run_case

    case = Case.from_json(sys.stdin.read())
    results.write_json(Path(out), run_case(case))


if __name__ == "__main__":
    _child(sys.argv[1])
