"""Marking what is traced with the stage that it belongs to.

FlyDSL gives each operation the chain of Python frames that built it. ``in_stage`` puts a frame into
that chain whose file name is the stage's name, so the mark goes through every compiler pass as part
of the location and costs no instruction. Reading marks back: ``m3lab.compile.trace``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

MARK = "/stage/"  # file names that begin so are stages
_SOURCE = """\
def bind(body):
    def enter(*args, **options):
        return body(*args, **options)
    return enter
"""


def in_stage(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: what the function traces belongs to stage ``name``, except in further marks."""
    scope: dict[str, Any] = {}
    exec(compile(_SOURCE, MARK + name, "exec"), scope)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(function)(scope["bind"](function))

    return mark
