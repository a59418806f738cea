"""The fit against models whose answer is known, and the table it prints."""

import math

import pytest

pytest.importorskip("flydsl")

from m3lab.clock.device_model import DEVICES, load_device_model, read_device_model
from m3lab.report import calibrate
from m3lab.report.calibrate import ROWS, Row, fit, table

PART = load_device_model()
PRIORS = {n: float(c["prior"]) for n, c in read_device_model()["constants"].items() if "prior" in c}


def toy(tokens, tuning, part):
    """A step of hops and work: linear in its constants, as a critical path is."""
    hops = 6 * part.visible_ns + 2 * part.link_ns + 4 * part.hbm_ns
    return (hops + 9000 * tokens * part.instructions_per_op) / 1000


def rows(one, four):
    return [Row("1", "", one, 1, tolerance=0.05), Row("5", "", four, 4, tolerance=0.05)]


def test_figures_that_the_priors_give_leave_the_constants_where_they_are():
    priors = PART.with_values(**PRIORS)
    values = fit(toy, PART, PRIORS, rows(toy(1, None, priors), toy(4, None, priors)))
    assert values == pytest.approx(PRIORS)


def test_the_fit_brings_the_rows_near_by_moving_what_matters():
    priors = PART.with_values(**PRIORS)
    wanted = toy(1, None, priors) * 1.1, toy(4, None, priors) * 1.3
    values = fit(toy, PART, PRIORS, rows(*wanted))
    fitted = PART.with_values(**values)
    assert toy(1, None, fitted) == pytest.approx(wanted[0], rel=0.04)
    assert toy(4, None, fitted) == pytest.approx(wanted[1], rel=0.05)
    assert values["instructions_per_op"] > 1.15 * PRIORS["instructions_per_op"]
    assert values["poll_service_ns"] == pytest.approx(PRIORS["poll_service_ns"])  # not in it


def test_a_row_far_out_of_reach_does_not_drag_a_constant_beyond_belief():
    values = fit(toy, PART, PRIORS, rows(1000.0, 4000.0))
    for name, value in values.items():
        assert abs(math.log(value / PRIORS[name])) <= 1.5 + 1e-9


def test_at_most_five_constants_are_fitted_and_each_says_so():
    constants = read_device_model()["constants"]
    fitted = {n for n, c in constants.items() if c["source"].startswith("fitted")}
    assert fitted == set(PRIORS) == set(calibrate.SPREAD)
    assert len(fitted) <= 5


def test_a_loosely_fitted_row_gives_way_to_a_tight_one():
    priors = PART.with_values(**PRIORS)
    apart = [
        Row("1", "", toy(1, None, priors) * 1.2, 1, tolerance=0.01),
        Row("2", "", toy(1, None, priors) * 0.8, 1, tolerance=0.3),
    ]
    fitted = PART.with_values(**fit(toy, PART, PRIORS, apart))
    assert toy(1, None, fitted) == pytest.approx(apart[0].published_us, rel=0.03)


def test_a_row_is_shown_or_says_what_it_needs():
    for row in ROWS:
        assert bool(row.tokens) != bool(row.needs), row.number
        assert row.tokens or not row.tolerance


def test_the_table_shows_published_beside_modelled_with_the_errors_sign():
    def model(tokens, tuning, part):
        return 30.0 * tokens - 2.0 * (tuning.score_copies == 1) - 1.0 * tuning.early_down_weights

    text = table(model, PART)
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    assert "| 32.8 | 30.0 | -8.5% | fitted to 3% |" in lines["1"]
    assert "| 64.1 | 120.0 | +87.2% | fitted to 3% |" in lines["5"]
    assert "| +1.5 | -1.00 | -2.50 us | sign wrong |" in lines["2"]
    assert "| -1.4 | +2.00 | +3.40 us | sign wrong |" in lines["3"]
    assert "| +0.4 | +0.00 | -0.40 us | no change |" in lines["4"]
    assert lines["8"].endswith("| 43.5 | | | needs K1 |")


def test_written_values_are_read_back_and_nothing_else_changes(tmp_path):
    path = tmp_path / "mi355x.yaml"
    before = (DEVICES / "mi355x.yaml").read_text()
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
