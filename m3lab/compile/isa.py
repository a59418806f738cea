"""Figures of a kernel's gfx950 assembly: registers, LDS, spills, instruction mix.

Everything is read from the text that ``build`` makes and from the metadata at its end; nothing is
estimated, so that a figure the text does not hold (code bytes) is None unless it is given. Static
counts are a proxy: a loop's body counts once, and no instruction has a time here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import yaml

from m3lab.compile.trace import BuildResult

LDS_LIMIT = 163_840  # bytes a workgroup may have on gfx950 (k4.md)

# First pattern that matches the mnemonic decides; every instruction is in exactly one class.
# Names: AMD's CDNA3 / CDNA4 instruction set documents, as LLVM spells them.
_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("mfma", r"v_s?mfma"),
        ("dpp", r"v_.*_dpp$"),
        (
            "cross-lane",
            r"v_permlane|v_readlane|v_writelane|v_readfirstlane|ds_b?permute|ds_swizzle",
        ),
        ("transcendental", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_"),
        ("convert", r"v_cvt_"),
        ("valu", r"v_"),
        ("cache control", r"buffer_(wbl2|inv|wbinvl1|gl)|s_[di]cache_"),
        ("buffer load", r"buffer_load_"),
        ("buffer store", r"buffer_store_"),
        ("global load", r"(global|flat)_load_"),
        ("global store", r"(global|flat)_store_"),
        ("atomic", r"(buffer|global|flat)_atomic_"),
        ("scratch", r"scratch_"),
        ("lds read", r"ds_(read|load)"),
        ("lds write", r"ds_(write|store)"),
        ("lds other", r"ds_"),
        ("scalar load", r"s_(buffer_|scratch_)?load_"),
        ("wait", r"s_wait"),
        ("barrier", r"s_barrier"),
        ("branch", r"s_c?branch|s_setpc|s_swappc|s_call|s_endpgm"),
        (
            "control",
            r"s_(nop|sleep|setprio|sendmsg|setreg|getreg|memtime|memrealtime|sethalt|trap)",
        ),
        ("salu", r"s_"),
        ("other", r""),
    )
)
CLASSES = tuple(name for name, _ in _CLASSES)


@dataclass(frozen=True)
class IsaFigures:
    """One kernel's static figures. Bytes in bytes, registers per lane (VGPR, AGPR) or wave (SGPR).

    ``vgpr`` counts AGPRs too, as the metadata does (one register file since gfx90a).
    ``scratch_bytes``: private memory per lane. ``mix``: instructions per class of ``CLASSES``, only
    the classes that occur; they sum to ``instructions``. ``code_bytes``: None where unknown.
    """

    name: str
    instructions: int
    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    lds_bytes: int
    scratch_bytes: int
    code_bytes: int | None = None
    mix: dict[str, int] = field(default_factory=dict)

    def problems(self) -> list[str]:
        """What a build must not have: a sentence each; empty when it is fine.

        SGPR spills are no problem: each is a v_writelane into a VGPR, not a memory access.
        """
        found = []
        if self.vgpr_spills:
            found.append(f"{self.name} spills {self.vgpr_spills} VGPRs to memory; none may spill")
        if self.scratch_bytes:
            found.append(
                f"{self.name} uses {self.scratch_bytes} bytes of scratch a lane; it must use none"
            )
        if self.lds_bytes > LDS_LIMIT:
            found.append(f"{self.name} has {self.lds_bytes} bytes of LDS; the limit is {LDS_LIMIT}")
        return found


def classify(mnemonic: str) -> str:
    """The class of an instruction, by its mnemonic (``v_add_f32_e32`` -> "valu")."""
    return next(name for name, pattern in _CLASSES if pattern.match(mnemonic))


def figures(asm: str, code_bytes: int | None = None) -> IsaFigures:
    """Figures of the one kernel in ``asm``. ``code_bytes``: of ``BuildResult``, where it was made.

    Raises ValueError when the text holds no kernel metadata or several kernels.
    """
    kernel = _metadata(asm)
    mix = Counter(classify(mnemonic) for mnemonic in mnemonics(asm))
    return IsaFigures(
        name=kernel[".name"],
        instructions=mix.total(),
        vgpr=kernel[".vgpr_count"],
        agpr=kernel[".agpr_count"],
        sgpr=kernel[".sgpr_count"],
        vgpr_spills=kernel[".vgpr_spill_count"],
        sgpr_spills=kernel[".sgpr_spill_count"],
        lds_bytes=kernel[".group_segment_fixed_size"],
        scratch_bytes=kernel[".private_segment_fixed_size"],
        code_bytes=code_bytes,
        mix={name: mix[name] for name in CLASSES if mix[name]},
    )


def figures_of(build: BuildResult) -> IsaFigures:
    """Figures of a ``BuildResult`` made with emit "asm" (and "size", for the code bytes)."""
    if build.asm is None:
        raise ValueError(f'{build.name} was built without its assembly; build it with emit "asm"')
    return figures(build.asm, build.code_bytes)


def mnemonics(asm: str) -> Iterator[str]:
    """The kernel's instructions in order, by mnemonic."""
    for _, mnemonic in _instructions(asm):
        yield mnemonic


# ---------------------------------------------------------------------- tables

# The columns of the spec's table of a public peer, and how each is read.
_COLUMNS = {
    "instructions": lambda f: f.instructions,
    "VGPR": lambda f: f.vgpr,
    "SGPR": lambda f: f.sgpr,
    "SGPR spills": lambda f: f.sgpr_spills,
    "LDS bytes": lambda f: f.lds_bytes,
    "code bytes": lambda f: f.code_bytes,
    "MFMA": lambda f: f.mix.get("mfma", 0),
    "buffer loads": lambda f: f.mix.get("buffer load", 0),
    "LDS reads": lambda f: f.mix.get("lds read", 0),
    "waits": lambda f: f.mix.get("wait", 0),
    "barriers": lambda f: f.mix.get("barrier", 0),
    "AGPR": lambda f: f.agpr,
    "VGPR spills": lambda f: f.vgpr_spills,
    "scratch bytes": lambda f: f.scratch_bytes,
}


def table(kernels: Sequence[IsaFigures], labels: Sequence[object] | None = None) -> pd.DataFrame:
    """One row a kernel, the columns of ``peer_table`` first. ``labels``: row names, default the
    kernels' own. An unknown figure is <NA>."""
    rows = [{name: read(kernel) for name, read in _COLUMNS.items()} for kernel in kernels]
    index = pd.Index([k.name for k in kernels] if labels is None else list(labels), name="kernel")
    return pd.DataFrame(rows, index=index, columns=list(_COLUMNS)).astype("Int64")


def mix_table(
    kernels: Sequence[IsaFigures], labels: Sequence[object] | None = None
) -> pd.DataFrame:
    """One row a kernel, one column a class that occurs in any, and the total."""
    rows = [{**{c: k.mix.get(c, 0) for c in CLASSES}, "total": k.instructions} for k in kernels]
    index = pd.Index([k.name for k in kernels] if labels is None else list(labels), name="kernel")
    frame = pd.DataFrame(rows, index=index, columns=[*CLASSES, "total"])
    return frame.loc[:, [c for c in frame.columns if c == "total" or frame[c].any()]]


def difference(before: IsaFigures, after: IsaFigures) -> pd.DataFrame:
    """Figure by figure: before, after, change, and change in percent of before.

    Rows: the columns of ``table``, then the instruction classes that occur in either.
    """
    rows = {name: (read(before), read(after)) for name, read in _COLUMNS.items()}
    for name in CLASSES:
        pair = (before.mix.get(name, 0), after.mix.get(name, 0))
        if any(pair):
            rows[f"mix: {name}"] = pair
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["before", "after"])
    frame = frame.astype("Int64").rename_axis("figure")
    frame["change"] = frame["after"] - frame["before"]
    share = frame["change"].astype("Float64") / frame["before"].astype("Float64") * 100
    frame["percent"] = share.where(frame["before"] != 0)
    return frame


def peer_table() -> pd.DataFrame:
    """A public peer's builds (flydsl 0.5.0, gfx950, W=4, one index head), from the spec's k4.md.

    Index: (tokens, K1 fused). Empty entries were not recorded. AGPRs, VGPR spills and scratch are
    0 in all ten. Static KV scale, shared expert from the table: compare with our builds of that.
    """
    names = [
        name for name in _COLUMNS if name not in ("SGPR", "AGPR", "VGPR spills", "scratch bytes")
    ]
    frame = pd.DataFrame.from_dict(_PEER, orient="index", columns=names).astype("Int64")
    frame.index = pd.MultiIndex.from_tuples(_PEER, names=["tokens", "fused"])
    return frame


_NO = None
_PEER = {
    (1, False): (5390, 151, 50, 100992, 31776, 46, 190, 245, 271, 37),
    (1, True): (7878, 154, 180, 101248, 46840, 106, 277, 280, 384, 52),
    (2, False): (6622, 145, 48, 113280, 39328, _NO, _NO, _NO, _NO, _NO),
    (2, True): (9425, 145, 134, 113792, 56236, _NO, _NO, _NO, _NO, _NO),
    (4, False): (8321, 183, 66, 137856, 49300, 88, 363, 369, 393, 41),
    (4, True): (10862, 189, 134, 138880, 64232, 148, 457, 406, 510, 58),
    (8, False): (10976, 188, 109, 95520, 66776, _NO, _NO, _NO, _NO, _NO),
    (8, True): (13649, 186, 226, 97568, 82092, 226, 479, 673, 579, 73),
    (16, False): (16603, 197, 178, 159520, 101668, 286, 609, 1126, 714, 71),
    (16, True): (20372, 199, 344, 163616, 123692, 346, 735, 1159, 860, 88),
}


def by_stage(lines: str) -> pd.DataFrame:
    """Instructions per stage and class, and their total.

    ``lines``: ``BuildResult.lines`` (emit "lines"), whose ``.loc`` lines name a stage each. An
    instruction belongs to the last ``.loc`` before it, which the compiler also keeps for what it
    moves or makes itself; "(none)" holds those before the first. Raises ValueError when the text
    has no ``.loc`` lines.
    """
    counts: dict[str, Counter[str]] = {}
    for position, mnemonic in _instructions(lines):
        name = position[0] if position else "(none)"
        counts.setdefault(name, Counter())[classify(mnemonic)] += 1
    if set(counts) <= {"(none)"}:
        raise ValueError('the assembly has no .loc lines; build it with emit "lines"')
    used = [name for name in CLASSES if any(count[name] for count in counts.values())]
    rows = {
        name: [*(count[c] for c in used), count.total()] for name, count in sorted(counts.items())
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=[*used, "total"])
    return frame.rename_axis("stage").sort_values("total", ascending=False)


# ---------------------------------------------------------------------- reading the text

_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')


def _instructions(asm: str) -> Iterator[tuple[tuple[str, int] | None, str]]:
    """(source position or None, mnemonic) of each instruction between the kernel's label and its
    end. Directives, labels and comments are no instructions."""
    name = _metadata(asm)[".name"]
    files: dict[str, str] = {}
    position: tuple[str, int] | None = None
    inside = False
    for raw in asm.splitlines():
        line = raw.split(";", 1)[0].strip()
        if line in (f"{name}:", f'"{name}":'):
            inside = True
        elif line.startswith(".Lfunc_end"):
            inside = False
        elif found := _FILE.match(line):
            number, folder, file = found.groups()
            files[number] = f"{folder}/{file}" if file and folder else file or folder
        elif found := _LOC.match(line):
            position = (files.get(found[1], "(none)"), int(found[2]))
        elif inside and line and not line.startswith(".") and not line.endswith(":"):
            yield position, line.split(None, 1)[0]


def _metadata(asm: str) -> dict[str, Any]:
    """The kernel's entry in the metadata that ends the assembly."""
    found = re.search(r"\.amdgpu_metadata\n---\n(.*?)\n\.\.\.\n", asm, re.DOTALL)
    if found is None:
        raise ValueError("the text holds no .amdgpu_metadata; it is not the assembly of a kernel")
    kernels = yaml.safe_load(found[1])["amdhsa.kernels"]
    if len(kernels) != 1:
        raise ValueError(f"the assembly must hold one kernel; it holds {len(kernels)}")
    kernel: dict[str, Any] = kernels[0]
    return kernel
