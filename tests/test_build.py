"""Building without a GPU: what is made, what is kept, and what a second build may rely on."""

import hashlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from m3lab.compile import trace as building
from m3lab.compile.trace import BuildError, MissingFlyDSL, build, build_cached, spec_key

SMALL = Path(__file__).parent / "small_kernels"
ARGS = (1 << 40, 1 << 41)


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.syspath_prepend(str(SMALL))
    return importlib.import_module("three_loads").launch


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def must_not_be_called():
    raise AssertionError("a cached build traced again")


def test_a_launcher_becomes_a_program_assembly_and_code_size_without_a_gpu(launcher, cache):
    made = build(launcher, ARGS, emit=("program", "asm", "size"), cache=cache)
    assert made.name == "three_loads"
    assert not made.cached
    assert made.program is not None
    assert made.program.grid == (2, 1, 1)
    assert made.program.block == (128, 1, 1)
    assert made.program.key == made.key
    assert 'amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx950"' in made.asm
    assert made.asm.count("buffer_load_dword ") == 3
    assert {"trace", "passes", "lower", "asm", "size"} <= set(made.seconds)
    assert made.code_object is None
    assert made.lines is None


def test_code_bytes_are_the_sum_of_the_instructions_encodings(launcher, cache):
    """GCN encodings are 4 or 8 bytes: the size lies between, and the sum is done by hand."""
    made = build(launcher, ARGS, emit=("asm", "size"), cache=cache)
    body = made.asm.split("three_loads:\n")[1].split(".Lfunc_end0")[0]
    total = 0
    for line in body.strip().splitlines():
        mnemonic = line.split()[0]
        # Memory instructions and three-operand vector ones take 8 bytes. A constant printed in hex
        # is a literal of 4 more (inline ones are printed in decimal); s_movk's is within its 4.
        long = re.match(r"buffer_|global_|ds_|s_load|v_add3", mnemonic)
        literal = "0x" in line and not mnemonic.startswith("s_movk")
        total += 8 if long or literal else 4
    assert made.code_bytes == total


def test_two_builds_in_two_processes_give_the_same_key_and_assembly(launcher, cache):
    here = build(launcher, ARGS, emit=("asm",), cache=cache)
    script = (
        "import sys, hashlib; from pathlib import Path\n"
        f"sys.path.insert(0, {str(SMALL)!r})\n"
        "import three_loads; from m3lab.compile.trace import build\n"
        "made = build(three_loads.launch, (5, 7), emit=('asm',), cache=Path(sys.argv[1]))\n"
        "print(made.key, hashlib.sha256(made.asm.encode()).hexdigest(), made.cached)"
    )
    there = subprocess.run(
        [sys.executable, "-c", script, str(cache / "other")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(SMALL.parents[1])},
    ).stdout.split()
    assert there == [here.key, hashlib.sha256(here.asm.encode()).hexdigest(), "False"]


def test_a_second_build_comes_from_the_cache_and_is_equal(launcher, cache):
    first = build(launcher, ARGS, emit=("program", "asm"), cache=cache)
    second = build(launcher, ARGS, emit=("program", "asm"), cache=cache)
    assert second.cached
    assert second.program == first.program
    assert second.asm == first.asm


def test_a_part_that_is_missing_is_added_to_those_that_are_kept(launcher, cache):
    build(launcher, ARGS, emit=("asm",), cache=cache)
    assert not build(launcher, ARGS, emit=("asm", "size"), cache=cache).cached
    assert build(launcher, ARGS, emit=("asm", "size"), cache=cache).cached


@pytest.mark.parametrize("damage", ["cut", "altered", "empty", "not ours"])
def test_a_damaged_cache_file_is_built_again(launcher, cache, damage):
    first = build(launcher, ARGS, emit=("asm",), cache=cache)
    file = cache / f"{first.key}.asm"
    data = file.read_bytes()
    middle = len(data) // 2
    file.write_bytes(
        {
            "cut": data[:middle],
            "altered": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "empty": b"",
            "not ours": b"something else entirely",
        }[damage]
    )
    again = build(launcher, ARGS, emit=("asm",), cache=cache)
    assert not again.cached
    assert again.asm == first.asm
    assert file.read_bytes()[:60] == data[:60] or build(launcher, ARGS, cache=cache).asm
    assert build(launcher, ARGS, emit=("asm",), cache=cache).cached


def test_the_cache_holds_whole_files_only(launcher, cache, monkeypatch):
    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.warns(UserWarning, match="cannot be written: no space left"):
        made = build(launcher, ARGS, emit=("asm",), cache=cache)
    assert made.asm
    assert list(cache.iterdir()) == []


def test_no_machine_path_enters_what_is_kept(launcher, cache):
    made = build(launcher, ARGS, emit=("program", "asm", "lines"), cache=cache)
    root = str(SMALL.parents[1])
    assert {frame.file for chain in made.program.locs for frame in chain} == {
        "tests/small_kernels/three_loads.py",
        "tests/small_kernels/three_loads_stage.py",
    }
    for file in cache.iterdir():
        assert root.encode() not in file.read_bytes()


def test_line_tables_name_the_stage_and_change_no_instruction(launcher, cache):
    made = build(launcher, ARGS, emit=("asm", "lines"), cache=cache)

    def code(text):
        body = text.split("three_loads:\n")[1].split(".Lfunc_end0")[0]
        return [line for line in body.splitlines() if line.strip()[0] != "." and "_" in line]

    assert code(made.lines) == code(made.asm)
    files = dict(re.findall(r'\.file\s+(\d+) "[^"]*?([^"/]+)"\n', made.lines))
    at_load = re.findall(r"\.loc\s+(\d+) \d+ [^\n]*\n(?:\t[sv]_[^\n]*\n)*\tbuffer_load", made.lines)
    assert {files[number] for number in at_load} == {"sum"}


def test_a_call_chain_shrinks_to_its_innermost_stage():
    text = "\n".join(
        [
            '#loc1 = loc("/x/kernels/body.py":10:2)',
            '#loc2 = loc("/stage/split":2:11)',
            '#loc3 = loc("/x/kernels/helper.py":30:2)',
            '#loc4 = loc("/stage/select":2:11)',
            "#loc5 = loc(callsite(#loc3 at #loc1))",
            "#loc6 = loc(callsite(#loc2 at #loc1))",
            "#loc7 = loc(callsite(#loc3 at #loc6))",
            "#loc8 = loc(callsite(#loc4 at #loc7))",
            "#loc9 = loc(callsite(#loc3 at #loc8))",
        ]
    )
    lines = building._stage_lines(text).splitlines()
    assert lines[4] == '#loc5 = loc("kernel":1:1)'  # no stage is marked
    assert lines[6] == '#loc7 = loc("split":1:1)'  # the helper's work is the stage's
    assert lines[8] == '#loc9 = loc("select":1:1)'  # a stage called by another has its own


def test_every_operation_of_a_program_has_the_stage_that_it_was_traced_in(launcher, cache):
    program = build(launcher, ARGS, emit=("program",), cache=cache).program
    stages = {op.kind: program.loc_stages[op.loc] for op in program.walk()}
    assert stages["rocdl.raw.ptr.buffer.load"] == "sum"
    assert stages["gpu.barrier"] == "kernel"


def test_a_build_found_by_its_parameters_is_not_traced(launcher, cache):
    spec = spec_key({"kernel": "three_loads", "tokens": 1})
    first = build_cached(spec, lambda: (launcher, ARGS), emit=("program", "asm"), cache=cache)
    second = build_cached(spec, must_not_be_called, emit=("program",), cache=cache)
    assert second.cached
    assert (second.name, second.key) == (first.name, first.key)
    assert second.program == first.program
    with pytest.raises(AssertionError, match="traced again"):
        build_cached(spec_key({"tokens": 2}), must_not_be_called, cache=cache)


def test_a_cached_program_loads_without_flydsl_in_under_a_second(launcher, cache):
    spec = spec_key({"kernel": "three_loads"})
    build_cached(spec, lambda: (launcher, ARGS), cache=cache)
    script = (
        "import sys, time; from pathlib import Path\n"
        "sys.modules['flydsl'] = None  # importing it is an error\n"
        "from m3lab.compile.trace import build_cached, spec_key\n"
        "start = time.perf_counter()\n"
        "made = build_cached(spec_key({'kernel': 'three_loads'}), None, cache=Path(sys.argv[1]))\n"
        "print(made.program.name, time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(cache)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SMALL.parents[1])},
    ).stdout.split()
    assert done[0] == "three_loads"
    assert float(done[1]) < 1


def test_sources_edited_since_import_are_not_filed_under_the_new_key(launcher, cache, monkeypatch):
    """The process may still hold the old kernel: the short cut by parameters must not be used."""
    spec = spec_key({"kernel": "three_loads"})
    build_cached(spec, lambda: (launcher, ARGS), emit=("asm",), cache=cache)
    changed = {**building._SOURCES_AT_IMPORT, "shapes.py": "as it was at import"}
    monkeypatch.setattr(building, "_SOURCES_AT_IMPORT", changed)
    other = cache / "other"
    build_cached(spec, lambda: (launcher, ARGS), emit=("asm",), cache=other)
    assert list(cache.glob("*.spec"))
    assert not list(other.glob("*.spec"))
    with pytest.raises(AssertionError, match="traced again"):
        build_cached(spec, must_not_be_called, emit=("asm",), cache=cache)


def test_a_spec_key_changes_with_each_parameter_and_each_source(tmp_path):
    from m3lab.model.shapes import RankShape

    source = tmp_path / "kernel.py"
    source.write_text("a")
    keys = [
        spec_key({"tokens": 1, "shape": RankShape(tp=4)}, [source]),
        spec_key({"tokens": 2, "shape": RankShape(tp=4)}, [source]),
        spec_key({"tokens": 1, "shape": RankShape(tp=8)}, [source]),
        spec_key({"shape": RankShape(tp=4)}, [source]),
    ]
    source.write_text("b")
    keys.append(spec_key({"tokens": 1, "shape": RankShape(tp=4)}, [source]))
    assert len(set(keys)) == 5
    source.write_text("a")
    assert spec_key({"shape": RankShape(tp=4), "tokens": 1}, [source]) == keys[0]


def test_a_parameter_known_only_by_its_address_is_refused():
    with pytest.raises(ValueError, match="lasting text form"):
        spec_key({"shape": object()})


def test_a_build_leaves_the_environment_as_it_was(launcher, cache, monkeypatch):
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx942")
    monkeypatch.delenv("ARCH", raising=False)
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    before = dict(os.environ)
    made = build(launcher, ARGS, emit=("asm",), cache=cache)
    assert dict(os.environ) == before
    assert "gfx950" in made.asm
    with pytest.raises(ValueError, match="the launcher takes"):
        build(launcher, (1, 2, None, 4), cache=cache)
    assert dict(os.environ) == before


def test_the_architecture_is_part_of_the_key(launcher, cache):
    other = build(launcher, ARGS, emit=("asm",), arch="gfx942", cache=cache)
    assert "unknown-gfx942" in other.asm
    assert build(launcher, ARGS, emit=("asm",), cache=cache).key != other.key


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"emit": ("asm", "ptx")}, "emit must name some of program, asm, lines, size, object"),
        ({"emit": ()}, "emit must name some"),
        ({"emit": "asm"}, "emit must name some"),
        ({"arch": "sm_90"}, "arch must be one of gfx950, gfx942; given 'sm_90'"),
    ],
)
def test_bad_options_get_a_sentence(launcher, cache, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(launcher, ARGS, cache=cache, **options)


def test_what_is_no_launcher_is_refused(cache):
    with pytest.raises(ValueError, match=r"takes a @flyc\.jit launcher; given function"):
        build(must_not_be_called, ARGS, cache=cache)


def test_a_code_object_without_a_linker_says_what_to_install(launcher, cache, monkeypatch):
    monkeypatch.setattr(building, "find_linker", lambda: None)
    with pytest.raises(BuildError, match=r"needs an ld\.lld of LLVM 19 or later"):
        build(launcher, ARGS, emit=("object",), cache=cache)


@pytest.mark.skipif(building.find_linker() is None, reason="no ld.lld of LLVM 19 or later here")
def test_a_code_object_is_a_shared_elf_with_the_kernel_at_its_size(launcher, cache):
    made = build(launcher, ARGS, emit=("size", "object"), cache=cache)
    assert made.code_object[:4] == b"\x7fELF"
    assert int.from_bytes(made.code_object[16:18], "little") == 3  # ET_DYN: what HIP loads
    assert building.elf_symbol_size(made.code_object, "three_loads") == made.code_bytes
    unlinked = build(launcher, ARGS, emit=("size",), cache=cache / "other")
    assert unlinked.code_bytes == made.code_bytes


def test_an_old_or_absent_linker_is_not_taken(tmp_path, monkeypatch):
    old = tmp_path / "ld.lld"
    old.write_text("#!/bin/sh\necho 'LLD 14.0.6 (compatible with GNU linkers)'\n")
    old.chmod(0o755)
    for name in ("M3LAB_LLD", "ROCM_PATH", "ROCM_ROOT", "ROCM_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert not building._lld_version(old)
    assert building.find_linker() is None or "rocm" in str(building.find_linker())
    old.write_text("#!/bin/sh\necho 'AMD LLD 20.0.0 (compatible with GNU linkers)'\n")
    assert building._lld_version(old)


def test_without_flydsl_the_sentence_says_what_to_install(launcher, cache, monkeypatch):
    monkeypatch.setattr(building.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingFlyDSL, match=r"building a kernel needs FlyDSL.*flydsl==0\.5\.0"):
        build(launcher, ARGS, cache=cache)
    with pytest.raises(MissingFlyDSL, match="not in the cache needs FlyDSL"):
        build_cached("absent", must_not_be_called, cache=cache)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("M3LAB_CACHE", str(tmp_path))
    assert building.cache_dir() == tmp_path
    monkeypatch.delenv("M3LAB_CACHE")
    assert building.cache_dir() == Path.home() / ".cache" / "m3lab"


def test_an_elf_without_the_symbol_is_refused():
    with pytest.raises(ValueError, match="not a 64-bit"):
        building.elf_symbol_size(b"\x7fELF\x01\x01" + bytes(80), "kernel")
