"""The house itself: environments agree, notebooks are clean, nothing names a machine."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from m3lab.compile import trace
from m3lab.sweep import results

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked():
    """Text files of the repository."""
    done = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    texts = (".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".json", ".html", "")
    return [ROOT / p for p in done.stdout.split() if Path(p).suffix in texts]


# --- environments ---


def test_conda_and_pip_make_the_same_environment():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(d["pip"] for d in conda["dependencies"] if isinstance(d, dict))
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    assert sorted(pip) == sorted([*PROJECT["dependencies"], *extras, "-e ."])


def test_conda_brings_the_python_that_the_package_needs():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert f"python{PROJECT['requires-python']}" in conda["dependencies"]


def test_what_is_imported_is_required():
    names = {"yaml": "pyyaml", "IPython": "ipykernel"}
    required = {
        re.split(r"[<>=;\[ ]", r)[0].lower()
        for r in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dask"]]
    }
    for path in (ROOT / "m3lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                if top not in sys.stdlib_module_names | {"m3lab"}:
                    assert names.get(top, top) in required, f"{path.name} imports {top}"


def test_torch_and_flydsl_are_pinned():
    assert "torch==2.13.0" in PROJECT["dependencies"]
    assert any(d.startswith("flydsl==0.5.0") for d in PROJECT["dependencies"])


# --- layers ---


def imports_of(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("kernels", ("torch", "m3lab.reference", "m3lab.interpreter", "m3lab.step")),
        ("reference", ("flydsl", "m3lab.kernels", "m3lab.interpreter", "m3lab.step")),
        ("interpreter", ("m3lab.kernels", "m3lab.reference", "m3lab.model.shapes", "m3lab.step")),
    ],
)
def test_arrows_point_down_only(folder, forbidden):
    for path in sorted((ROOT / "m3lab" / folder).rglob("*.py")):
        for module in imports_of(path):
            for name in forbidden:
                assert module != name, f"{path.name} imports {module}"
                assert not module.startswith(name + "."), f"{path.name} imports {module}"


def test_the_launchers_argument_order_is_the_kernels():
    pytest.importorskip("flydsl")
    from m3lab.kernels import arguments, post_attn

    assert post_attn.ARG_NAMES == arguments.ARG_NAMES
    assert post_attn.INT32_ARGS == arguments.INT32_ARGS


# --- keys follow the sources, however deep they lie ---


def build_sources(package):
    return trace._source_hashes(package)


@pytest.mark.parametrize(
    ("fingerprint", "edited"),
    [
        (build_sources, "kernels/deep/er/stage.py"),
        (build_sources, "kernels/stage.py"),
        (results.code_fingerprint.__wrapped__, "kernels/deep/er/stage.py"),
        (results.clock_fingerprint.__wrapped__, "interpreter/deep/er/op.py"),
        (results.clock_fingerprint.__wrapped__, "clock/deep/er/op.py"),
        (results.clock_fingerprint.__wrapped__, "clock/deep/part.yaml"),
    ],
)
def test_an_edit_in_a_sub_folder_changes_the_key(tmp_path, fingerprint, edited):
    source = tmp_path / edited
    source.parent.mkdir(parents=True)
    source.write_text("a = 1")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    source.write_text("a = 2")
    assert fingerprint(tmp_path) != before


def test_every_kernel_source_is_in_the_build_key():
    """The real files: a folder that the patterns miss would give stale builds."""
    files = {
        p.relative_to(ROOT / "m3lab").as_posix() for p in (ROOT / "m3lab/kernels").rglob("*.py")
    }
    assert files
    assert files <= set(trace._source_hashes())


# --- notebooks ---


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_committed_clean_with_prose_first_and_one_parameters_cell(path):
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    code = [c for c in cells if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    assert tagged[0] is code[0]


def test_the_notebooks_are_there():
    names = {p.stem for p in NOTEBOOKS}
    assert names >= {
        "00_tour",
        "01_build_and_isa",
        "02_weights_and_layouts",
        "03_verify",
        "04_timeline",
        "10_sweep_tokens",
        "11_sweep_context",
        "12_sweep_tp",
        "20_report",
        "21_compare",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_as_it_stands_from_its_own_folder(path, tmp_path):
    import papermill

    papermill.execute_notebook(
        str(path), str(tmp_path / "out.ipynb"), cwd=str(path.parent), progress_bar=False
    )


# --- make ---


def test_every_promised_target_exists():
    text = (ROOT / "Makefile").read_text()
    for target in ("report", "test", "test-full", "lab", "lint"):
        assert re.search(rf"^{target}: \$\(VENV\)/", text, re.MULTILINE), target


def test_ci_runs_make_test():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make test" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("target", ["report", "test", "lab"])
def test_make_with_a_python_too_old_says_so_in_a_sentence(tmp_path, target):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.10" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", target, f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert f"M3 Lab needs Python 3.11 or newer, {old} is Python 3.8.10." in done.stderr
    assert not (tmp_path / ".venv").exists()


# --- prose ---


def test_nothing_names_a_machine():
    # spelled so that this file does not name one itself
    places = re.compile("|".join("/" + p + "/" for p in ("work", "root", "home")))
    for path in tracked():
        found = places.search(path.read_text(errors="replace"))
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


def test_links_between_documents_lead_somewhere():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_a_file_that_a_document_names_is_there():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for named in re.findall(r"`(m3lab/[\w/.]+)`", path.read_text()):
            assert (ROOT / named).exists(), f"{path.name}: {named}"


def import_statements(path):
    """The import statements of a notebook's cells or of a document's Python blocks."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    else:
        blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    for block in blocks:
        lines = [line for line in block.split("\n") if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield ast.unparse(node)


@pytest.mark.parametrize(
    "path",
    [*NOTEBOOKS, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_what_a_notebook_or_document_imports_is_there(path):
    pytest.importorskip("flydsl")
    for line in import_statements(path):
        exec(line, {})


def test_the_licence_is_apache_2():
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
