"""From a run's rows to executed notebooks and ``report.html``.

papermill executes the committed notebooks unchanged, with the run's folder as their parameter;
nbconvert turns the executed ``20_report`` into one HTML file with no outside reference. What the
notebooks show is theirs and ``m3lab.report.tables`` / ``m3lab.report.plots``'.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from m3lab.report import tables
from m3lab.sweep.params import ParamsError, parse
from m3lab.sweep.results import (
    HOUSE,
    NOTEBOOK_DIR,
    ResultsError,
    Run,
    load_run,
    read_meta,
    write_atomic,
)

REPORT = "20_report"
COMPARE = "21_compare"
SAME_BUILDS = ("model", "until")  # parameters that make builds of one label the same build
FAULTS = "docs/model.md#what-it-gets-wrong-and-why"  # of the modelled clock
_PLAIN_IN_URIS = " /:;=,()?-+.!*@$[]{}|^`"  # beside letters and digits
GOOD, PARTIAL, BAD = "#00735C", "#8A5A00", "#B3261E"


def make_report(folder: Path, notebooks: Sequence[str] = (REPORT,)) -> Path | None:
    """Execute ``notebooks`` for the run in ``folder``; the path of ``report.html`` when made.

    ResultsError names the notebook and its error when one does not run to its end.
    """
    if load_run(folder).cases.empty:
        raise ResultsError(
            f"{folder}: no case of this run has ended yet; there is nothing to report"
        )
    page = None
    for name in notebooks:
        notebook = execute(NOTEBOOK_DIR / f"{name}.ipynb", folder)
        if name == REPORT:
            page = folder / "report.html"
            text = to_html(notebook, title=f"M3 Lab: {folder.name}")
            write_atomic(page, lambda p: p.write_text(text, encoding="utf-8"))  # noqa: B023
    return page


def previous_run(folder: Path) -> Path | None:
    """The latest finished run beside ``folder`` that began before it, of the same model and stages
    (builds of other ones are not its predecessors); None when there is none."""
    this = load_run(folder).meta
    earlier = []
    for path in folder.resolve().parent.glob("*/run.json"):
        try:
            meta = read_meta(path)
        except ResultsError:
            continue  # a neighbour's fault
        same = all(meta["parameters"].get(k) == this["parameters"].get(k) for k in SAME_BUILDS)
        if same and meta["end"] and meta["start"] < this["start"]:
            earlier.append((meta["start"], path.parent))
    return max(earlier)[1] if earlier else None


def execute(source: Path, folder: Path) -> Any:
    """Run notebook ``source`` on the run in ``folder``, keep it there, and return it."""
    import nbformat
    import papermill

    parameters: dict[str, Any] = {"run": ".", "save_figures": True}
    if source.stem in (REPORT, COMPARE) and (before := previous_run(folder)):
        parameters["before"] = f"../{before.name}"
    elif source.stem == COMPARE:
        parameters["before"] = "."  # no earlier run: against itself, nothing changed

    def run(target: Path) -> None:
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters=parameters,
                cwd=str(folder),
                kernel_name="python3",
                progress_bar=False,
                extra_arguments=["--log-level=40"],  # a kernel on TCP of this host needs no warning
            )
        except papermill.PapermillExecutionError as exc:
            raise ResultsError(f"notebook {source.name} failed: {exc.ename}: {exc.evalue}") from exc
        notebook = nbformat.read(target, as_version=4)
        for key in ("input_path", "output_path"):  # where it ran is nobody's business
            notebook.metadata.get("papermill", {}).pop(key, None)
        nbformat.write(notebook, target)

    write_atomic(folder / source.name, run)
    return nbformat.read(folder / source.name, as_version=4)


def to_html(notebook: Any, title: str) -> str:
    """The notebook's prose and outputs, its code left out, as one page of HTML."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="basic", exclude_input=True, embed_images=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    exporter.exclude_anchor_links = True
    body, _ = exporter.from_notebook_node(notebook)
    return _PAGE.replace("{title}", html.escape(title)).replace("{body}", _as_text(body))


def _as_text(body: str) -> str:
    """The page with its SVG pictures as escaped text: a fifth smaller than nbconvert's base64."""

    def escaped(picture: re.Match[str]) -> str:
        svg = re.sub(r"\s+", " ", base64.b64decode(picture[1]).decode())
        return f"data:image/svg+xml,{quote(svg, safe=_PLAIN_IN_URIS)}"

    return re.sub(r"data:image/svg\+xml;base64,([\w+/=]+)", escaped, body)


def banner(run: Run) -> Any:
    """The verdict line as a coloured banner, for a notebook cell."""
    from IPython.display import HTML

    cases = run.cases
    good = len(cases) > 0 and bool((cases["status"] == "passed").all())
    line = tables.verdict_line(cases)
    waiting = _not_run(run)
    if waiting:
        line += f"; {len(waiting)} cases of {run.meta['params_file']} have not run"
    colour = BAD if not good else PARTIAL if waiting else GOOD
    return HTML(
        f'<p class="verdict" style="background:{colour};color:white;padding:.7em 1em;'
        f'border-radius:4px;font-size:1.15em"><b>{"PASSED" if good else "NOT PASSED"}</b>: '
        f"{html.escape(line)}.</p>"
    )


def _not_run(run: Run) -> set[str]:
    """Names of the cases asked for that have no row; none where the file is of an older form."""
    try:
        asked = parse(run.meta["parameters"], run.meta["params_file"]).expand()
    except ParamsError:
        return set()
    return {case.name for case in asked} - {*run.cases["name"]}


def time_note(run: Run) -> Any:
    """Whose times the report shows, in a sentence or two, for a notebook cell."""
    from IPython.display import Markdown

    timed = tables.timed(run.cases)
    if timed.empty:
        return Markdown("*No case of this run has a modelled time: none ran with a clock.*")
    parts = ", ".join(sorted({part for part, _ in tables.clocks(timed)}))
    return Markdown(
        "**Every time of this kernel is modelled, none is measured**: the interpreter's clock with "
        f"the constants of {parts} timed {len(timed)} of {len(run.cases)} cases, and no GPU ran. "
        f"{_link(run, FAULTS)} tells what the model gets wrong, and shows its times beside those "
        "that others measured."
    )


def _link(run: Run, target: str) -> str:
    """A Markdown link from the run's folder to a file of the house; its bare name from elsewhere,
    where a path would tell where the house stands."""
    name, _, anchor = target.partition("#")
    if not run.path.resolve().is_relative_to(HOUSE):
        return f"`{name}`"
    path = Path(os.path.relpath(HOUSE / name, run.path.resolve())).as_posix()
    return f"[{name}]({path}#{anchor})"


def show_timeline(run: Run, case: Mapping[Hashable, Any], save_figures: bool = False) -> None:
    """A case's modelled timeline in a notebook: Gantt of the rank that most of the critical path is
    on, where the time goes, what CTAs wait for, the critical path; ``save_figures`` keeps the
    picture and a trace of all ranks."""
    from IPython.display import Markdown, display

    from m3lab.report import handoffs, plots, timeline

    name, hops, waits = case["name"], tables.hops(case), tables.waits(case)
    stamps = timeline.frame(tables.stamps(case), "modelled")
    rank = Counter(hop.reader[0] for hop in hops).most_common(1)[0][0] if hops else 0
    fig = timeline.gantt(stamps, rank, hops, waits)
    display(Markdown(f"### {name}"), plots.drawn(fig))
    display(timeline.where_time_goes(stamps, waits).style.format(precision=2))
    if waits is not None and len(waits):
        display(handoffs.waited_for(waits).style.format(precision=2))
    if hops:
        path = timeline.critical_path(hops).style.format(precision=2)
        display(path.set_table_attributes('class="words"').hide())
    if save_figures:
        plots.save(fig, run.path / "figures", f"timeline_{name}")
        file = keep_trace(run, name, timeline.trace(stamps, hops, waits)).relative_to(run.path)
        display(Markdown(
            f"The same with every rank and CTA, modelled: `{file.as_posix()}` beside "
            "this page, a trace for ui.perfetto.dev or chrome://tracing."
        ))  # fmt: skip


def keep_trace(run: Run, name: str, trace: Mapping[str, Any]) -> Path:
    """Write a trace into the run's ``traces/``, gzipped (the viewers open it so); its path."""
    folder = run.path / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json.gz"
    content = gzip.compress(json.dumps(trace).encode(), mtime=0)
    write_atomic(path, lambda p: p.write_bytes(content))
    return path


def environment(run: Run) -> pd.DataFrame:
    """What made the run, as a two-column table."""
    meta, made = run.meta, run.meta["environment"]
    git = made["git"]
    revision = git["revision"][:12] if git["revision"] else "unknown"
    if git["dirty"]:
        revision += " with uncommitted changes"
    versions = ", ".join(f"{k} {v}" for k, v in made["versions"].items() if v and k != "m3lab")
    rows = {
        "run": run.name,
        "parameters": meta["params_file"],
        "seed": str(meta["seed"]),
        "device": made["device"],
        "host": f"{made['cpus']} CPUs, {made['cpu']}, {made['platform']}",
        "revision": revision,
        "M3 Lab": f"{made['versions']['m3lab']} (code {made['code']})",
        "Python": made["python"],
        "packages": versions,
        "start, end (UTC)": f"{meta['start']}, {meta['end'] or 'not reached'}",
    }
    return pd.DataFrame({"": rows.values()}, index=pd.Index(rows.keys()))


def parameters(run: Run) -> str:
    """The run's parameters as indented JSON text."""
    return json.dumps(run.meta["parameters"], indent=1)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body { margin: 0; background: #f4f4f2; color: #222; font: 16px/1.5 system-ui, "Segoe UI",
       "DejaVu Sans", sans-serif; }
main { max-width: 1140px; margin: 2rem auto; padding: 1rem 2.5rem 3rem; background: white;
       border-radius: 6px; box-shadow: 0 1px 4px rgba(0,0,0,.12); }
h1 { font-size: 1.9rem; margin-bottom: .3rem; }
h2 { margin-top: 2.4rem; padding-top: .8rem; border-top: 1px solid #ddd; font-size: 1.35rem; }
.output_svg img { width: 100%; } img { max-width: 100%; }
table { border-collapse: collapse; border: 0; font-size: .8rem; margin: 1rem 0; }
.jp-RenderedHTMLCommon, .output_html, .output_subarea { overflow-x: auto; }
th, td { border: 0; border-bottom: 1px solid #e4e4e4; padding: .28rem .4rem; text-align: right;
         vertical-align: top; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 2px solid #999; vertical-align: bottom; line-height: 1.25; }
tbody th { text-align: left; font-weight: 600; white-space: nowrap; }
td:not(:last-child) { white-space: nowrap; }
table.words td, table.words th { text-align: left; }
tbody tr:hover { background: #f2f7fb; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .82rem; }
.prompt, .anchor-link { display: none; }
</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
