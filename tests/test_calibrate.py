"""The fit against models whose answer is known, and the table it prints."""

import math

import pytest

pytest.importorskip("flydsl")

from m3lab import calibrate
from m3lab.calibrate import ROWS, Row, fit, table
from m3lab.interpreter.part import PARTS, load_part, read_part

PART = load_part()
PRIORS = {n: float(c["prior"]) for n, c in read_part()["constants"].items() if "prior" in c}


def toy(tokens, part):
    """A step of hops and work: linear in its constants, as a critical path is."""
    hops = 6 * part.visible_ns + 2 * part.link_ns + 4 * part.hbm_ns
    return (hops + 9000 * tokens * part.instructions_per_op) / 1000


def rows(one, four):
    return [Row("1", "", one, 1, fitted=True), Row("5", "", four, 4, fitted=True)]


def test_figures_that_the_priors_give_leave_the_constants_where_they_are():
    priors = PART.with_values(**PRIORS)
    values = fit(toy, PART, PRIORS, rows(toy(1, priors), toy(4, priors)))
    assert values == pytest.approx(PRIORS)


def test_the_fit_brings_the_rows_near_by_moving_what_matters():
    priors = PART.with_values(**PRIORS)
    wanted = toy(1, priors) * 1.1, toy(4, priors) * 1.3
    values = fit(toy, PART, PRIORS, rows(*wanted))
    fitted = PART.with_values(**values)
    assert toy(1, fitted) == pytest.approx(wanted[0], rel=0.04)
    assert toy(4, fitted) == pytest.approx(wanted[1], rel=0.05)
    assert values["instructions_per_op"] > 1.15 * PRIORS["instructions_per_op"]
    assert values["poll_service_ns"] == pytest.approx(PRIORS["poll_service_ns"])  # not in it


def test_a_row_far_out_of_reach_does_not_drag_a_constant_beyond_belief():
    values = fit(toy, PART, PRIORS, rows(1000.0, 4000.0))
    for name, value in values.items():
        assert abs(math.log(value / PRIORS[name])) <= 1.5 + 1e-9


def test_at_most_five_constants_are_fitted_and_each_says_so():
    constants = read_part()["constants"]
    fitted = {n for n, c in constants.items() if c["source"].startswith("fitted")}
    assert fitted == set(PRIORS) == set(calibrate.SPREAD)
    assert len(fitted) <= 5


def test_a_row_is_shown_or_says_what_it_needs():
    for row in ROWS:
        assert (row.tokens is None) == bool(row.needs), row.number
        assert row.tokens is not None or not row.fitted


def test_the_table_shows_published_beside_modelled_with_the_errors_sign():
    text = table(lambda tokens, part: 30.0 * tokens, PART)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| 32.8 | 30.0 | -8.5% | fitted |" in lines["1"]
    assert "| 64.1 | 120.0 | +87.2% | fitted |" in lines["5"]
    assert lines["8"].endswith("| 43.5 | | | needs K1 |")
    assert "| +14 | | |" in lines["6"]


def test_written_values_are_read_back_and_nothing_else_changes(tmp_path):
    path = tmp_path / "mi355x.yaml"
    before = (PARTS / "mi355x.yaml").read_text()
    path.write_text(before)
    calibrate.write_values(path, {"visible_ns": 123.456, "hbm_ns": 777.0})
    changed = [
        (a, b) for a, b in zip(before.splitlines(), path.read_text().splitlines(), strict=True)
        if a != b
    ]  # fmt: skip
    assert [b.strip() for _, b in changed] == ["value: 777", "value: 123.5"]
    with pytest.raises(ValueError, match="must hold speed once"):
        calibrate.write_values(path, {"speed": 1.0})


def test_the_documents_table_is_replaced_between_its_marks(tmp_path):
    path = tmp_path / "model.md"
    path.write_text(f"before\n{calibrate.MARKS[0]}\nold\n{calibrate.MARKS[1]}\nafter\n")
    calibrate.write_table(path, "| new |")
    assert path.read_text() == (
        f"before\n{calibrate.MARKS[0]}\n\n| new |\n\n{calibrate.MARKS[1]}\nafter\n"
    )
