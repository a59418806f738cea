"""Sweeps: a parameter file, the cases it names, running them, and the folder of what came out.

``m3lab.sweep.sweep(file)`` runs one, ``load_run`` reads one back, ``make_report`` makes its report
again; each is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "sweep": "m3lab.sweep.runner",
    "load_run": "m3lab.sweep.results",
    "make_report": "m3lab.report.html",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"m3lab.sweep has no {name!r}; it has {', '.join(_HOME)}")
    return getattr(import_module(_HOME[name]), name)
