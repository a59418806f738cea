"""The regions lie where the specification says, at every width, and never overlap."""

import subprocess
import sys
from itertools import pairwise

import pytest

from m3lab.layout import regions as ml
from m3lab.model.shapes import TP_WIDTHS, ModelShape, RankShape

SCRATCH_ORDER = [
    *("iscore", "sparse_table", "sp_o", "sp_m", "sp_l", "attnq", "attnq_s", "a", "xn8", "xsc"),
    *("scores", "mid", "sel", "sel_long"),
    *("xn8p", "xscp", "xndone", "mid8p", "midsp", "ugdone"),
]
# pairs per token at tp 4, from the specification's table
PAIRS_PER_TOKEN = {
    "iscore": 8192,
    "sparse_table": 65,
    "sp_o": 8 * 16 * 64,
    "sp_m": 8 * 16,
    "sp_l": 8 * 16,
    "attnq": 256,
    "attnq_s": 1,
    "a": 3072,
    "xn8": 1536,
    "xsc": 192,
    "scores": 2 * 128 * 8,
    "mid": 5 * 768,
    "sel": 10,
    "sel_long": 8 * 16 * 2,
}
BUFFERS = {
    "scratch": (ml.scratch_layout, ml.scratch_bytes),
    "peer": (lambda s: ml.peer_layout(s, s.tp), lambda s: ml.peer_bytes(s, s.tp)),
}


def test_tp4_totals_are_the_published_ones():
    shape = RankShape()
    assert ml.scratch_bytes(shape) == 3_767_808
    assert ml.peer_bytes(shape, 4) == 3_964_928


def test_scratch_regions_come_in_the_specified_order_and_size():
    layout = ml.scratch_layout(RankShape())
    assert list(layout) == SCRATCH_ORDER
    for name, pairs in PAIRS_PER_TOKEN.items():
        assert layout[name].pairs == 16 * pairs, name


@pytest.mark.parametrize("tp", TP_WIDTHS)
@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("hidden", [2048, 6144])
def test_regions_never_overlap_and_stay_inside(tp, buffer, hidden):
    shape = RankShape(ModelShape(hidden=hidden), tp)
    layout, total = (f(shape) for f in BUFFERS[buffer])
    regions = list(layout.values())
    assert regions[0].offset == 0
    for before, after in pairwise(regions):
        assert before.end <= after.offset < before.end + 256
    assert regions[-1].end <= total < regions[-1].end + 256
    if buffer != "k1":
        assert all(r.offset % 256 == 0 for r in regions)


@pytest.mark.parametrize(("tp", "row_groups"), [(1, 96), (2, 48), (4, 24), (8, 12)])
def test_up_gate_flags_count_every_distinct_expert(tp, row_groups):
    flags = ml.scratch_layout(RankShape(tp=tp))["ugdone"]
    assert flags.shape == (4 * 16 + 1, row_groups)
    with pytest.raises(ValueError, match="not divided by tokens"):
        _ = flags.per_token


def test_a_score_lies_at_copy_16_token_128_expert():
    region = ml.scratch_layout(RankShape())["scores"]
    copy_stride = region.shape[1] * region.per_token
    copy, token, expert = 3, 5, 77
    pair = copy * copy_stride + token * region.per_token + 2 * expert
    assert pair == ((copy * 16 + token) * 128 + expert) * 2


@pytest.mark.parametrize("tp", TP_WIDTHS)
def test_attention_regions_follow_the_ranks_heads(tp):
    layout = ml.scratch_layout(RankShape(tp=tp))
    assert layout["sp_o"].per_token == 8 * (64 // tp) * 64
    assert layout["iscore"].per_token == max(1, 4 // tp) * 8192
    assert layout["attnq"].token_bytes == 64 // tp * 128


def test_a_tag_is_never_zero_and_never_shared():
    tags = [ml.tag(step, layer) for step in range(3) for layer in range(128)]
    assert min(tags) == 1
    assert len(set(tags)) == len(tags)
    assert ml.tag(ml.MAX_STEP, 127) < 2**31


@pytest.mark.parametrize(("step", "layer"), [(0, 128), (0, -1), (-1, 0), ((1 << 24) - 1, 0)])
def test_a_tag_out_of_range_is_refused(step, layer):
    with pytest.raises(ValueError, match=r"must be in 0\.\."):
        ml.tag(step, layer)


def test_a_peer_group_of_three_is_refused():
    with pytest.raises(ValueError, match="got 3"):
        ml.peer_layout(RankShape(), 3)


def test_the_layout_needs_no_torch():
    code = "import sys, m3lab.layout.regions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
