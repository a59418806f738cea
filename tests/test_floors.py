"""Byte floors against figures worked out by hand and the published ones."""

import pytest

from m3lab.model.shapes import CacheLayout, RankShape
from m3lab.report.floors import expert_bytes, selected_keys, step_floors

W4 = RankShape(tp=4)


def test_the_floor_of_one_token_is_the_published_52_megabytes():
    floors = step_floors(W4, [2048], npes=4, distinct_experts=4)
    experts = floors["up_gate"].weights + floors["down"].weights
    assert experts == pytest.approx(37.6e6, rel=1e-3)
    assert floors["o_proj"].weights == pytest.approx(12.6e6, rel=2e-3)
    assert floors["router"].weights == pytest.approx(1.6e6, rel=2e-2)
    assert floors["split"].cache == pytest.approx(0.54e6, rel=1e-2)  # with its per-token scales
    streamed = sum(f.weights + f.cache for f in floors.values())
    assert streamed == pytest.approx(52.3e6, rel=2e-3)


def test_an_expert_at_tp_4_has_the_table_sizes_of_the_layout():
    assert expert_bytes(W4) == 4_718_592 + 294_912 + 2_359_296 + 147_456


@pytest.mark.parametrize(
    ("context", "keys"), [(0, 1), (1, 1), (100, 100), (2048, 2048), (2049, 1921), (2176, 2048)]
)
def test_a_row_attends_to_its_context_or_to_fifteen_blocks_and_its_tail(context, keys):
    assert selected_keys(W4, context) == keys


def test_a_static_scale_costs_two_numbers_whatever_the_context():
    per_token = step_floors(W4, [512], 1)["split"].cache
    static = step_floors(W4, [512], 1, CacheLayout(static_scale=True))["split"].cache
    assert per_token - static == 512 * 8 - 8


def test_scores_are_read_only_past_sixteen_blocks():
    short = step_floors(W4, [2048], 1)["select"].inputs
    scored = step_floors(W4, [2049], 1)["select"].inputs
    assert scored - short == 17 * 4
