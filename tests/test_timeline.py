"""Stamps as tables, pictures and traces, on stamps written by hand."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from m3lab import timeline
from m3lab.interpreter.clock import Hop
from m3lab.placement import Placement
from m3lab.shapes import RankShape


def stamps(offset=0):
    """Two CTAs: one splits and ends down tasks, one walks past; ticks of 10 ns."""
    out = torch.zeros(2, 32, dtype=torch.int64)
    for point, tick in {0: 200, 17: 350, 1: 500, 4: 505, 11: 1200}.items():
        out[0, point] = tick + offset
    for point, tick in {0: 200, 1: 201, 4: 900}.items():
        out[1, point] = tick + offset
    return out


HOPS = [
    Hop("mailbox.py:9 < post_attn.py:3", "output", (0, 0), (1, 1), 2.0, 5.0, 5.4),
    Hop("mailbox.py:9 < post_attn.py:7", "down", (1, 1), (0, 0), 6.0, 9.0, 10.1),
]


def test_a_frame_has_a_row_a_stamp_and_its_column_says_whose_clock_it_is():
    table = timeline.frame([stamps(), stamps(7)], "modelled")
    assert len(table) == 2 * 8
    assert "modelled_us" in table
    assert not any("measured" in c for c in table.columns)
    last = table[(table["rank"] == 0) & (table["point"] == 11)].iloc[0]
    assert (last["cta"], last["stage"], last["modelled_us"]) == (0, "down", 12.0)


def test_measured_clocks_of_several_gpus_each_start_at_their_first_stamp():
    table = timeline.frame([stamps(), stamps(123_456)], "measured")
    for rank in (0, 1):
        mine = table[table["rank"] == rank]["measured_us"]
        assert (mine.min(), mine.max()) == (0.0, 10.0)


def test_a_timeline_must_say_whose_clock_it_is():
    with pytest.raises(ValueError, match="modelled or measured, got 'real'"):
        timeline.frame(stamps(), "real")
    with pytest.raises(ValueError, match="must say modelled or measured"):
        timeline.intervals(pd.DataFrame({"rank": [0], "cta": [0], "time_us": [1.0]}))
    with pytest.raises(ValueError, match="rank 0 has no stamp"):
        timeline.frame(torch.zeros(4, 32, dtype=torch.int64), "modelled")


def test_intervals_of_a_cta_fill_its_time_and_cross_to_no_other():
    spans = timeline.intervals(timeline.frame([stamps(), stamps(7)], "modelled"))
    assert spans.groupby(["rank", "cta"])["modelled_us"].sum().tolist() == pytest.approx(
        [10.0, 7.0, 10.0, 7.0]
    )
    first = spans.iloc[0]
    assert (first["stage"], first["start_modelled_us"], first["end_modelled_us"]) == (
        "select", 2.0, 3.5,
    )  # fmt: skip
    assert (spans["modelled_us"] >= 0).all()


def test_where_time_goes_counts_ctas_with_time_in_a_stage():
    table = timeline.where_time_goes(timeline.frame(stamps(), "modelled"))
    assert table.loc["split", "CTAs"] == 1  # the other CTA walks past in 10 ns
    assert table.loc["down", "longest CTA, modelled us"] == 6.95
    assert table.loc["output", "longest CTA, modelled us"] == 6.99


def test_every_point_of_the_kernel_has_a_stage_and_a_colour():
    pytest.importorskip("flydsl")
    from m3lab.placement import TL_POINTS

    assert set(timeline.POINTS) == set(range(TL_POINTS)) - {16}  # 16 is unused
    assert set(timeline.STAGES) == set(timeline.COLOURS)
    assert len(set(timeline.COLOURS.values())) == len(timeline.STAGES)


def test_a_trace_has_a_process_a_rank_a_track_a_cta_and_flows_for_the_hops(tmp_path):
    table = timeline.frame([stamps(), stamps(7)], "modelled")
    path = timeline.write_trace(tmp_path / "trace.json", table, HOPS)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"rank 0 (modelled time)", "rank 1 (modelled time)", "CTA 0", "CTA 1"} == names
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(timeline.intervals(table))
    assert all(e["cat"] == "modelled" for e in spans)
    begin = [e for e in events if e["ph"] == "s"]
    end = [e for e in events if e["ph"] == "f"]
    assert [(e["pid"], e["tid"], e["ts"]) for e in begin] == [(0, 0, 5.0), (1, 1, 9.0)]
    assert [(e["pid"], e["tid"], e["ts"]) for e in end] == [(1, 1, 5.4), (0, 0, 10.1)]
    assert [e["id"] for e in begin] == [e["id"] for e in end]


def test_a_gantt_says_modelled_or_measured_in_title_axis_and_legend():
    for kind in timeline.KINDS:
        fig = timeline.gantt(timeline.frame([stamps(), stamps(7)], kind), 0, HOPS)
        other = timeline.KINDS[kind == "modelled"]
        words = [fig._suptitle.get_text(), fig.axes[0].get_xlabel()]
        words.append(fig.axes[0].get_legend().get_title().get_text())
        assert all(kind in w and other not in w for w in words)
        assert "its last CTA, 0, spends 7.0 us until down" in words[0]


def test_the_critical_path_is_a_row_a_hand_off():
    table = timeline.critical_path(HOPS)
    assert table["from"].tolist() == ["rank 0 CTA 0", "rank 1 CTA 1"]
    assert table["polled at"].tolist() == ["post_attn.py:3", "post_attn.py:7"]
    assert all("modelled" in c for c in table.columns if "us" in c.split())


def test_what_if_gains_are_against_the_whole_step_largest_first():
    cost = {"output": 3.0, "experts": 9.0}

    def run(clock):
        total = sum(us for stage, us in cost.items() if stage not in clock.free)
        clock.modelled = lambda: SimpleNamespace(step_modelled_us=total)
        return SimpleNamespace(report=SimpleNamespace(counters=SimpleNamespace(by_stage=cost.copy)))

    table = timeline.what_if(SimpleNamespace(run=run))
    assert table["free stage"].tolist() == ["experts", "output"]
    assert table["gain, modelled us"].tolist() == [9.0, 3.0]


def test_the_tasks_of_a_step_lie_where_the_stages_bases_put_them():
    table = timeline.tasks(Placement(RankShape(tp=4), 1, 4))
    where = {stage: set(row[row > 0].index) for stage, row in table.iterrows()}
    assert where["split"] == set(range(8))
    assert where["output"] == where["down"] == set(range(8, 200))
    assert where["router"] == set(range(200, 216))
    assert where["routed up / gate"] == set(range(192))
    assert len(where["shared up / gate"]) == 96
    assert "merge" not in where
    assert table.to_numpy().max() == 1


def test_four_tokens_shared_tasks_come_after_the_routing_and_every_task_is_somewhere():
    place = Placement(RankShape(tp=4), 4, 1)
    table = timeline.tasks(place)
    assert list(table.index)[-3:] == ["routed up / gate", "shared up / gate", "down"]
    assert table.sum(axis=1).to_dict() == {
        "split": 32, "merge": 4, "output": 192, "router": 64,
        "routed up / gate": 768, "shared up / gate": 96, "down": 192,
    }  # fmt: skip
    title = timeline.occupancy(table).get_suptitle()
    assert "the merge stage is on the fewest CTAs, 4 of 256" in title


def test_a_wide_steps_tasks_are_refused():
    with pytest.raises(ValueError, match="narrow form, got a wide step of 8 tokens"):
        timeline.tasks(Placement(RankShape(tp=4), 8, 4))
