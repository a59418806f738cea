# Each target sets up its own environment in .venv, from nothing, the first time.
# PYTHON picks the interpreter (3.11 or newer); JOBS the sweep's local processes (default: by cores).

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?=
PARAMS ?= params/quick.yaml
TESTS ?= tests
# One torch thread a test worker: two workers of two threads each would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help report test test-full lint format lab calibrate clean

help:
	@echo "make report     run the quick sweep and write an HTML report (PARAMS=$(PARAMS))"
	@echo "make test       run the tests (minutes)"
	@echo "make test-full  run all tests, the slow ones too"
	@echo "make lint       ruff and mypy"
	@echo "make lab        open JupyterLab on the notebooks"
	@echo "make calibrate  fit the modelled clock to published figures and show all of them"

report: $(VENV)/.base
	$(BIN)/m3lab sweep $(PARAMS) $(if $(JOBS),--jobs $(JOBS))

test: $(VENV)/.dev
	$(PYTEST) -m "not slow" $(TESTS)

test-full: $(VENV)/.dev
	$(PYTEST) --dist load $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(VENV)/.lab
	$(BIN)/jupyter lab notebooks

calibrate: $(VENV)/.base
	OMP_NUM_THREADS=1 $(BIN)/python -m m3lab.report.calibrate --docs docs/model.md

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# --- environments: a stamp file each, made anew when pyproject.toml changes ---

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "M3 Lab needs Python 3.11 or newer; none was found on PATH" \
		"(python3 is $$(python3 --version 2>/dev/null || echo missing))." \
		"Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "M3 Lab needs Python 3.11 or newer, $(PYTHON) is" \
		"$$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment;" \
		"on Debian or Ubuntu install the package python3-venv." >&2; exit 1; }
	@touch $@

$(VENV)/.base: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,dask]'
	@touch $@ $(VENV)/.base

$(VENV)/.lab: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[lab]'
	@touch $@ $(VENV)/.base
