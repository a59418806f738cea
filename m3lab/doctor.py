"""What this machine can do: one finding per piece M3 Lab may need. Changes nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from m3lab.backends import hip
from m3lab.compile.trace import FLYDSL_VERSION, cache_dir, find_linker

WANTED_MEMORY = 12 << 30  # what a four-rank step of full shapes stays under


@dataclass(frozen=True)
class Finding:
    """``needed``: the quick sweep does not run without it."""

    what: str
    ok: bool
    text: str
    needed: bool = False


def examine() -> list[Finding]:
    """Every finding, in the order a reader wants them."""
    return [
        Finding("python", sys.version_info >= (3, 11), platform.python_version(), needed=True),
        _package("torch", needed=True),
        _flydsl(),
        _package("papermill", needed=True),
        _package("pyarrow", needed=True),
        _package("distributed", hint="for --scheduler: pip install 'm3lab[dask]'"),
        _package("jupyterlab", hint="for `make lab`: pip install 'm3lab[lab]'"),
        Finding("AMD GPU", hip.available(), f"{hip.describe()}; the interpreter needs none"),
        _linker(),
        _memory(),
        _cache(),
    ]


def _package(name: str, hint: str = "", needed: bool = False) -> Finding:
    try:
        return Finding(name, True, metadata.version(name), needed)
    except metadata.PackageNotFoundError:
        return Finding(name, False, f"not installed; {hint}" if hint else "not installed", needed)


def _flydsl() -> Finding:
    if importlib.util.find_spec("flydsl") is None:
        return Finding(
            "flydsl",
            False,
            f"not installed: pip install flydsl=={FLYDSL_VERSION} (Linux x86-64); builds need it, "
            "cached builds run without it",
            needed=True,
        )
    version = metadata.version("flydsl")
    known = version == FLYDSL_VERSION
    return Finding(
        "flydsl", known, version if known else f"{version}; built for {FLYDSL_VERSION}", True
    )


def _linker() -> Finding:
    path = find_linker()
    return Finding(
        "ld.lld",
        path is not None,
        str(path) if path else "none of LLVM 19 or later: assembly only, no code objects",
    )


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return Finding("memory", True, "unknown")
    gib = total / (1 << 30)
    enough = total >= WANTED_MEMORY
    text = f"{gib:.0f} GiB" + ("" if enough else "; four ranks of full shapes want 12 GiB")
    return Finding("memory", enough, text)


def _cache() -> Finding:
    folder = cache_dir()
    there = next(p for p in [folder, *folder.parents] if p.exists())
    ok = os.access(there, os.W_OK) and there.is_dir()
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if ok else 0
    text = f"{_short(folder)}, {size / 1e6:.0f} MB" if ok else f"{_short(folder)} is not writable"
    return Finding("build cache", ok, text)


def _short(path: Path) -> str:
    """``path`` with the home folder as ~."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
