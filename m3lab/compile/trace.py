"""BuildResult a FlyDSL launcher for gfx950 with no GPU, and keep what was built on disk.

Tracing gives an MLIR module; its passes are run here up to the interpreter's level (a ``Program``)
and on to assembly or a code object. Nothing is launched, FlyDSL's own cache is not touched, and the
flydsl environment is set only while a build runs. FlyDSL's driver functions used here (tracing,
pass pipeline) are not promised to be stable: this module is the only one that calls them.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import shutil
import stat
import struct
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3lab.interpreter.program import UNMARKED
from m3lab.interpreter.program import VERSION as PROGRAM_VERSION
from m3lab.kernels.marks import MARK

if TYPE_CHECKING:
    from m3lab.interpreter.program import Program

FLYDSL_VERSION = "0.5.0"  # the release whose pipeline and driver functions this module knows
ARCHES = ("gfx950", "gfx942")
PARTS = ("program", "asm", "lines", "size", "object")
MIN_LLD = 19  # the first LLVM release whose linker knows gfx950 and code object version 6

# The pass FlyDSL itself adds for debug information, after all the others.
_LINE_TABLES = "ensure-debug-info-scope-on-llvm-func{emission-kind=LineTablesOnly}"

_PACKAGE = Path(__file__).resolve().parent.parent
_MAGIC = b"m3lab build 1\n"
_LOCK = threading.RLock()  # a build changes os.environ, which the whole process shares
# What turns a traced module into a Program or assembly, and what kernels are traced from: editing
# any of these makes a new key.
_TOOLS = ("compile/trace.py", "interpreter/lower.py", "interpreter/program.py")
_SOURCES = (*_TOOLS, "kernels/**/*.py", "layout/regions.py", "model/shapes.py")


class MissingFlyDSL(RuntimeError):
    """The job needs FlyDSL, and it is not installed."""

    def __init__(self, job: str) -> None:
        super().__init__(
            f"{job} needs FlyDSL, which is not installed here: pip install flydsl=={FLYDSL_VERSION}"
            " (Linux x86-64 only)"
        )


class BuildError(RuntimeError):
    """A build that cannot be finished on this machine; the sentence says what is missing."""


@dataclass
class BuildResult:
    """What one build gave. Parts that were not asked for are None.

    ``lines``: the same assembly with ``.loc`` lines, each naming the stage's own source line.
    ``code_bytes``: size of the kernel's machine code. ``seconds``: what each phase took when the
    part was made (``import``, ``trace``, ``lower``, ``asm``, ...), and ``load``: reading the cache
    this time. ``cached``: every part asked for came from the cache.
    """

    name: str
    key: str
    arch: str
    program: Program | None = None
    asm: str | None = None
    lines: str | None = None
    code_bytes: int | None = None
    code_object: bytes | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    cached: bool = False


def build(
    launcher: Any,
    args: Sequence[int],
    *,
    emit: Sequence[str] = ("program", "asm"),
    arch: str = "gfx950",
    cache: Path | None = None,
) -> BuildResult:
    """Trace a ``@flyc.jit`` launcher with ``args`` and make the parts named in ``emit``.

    ``args``: one integer per argument (addresses as Int64; any value does, nothing is launched).
    ``emit``: of "program" (the interpreter's), "asm", "lines" (assembly with ``.loc`` lines),
    "size" (code bytes; needs no linker), "object" (a loadable code object; needs ``ld.lld``, see
    ``find_linker``). ``cache``: the folder of built parts, default ``cache_dir()``.

    Raises MissingFlyDSL, ValueError for a wrong argument list, part or architecture, BuildError
    when a code object is asked for and no linker is found; FlyDSL's own DSLCompileError passes.
    """
    emit = _check(emit, arch)
    require_flydsl("building a kernel")
    seconds: dict[str, float] = {}
    with _LOCK, target_environment(arch):
        with _phase(seconds, "import"):
            from flydsl.compiler import jit_function as fly
        with fly._create_mlir_context():
            with _phase(seconds, "trace"):
                traced = _trace(launcher, args)
            return _finish(traced, emit, arch, seconds, cache or cache_dir())


def build_cached(
    spec: str,
    make: Callable[[], tuple[Any, Sequence[int]]],
    *,
    emit: Sequence[str] = ("program",),
    arch: str = "gfx950",
    cache: Path | None = None,
) -> BuildResult:
    """Like ``build``, but find the parts by ``spec`` (of ``spec_key``) without tracing.

    ``make() -> (launcher, args)`` is called only when a part is missing. A hit imports no flydsl
    and needs none installed.
    """
    emit = _check(emit, arch)
    root = cache or cache_dir()
    entry = root / f"{_digest(spec, arch)}.spec"
    # Sources edited since this process started may or may not be the ones it has imported: the
    # short cut would then file one version's build under the other's key. Tracing is always right.
    settled = _source_hashes() == _SOURCES_AT_IMPORT
    if settled and isinstance(found := _read(entry), dict):
        hit = BuildResult(name=found["name"], key=found["key"], arch=arch)
        if _load_parts(hit, emit, root):
            return hit
    require_flydsl("building a kernel that is not in the cache")
    with _LOCK, target_environment(arch):
        launcher, args = make()
        made = build(launcher, args, emit=emit, arch=arch, cache=root)
    if settled:
        _write(entry, {"name": made.name, "key": made.key})
    return made


def spec_key(parameters: Mapping[str, Any], sources: Sequence[Path] = ()) -> str:
    """Key of a build known by its parameters: they, the sources that kernels are made from, and
    the flydsl version.

    ``parameters``: numbers, strings, None, containers of them, and dataclasses such as RankShape.
    ``sources``: further files the kernel is made from (a kernel outside the package).
    Raises ValueError for a value with no lasting text form (an object shown by its address).
    """
    text = json.dumps(dict(parameters), sort_keys=True, default=repr)
    if " at 0x" in text:
        raise ValueError(f"a build's parameters must have a lasting text form; given {text}")
    extra = [_file_hash(path) for path in sources]
    return _digest(text, *_source_hashes().values(), *extra, _flydsl_version(), PROGRAM_VERSION)


def cache_dir() -> Path:
    """Where built parts are kept: ``$M3LAB_CACHE``, else ``~/.cache/m3lab``."""
    return Path(os.environ.get("M3LAB_CACHE") or Path.home() / ".cache" / "m3lab")


def require_flydsl(job: str) -> None:
    """Raise MissingFlyDSL unless FlyDSL can be imported. ``job`` says what needs it."""
    if importlib.util.find_spec("flydsl") is None:
        raise MissingFlyDSL(job)


@contextmanager
def target_environment(arch: str = "gfx950") -> Iterator[None]:
    """Point FlyDSL at ``arch`` with no device, and put the environment back afterwards.

    FlyDSL reads these variables whenever it is used, not at import, so that a process that also
    launches on a real GPU keeps its own settings outside a build.
    """
    changes = {
        "ARCH": arch,
        "FLYDSL_GPU_ARCH": arch,
        "COMPILE_ONLY": "1",
        "FLYDSL_COMPILE_BACKEND": "rocm",
        "FLYDSL_COMPILE_LLVM_DIR": "",
        "FLYDSL_KTRACE_ENABLE": "0",
        "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "0",
        # Stages are told apart by their call chains: drop none of the frames.
        "FLYDSL_DEBUG_MAX_LOC_DEPTH": "32",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------- tracing and passes


@dataclass
class _Traced:
    name: str  # the kernel's symbol
    text: str  # the module with its source locations
    fragments: list[str]  # pass pipeline, gpu-module-to-binary last


def _trace(launcher: Any, args: Sequence[int]) -> _Traced:
    """Trace in the current MLIR context."""
    from flydsl.compiler import jit_function as fly

    if not isinstance(launcher, fly.JitFunction):
        raise ValueError(f"build takes a @flyc.jit launcher; given {type(launcher).__name__}")
    launcher._ensure_sig()
    signature = launcher._sig
    try:
        bound = signature.bind(*args)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise ValueError(f"the launcher takes ({names}); given {len(args)} values") from error
    bound.apply_defaults()
    hints = launcher._effective_compile_hints()
    context = fly.ir.Context.current
    with fly.CompilationContext.compile_hints(hints):
        launcher._resolve_arguments(bound.arguments)
        module = launcher._trace(context, signature, bound, None, execute=False).module
        # Also puts the hints (waves per SIMD) on the kernel, so take the text after it.
        _, config = fly.MlirCompiler.prepare(module, backend=fly.get_backend(), compile_hints=hints)
    text = module.operation.get_asm(enable_debug_info=True, assume_verified=True)
    kernels = re.findall(r"gpu\.func @([\w$.-]+|\"[^\"]+\")\([^\n]*? kernel\b", text)
    if len(kernels) != 1:
        raise ValueError(f"a launcher must launch one kernel; this one holds {kernels or 'none'}")
    return _Traced(kernels[0].strip('"'), text, list(config.fragments))


def _finish(
    traced: _Traced, emit: Sequence[str], arch: str, seconds: dict[str, float], root: Path
) -> BuildResult:
    """Load the parts that are in the cache, make the others."""
    key = _digest(
        _portable(traced.text),
        *traced.fragments,  # they name the architecture
        _flydsl_version(),
        PROGRAM_VERSION,
        *(_file_hash(_PACKAGE / name) for name in _TOOLS),
    )
    result = BuildResult(name=traced.name, key=key, arch=arch)
    if _load_parts(result, emit, root):
        result.seconds.update(seconds)
        return result
    missing = [part for part in emit if not _has(result, part)]
    made = _make_parts(traced, missing, seconds)
    for part, value in made.items():
        if part == "program":
            value.key = key
        _set(result, part, value)
        _write(_part_file(root, key, part), {"value": value, "seconds": seconds})
    result.seconds.update(seconds)
    return result


def _make_parts(traced: _Traced, parts: Sequence[str], seconds: dict[str, float]) -> dict[str, Any]:
    from flydsl.compiler import jit_function as fly

    made: dict[str, Any] = {}
    passes = traced.fragments[:-1]
    level = passes.index("convert-fly-to-rocdl") + 2  # with the canonicalize that follows
    # Parsed anew: running passes on the traced module itself aborts the process.
    module = fly.ir.Module.parse(traced.text)
    with _phase(seconds, "passes"):
        _run(module, passes[:level])
    if "program" in parts:
        from m3lab.interpreter.lower import lower

        with _phase(seconds, "lower"):
            made["program"] = lower(module, traced.name, mark=MARK)
    if "lines" in parts:
        with _phase(seconds, "lines"):
            made["lines"] = _assembly_with_lines(traced)
    binaries = [part for part in ("asm", "object", "size") if part in parts]
    if not binaries:
        return made
    with _phase(seconds, "passes"):
        _run(module, passes[level:])
        # The binary pass replaces the module's kernel: each further output needs its own copy.
        text = module.operation.get_asm(enable_debug_info=True)
    if "asm" in parts:
        with _phase(seconds, "asm"):
            made["asm"] = _serialize(module, "format=isa").decode()
    if "object" in parts:
        with _phase(seconds, "object"), _toolkit(_linker()) as folder:
            copy = fly.ir.Module.parse(text)
            made["object"] = _serialize(copy, f'format=fatbin toolkit="{folder}"')
    if "size" in parts:
        with _phase(seconds, "size"):
            elf = made.get("object") or _relocatable(fly.ir.Module.parse(text))
            made["size"] = elf_symbol_size(elf, traced.name)
    return made


def _assembly_with_lines(traced: _Traced) -> str:
    """Assembly whose ``.loc`` lines name the stage: see ``_stage_lines``."""
    from flydsl.compiler import jit_function as fly

    module = fly.ir.Module.parse(_stage_lines(traced.text))
    _run(module, [*traced.fragments[:-1], _LINE_TABLES])
    return _serialize(module, "format=isa").decode()


def _run(module: Any, fragments: Sequence[str]) -> None:
    from flydsl.compiler import jit_function as fly

    fly._run_pipeline(module, list(fragments), verifier=True, print_after_all=False)


def _serialize(module: Any, options: str) -> bytes:
    """Bytes of the one kernel object that ``gpu-module-to-binary`` makes of ``module``."""
    from flydsl._mlir.dialects import gpu

    _run(module, [f"gpu-module-to-binary{{{options}}}"])
    for op in module.body.operations:
        if op.operation.name == "gpu.binary":
            return bytes(gpu.ObjectAttr(op.objects[0]).object)
    raise BuildError("FlyDSL's pipeline made no kernel object")


# ---------------------------------------------------------------------- linking and sizes


def find_linker() -> Path | None:
    """An ``ld.lld`` of LLVM 19 or later: ``$M3LAB_LLD``, a ROCm install, or one on the PATH."""
    if named := os.environ.get("M3LAB_LLD"):
        return Path(named)
    roots = [os.environ.get(name) for name in ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")]
    candidates = [Path(root, "llvm/bin/ld.lld") for root in [*roots, "/opt/rocm"] if root]
    names = ["ld.lld", *(f"ld.lld-{version}" for version in range(25, MIN_LLD - 1, -1))]
    names += [f"lld-{version}" for version in range(25, MIN_LLD - 1, -1)]
    candidates += [Path(found) for name in names if (found := shutil.which(name))]
    return next((path for path in candidates if path.exists() and _lld_version(path)), None)


def _lld_version(path: Path) -> bool:
    """Whether this lld is new enough. It answers to the name it is called by, hence argv[0]."""
    try:
        asked = subprocess.run(
            ["ld.lld", "--version"],
            executable=str(path),
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.search(r"LLD (\d+)", asked.stdout)
    return found is not None and int(found[1]) >= MIN_LLD


def _linker() -> Path:
    found = find_linker()
    if found is None:
        raise BuildError(
            f"a code object needs an ld.lld of LLVM {MIN_LLD} or later (ROCm's, or Debian's "
            f"lld-{MIN_LLD}), and none is on the PATH or named by ROCM_PATH or M3LAB_LLD; "
            'assembly (emit "asm") needs none'
        )
    return found


@contextmanager
def _toolkit(linker: Path) -> Iterator[Path]:
    """A folder shaped as the pass expects a ROCm install: llvm/bin/ld.lld, amdgcn/bitcode."""
    with tempfile.TemporaryDirectory(prefix="m3lab-toolkit-") as name:
        folder = Path(name)
        tools = folder / "llvm" / "bin"
        tools.mkdir(parents=True)
        (tools / "ld.lld").symlink_to(linker.resolve())
        bitcode = linker.parent.parent.parent / "amdgcn" / "bitcode"
        (folder / "amdgcn").mkdir()
        if bitcode.is_dir():
            (folder / "amdgcn" / "bitcode").symlink_to(bitcode)
        else:
            (folder / "amdgcn" / "bitcode").mkdir()
        yield folder


def _relocatable(module: Any) -> bytes:
    """The assembled, unlinked ELF object of ``module``: enough for sizes, not for a device.

    The pass assembles and then calls a linker; here the linker's place is taken by a copy.
    """
    with tempfile.TemporaryDirectory(prefix="m3lab-copy-") as name:
        script = Path(name) / "copy"
        # called as: ld.lld -shared IN -o OUT
        script.write_text('#!/bin/sh\nexec cp "$2" "$4"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        with _toolkit(script) as folder:
            return _serialize(module, f'format=fatbin toolkit="{folder}"')


def elf_symbol_size(elf: bytes, symbol: str) -> int:
    """Bytes of function ``symbol`` in a 64-bit little-endian ELF image.

    Raises ValueError when the image is no such ELF or holds no such function.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF image")
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count = struct.unpack_from("<HH", elf, 0x3A)
    # section header: name, type, flags, addr, offset, size, link, info, align, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * entry) for i in range(count)]
    for section in sections:
        if section[1] != 2:  # SHT_SYMTAB
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, _, _, size = struct.unpack_from("<IBBHQQ", elf, at)
            end = elf.index(b"\0", names + name)
            if elf[names + name : end].decode() == symbol:
                return int(size)
    raise ValueError(f"the ELF image holds no function {symbol!r}")


# ---------------------------------------------------------------------- source locations

_FILE_LOC = re.compile(r'"([^"\n]+)"(:\d+:\d+)')
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)


def portable_path(path: str) -> str:
    """A source path that means the same on every machine.

    Inside the package: from its parent (``m3lab/kernels/select.py``). Else the bare file name.
    """
    try:
        return Path(path).relative_to(_PACKAGE.parent).as_posix()
    except ValueError:
        return Path(path).name


def _portable(text: str) -> str:
    return _FILE_LOC.sub(lambda found: f'"{portable_path(found[1])}"{found[2]}', text)


def _stage_lines(text: str) -> str:
    """Replace each call chain by one position whose file is the stage that it is marked with.

    DWARF line tables keep the innermost position only, so a helper's instructions would belong to
    no stage. Line 1 stands for the whole stage.
    """
    aliases = dict(_ALIAS.findall(text))

    def replace(found: re.Match[str]) -> str:
        if not found[2].startswith(("callsite", '"')):
            return found[0]
        files = [frame.split('"')[1] for frame in _frames(found[2], aliases)]
        stages = [file.removeprefix(MARK) for file in files if file.startswith(MARK)]
        return f'{found[1]} = loc("{stages[0] if stages else UNMARKED}":1:1)'

    return _portable(_ALIAS.sub(replace, text))


def _frames(location: str, aliases: Mapping[str, str]) -> list[str]:
    """The positions of a callsite location, innermost first: aliases resolved, all in one line."""
    frames: list[str] = []
    for token in re.findall(r'"[^"]+":\d+:\d+|#loc\d*', location):
        frames += _frames(aliases[token], aliases) if token.startswith("#") else [token]
    return frames or ['"unknown":0:0']


# ---------------------------------------------------------------------- keys and files


def _check(emit: Sequence[str], arch: str) -> tuple[str, ...]:
    unknown = [part for part in emit if part not in PARTS]
    if unknown or isinstance(emit, str) or not emit:
        raise ValueError(f"emit must name some of {', '.join(PARTS)}; given {emit!r}")
    if arch not in ARCHES:
        raise ValueError(f"arch must be one of {', '.join(ARCHES)}; given {arch!r}")
    return tuple(part for part in PARTS if part in emit)


def _digest(*pieces: object) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        data = str(piece).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _flydsl_version() -> str:
    """The installed release; where none is, the one this package is made for."""
    try:
        return importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        return FLYDSL_VERSION


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _source_hashes(package: Path = _PACKAGE) -> dict[str, str]:
    """Path -> hash of every source that a build is made from; ``**`` takes sub-folders too."""
    files = sorted({path for pattern in _SOURCES for path in package.glob(pattern)})
    return {path.relative_to(package).as_posix(): _file_hash(path) for path in files}


_SOURCES_AT_IMPORT = _source_hashes()

_FIELDS = {"size": "code_bytes", "object": "code_object"}  # other parts: fields of their own name


def _set(target: BuildResult, part: str, value: Any) -> None:
    setattr(target, _FIELDS.get(part, part), value)


def _has(target: BuildResult, part: str) -> bool:
    return getattr(target, _FIELDS.get(part, part)) is not None


def _part_file(root: Path, key: str, part: str) -> Path:
    return root / f"{key}.{part}"


def _load_parts(target: BuildResult, emit: Sequence[str], root: Path) -> bool:
    """Fill in what the cache holds of ``emit``; whether that is all of it."""
    start = time.perf_counter()
    for part in emit:
        found = _read(_part_file(root, target.key, part))
        if isinstance(found, dict) and found.get("value") is not None:
            _set(target, part, found["value"])
            target.seconds.update(found["seconds"])
    target.seconds["load"] = time.perf_counter() - start
    target.cached = all(_has(target, part) for part in emit)
    return target.cached


def _read(path: Path) -> Any:
    """The object in a cache file; None when it is absent, cut short, altered or of other code."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    head, body = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if head != _MAGIC + hashlib.sha256(body).digest():
        return None
    collecting = gc.isenabled()
    gc.disable()  # a Program is a hundred thousand small objects: collections while loading cost
    try:
        return pickle.loads(body)
    except Exception:  # classes renamed since: whatever it raises, the answer is to build again
        return None
    finally:
        if collecting:
            gc.enable()


def _write(path: Path, value: Any) -> None:
    """Write a whole file or none. A cache that cannot be written costs time, not the build."""
    body = pickle.dumps(value, protocol=5)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name[:16]}-", delete=False
        ) as out:
            temporary = Path(out.name)
            try:
                out.write(_MAGIC + hashlib.sha256(body).digest() + body)
                out.close()
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        warnings.warn(f"the build cache {path.parent} cannot be written: {error}", stacklevel=2)


@contextmanager
def _phase(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
