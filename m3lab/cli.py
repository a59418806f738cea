"""The ``m3lab`` command: sweep, report, build, doctor. What ``make`` calls.

Thin: it turns options into calls of the package and errors into one sentence on stderr. Exit codes:
0 all well, 1 a case or a check did not pass, 2 bad input or a missing piece, 130 stopped by hand.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from m3lab.compile.isa import IsaFigures

PASSED, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130

app = typer.Typer(
    help="A workbench for the single-launch MiniMax-M3 decode layer on MI355X.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="parameter file, such as params/quick.yaml")],
    run: Annotated[str | None, typer.Option(help="name of the run's folder under results")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="cases at a time on this machine; default: by its cores")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="address of a Dask scheduler that gets the cases instead")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="cases to keep: 'tokens=2,solo=true' or a part of a name")
    ] = None,
    results: Annotated[Path, typer.Option(help="folder that holds the runs")] = Path("results"),
    report: Annotated[bool, typer.Option(help="make notebooks and report afterwards")] = True,
) -> None:
    """Run the cases of a parameter file, keep their rows, make the report.

    The same command goes on where it was stopped. Exit 0 only when every case passed its checks.
    """
    from m3lab.sweep import runner

    done = runner.sweep(
        file,
        run=run,
        jobs=jobs,
        scheduler=scheduler,
        only=only,
        results_dir=results,
        report=report,
    )
    passed = sum(row["status"] == "passed" for row in done.rows)
    typer.echo(f"{passed} of {done.asked} cases passed; rows in {done.path / 'cases.parquet'}")
    if done.report:
        typer.echo(f"report: {done.report}")
    if done.interrupted:
        raise typer.Exit(STOPPED)
    raise typer.Exit(PASSED if done.passed else FAILED)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="a run's name under results, or its folder")],
    results: Annotated[Path, typer.Option(help="folder that holds the runs")] = Path("results"),
) -> None:
    """Make a run's notebooks and HTML report again from its rows; runs no case."""
    from m3lab.report.html import make_report
    from m3lab.sweep.results import load_run

    there = load_run(run, results)
    page = make_report(there.path, notebooks=there.meta["parameters"]["notebooks"])
    typer.echo(f"report: {page}")


@app.command()
def build(
    tokens: Annotated[int, typer.Option(help="rows of the decode step, 1..16")] = 1,
    tp: Annotated[int, typer.Option(help="TP width: 1, 2, 4 or 8")] = 4,
    solo: Annotated[bool, typer.Option(help="one rank with no peer")] = False,
    static_scale: Annotated[bool, typer.Option(help="one KV scale per cache")] = False,
    page_stride: Annotated[int, typer.Option(help="page ids per block: 8 or 16")] = 8,
    until: Annotated[
        str | None,
        typer.Option(help="stage the build stops after, output or router; default: all stages"),
    ] = None,
    emit: Annotated[str, typer.Option(help="'asm', or 'object' (needs ld.lld)")] = "asm",
    out: Annotated[
        Path | None, typer.Option(help="folder to write the assembly or object to")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="an earlier build's .s file to compare with")
    ] = None,
) -> None:
    """BuildResult the kernel for gfx950 and print its ISA figures; no GPU needed."""
    from m3lab.compile import isa
    from m3lab.model.shapes import CacheLayout, RankShape
    from m3lab.step import DecodeStep, build_for

    if emit not in ("asm", "object"):
        raise ValueError(f"--emit must be asm or object, got {emit!r}")
    before = _figures_of_file(compare) if compare else None
    step = DecodeStep(
        RankShape(tp=tp),
        tokens,
        npes=1 if solo else tp,
        layout=CacheLayout(page_stride, static_scale),
        until=until,
    )
    made = build_for(step, emit=("asm", "size") + (("object",) if emit == "object" else ()))
    figures = isa.figures_of(made)
    typer.echo(isa.table([figures]).T.to_string(header=False))
    typer.echo("\ninstructions by class")
    typer.echo(isa.mix_table([figures]).T.to_string(header=False))
    if before is not None:
        typer.echo(f"\nagainst {compare}")
        typer.echo(isa.difference(before, figures).to_string())
    if out is not None:
        typer.echo(f"\nwritten: {_write_build(made, out)}")
    problems = figures.problems()
    for problem in problems:
        typer.echo(f"m3lab: {problem}", err=True)
    raise typer.Exit(FAILED if problems else PASSED)


def _figures_of_file(path: Path) -> IsaFigures:
    from m3lab.compile import isa

    try:
        return isa.figures(_read(path))
    except ValueError as exc:
        raise ValueError(str(exc) if str(path) in str(exc) else f"{path}: {exc}") from exc


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: cannot read it as assembly text ({exc})") from exc


def _write_build(made: object, out: Path) -> str:
    """Write the parts of a BuildResult into folder ``out``; the paths, comma-separated."""
    name = made.name[-120:]  # type: ignore[attr-defined]
    paths = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for suffix, part in ((".s", made.asm), (".hsaco", made.code_object)):  # type: ignore[attr-defined]
            if part is not None:
                path = out / f"{name}{suffix}"
                path.write_bytes(part.encode() if isinstance(part, str) else part)
                paths.append(str(path))
    except OSError as exc:
        raise ValueError(f"cannot write the build to {out}: {exc.strerror or exc}") from exc
    return ", ".join(paths)


@app.command()
def doctor() -> None:
    """Say what this machine has and which jobs it can do. Exit 0 when the quick sweep can run."""
    from m3lab.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(f"{'ok ' if finding.ok else '-- '} {finding.what:22} {finding.text}")
    raise typer.Exit(PASSED if all(f.ok for f in findings if f.needed) else BAD_INPUT)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a foreseen error is one sentence on stderr and an exit code not 0."""
    from m3lab.compile.trace import BuildError, MissingFlyDSL

    # such as a build cache that cannot be written: the sentence, not where it was raised
    warnings.formatwarning = lambda message, *where, **line: f"m3lab: {message}\n"
    try:
        app(arguments)
    except (ValueError, MissingFlyDSL, BuildError, NotImplementedError, OSError) as exc:
        if os.environ.get("M3LAB_TRACEBACK"):
            raise
        typer.echo(f"m3lab: {' '.join(str(exc).split())}", err=True)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
