"""Nothing a kernel computes changes by accident: twelve steps against a committed record.

``tests/golden/record.py`` makes the record; a change that means to alter bits, assembly or modelled
times makes it anew and says so in its commit.
"""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"
RECORD = json.loads((FOLDER / "record.json").read_text())


def recorder():
    spec = importlib.util.spec_from_file_location("golden_record", FOLDER / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECORD))
def test_a_step_is_built_and_publishes_and_takes_as_recorded(name):
    now = recorder().record_of(name)
    assert now["bits"] == RECORD[name]["bits"]
    assert now == RECORD[name]


def test_the_record_holds_every_case_and_no_failed_check():
    assert set(recorder().CASES) == set(RECORD)
    assert all(not case["failed"] for case in RECORD.values())
