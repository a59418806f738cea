"""Stamps as tables, pictures and traces, on stamps written by hand."""

import gzip
import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from m3lab.clock.clock import Hop
from m3lab.kernels.plan import Plan
from m3lab.model.shapes import RankShape
from m3lab.report import timeline


def stamps(offset=0):
    """Two CTAs: one splits and ends down tasks, one walks past; ticks of 10 ns."""
    out = torch.zeros(2, 32, dtype=torch.int64)
    for point, tick in {0: 200, 17: 350, 1: 500, 4: 505, 11: 1200}.items():
        out[0, point] = tick + offset
    for point, tick in {0: 200, 1: 201, 4: 900}.items():
        out[1, point] = tick + offset
    return out


HOPS = [
    Hop(
        "mailbox.py:9 < k/o_proj.py:5 < k/o_proj.py:2 < post_attn.py:3",
        "o_proj",
        (0, 0),
        (1, 1),
        2.0,
        5.0,
        5.4,
    ),
    Hop("mailbox.py:9 < k/down.py:4 < post_attn.py:7", "post_attn", (1, 1), (0, 0), 6.0, 9.0, 10.1),
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


def test_a_cta_that_goes_on_after_its_last_stamp_has_its_end_where_the_clock_gives_it():
    ends = torch.tensor([12.9, 11.0, 12.9, 9.9], dtype=torch.float64)  # rank 0's CTAs, rank 1's
    table = timeline.frame([stamps(), stamps()], "modelled", ends)
    more = table[table["stage"] == timeline.UNSTAMPED]
    # the others only write their stamps to memory
    assert more[["rank", "cta", "modelled_us"]].to_numpy().tolist() == [[0, 1, 11.0]]
    assert timeline.intervals(table).iloc[-1 - 6]["meaning"] == "CTA ends"


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
    assert table.loc["o_proj", "longest CTA, modelled us"] == 6.99
    assert table.loc["o_proj", "CTAs"] == 1  # 50 ns are walked past as well


def waits(*rows):
    columns = ["rank", "cta", "hand-off", "start_modelled_us", "end_modelled_us"]
    return pd.DataFrame(rows, columns=columns)


# CTA 0 waits from within select into split, then in down; CTA 1 before, at and past its last stamp
WAITS = waits(
    (0, 0, "keys", 3.0, 4.0), (0, 0, "intermediates", 6.0, 7.5), (0, 1, "rows", 1.0, 2.5),
    (0, 1, "sums", 8.5, 20.0),
)  # fmt: skip


def test_waiting_is_cut_at_the_stamps_and_the_rest_of_a_stage_is_work():
    spans = timeline.intervals(timeline.frame(stamps(), "modelled"), WAITS)
    found = spans.groupby(["cta", "stage"])["waiting_modelled_us"].sum().round(3).to_dict()
    assert found == {
        (0, "select"): 0.5, (0, "split"): 0.5, (0, "o_proj"): 0.0, (0, "down"): 1.5,
        (1, "split"): 0.01, (1, "o_proj"): 0.99,
    }  # fmt: skip
    table = timeline.where_time_goes(timeline.frame(stamps(), "modelled"), WAITS)
    assert table.loc["down", "waiting, median CTA, modelled us"] == 1.5
    assert table.loc["down", "working, median CTA, modelled us"] == 5.45
    assert table.loc["select", "waiting, % of modelled time"] == 33.33


def test_waits_of_a_modelled_clock_say_nothing_about_measured_stamps():
    with pytest.raises(ValueError, match="of one clock, got modelled and measured"):
        timeline.where_time_goes(timeline.frame(stamps(), "measured"), WAITS)
    with pytest.raises(ValueError, match="of one clock, got modelled and measured"):
        timeline.trace(timeline.frame(stamps(), "measured"), [], WAITS)


def test_every_point_of_the_kernel_has_a_stage_and_a_colour():
    pytest.importorskip("flydsl")
    from m3lab.kernels.stages import Point

    assert set(timeline.POINTS) == {int(point) for point in Point}
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
    # a viewer's numbers begin at 1
    assert [(e["pid"], e["tid"], e["ts"]) for e in begin] == [(1, 1, 5.0), (2, 2, 9.0)]
    assert [(e["pid"], e["tid"], e["ts"]) for e in end] == [(2, 2, 5.4), (1, 1, 10.1)]
    assert [e["id"] for e in begin] == [e["id"] for e in end]


def test_a_written_trace_passes_its_own_check_with_a_slice_for_each_piece_of_a_wait(tmp_path):
    table = timeline.frame([stamps(), stamps(7)], "modelled")
    path = timeline.write_trace(tmp_path / "trace.json", table, HOPS, WAITS)
    counts = timeline.check_trace(path)
    plain = len(timeline.intervals(table))
    # on rank 0 two of the four waits cross a stamp
    assert counts == {
        "time": "modelled", "processes": 2, "tracks": 4, "slices": plain + 3 + 3, "flows": 2,
    }  # fmt: skip
    names = [e["name"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert names.count("waiting for the keys") == 2
    measured = timeline.frame([stamps(), stamps(7)], "measured")
    path = timeline.write_trace(tmp_path / "measured.json", measured)
    assert timeline.check_trace(path)["time"] == "measured"


def test_a_flow_whose_store_is_seen_past_the_last_stamp_ends_on_its_track(tmp_path):
    late = [Hop("a.py:1", "down", (0, 0), (0, 1), 8.0, 12.5, 12.6)]
    path = timeline.write_trace(tmp_path / "t.json", timeline.frame(stamps(), "modelled"), late)
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["ts"] for e in events if e["ph"] in "sf"] == [9.0, 9.0]
    assert timeline.check_trace(path)["flows"] == 1


def good_trace():
    """One process, two tracks, a slice that holds another, a flow from the one to the other."""
    track = {"pid": 1, "cat": "modelled"}
    return {
        "traceEvents": [
            {
                "ph": "M",
                "pid": 1,
                "tid": 1,
                "name": "process_name",
                "args": {"name": "0, modelled"},
            },
            {"ph": "X", **track, "tid": 1, "name": "outer", "ts": 1.0, "dur": 4.0},
            {"ph": "X", **track, "tid": 1, "name": "inner", "ts": 2.0, "dur": 3.0},
            {"ph": "X", **track, "tid": 2, "name": "a", "ts": 5.0, "dur": 1.0},
            {"ph": "X", **track, "tid": 2, "name": "b", "ts": 6.0, "dur": 0.0},
            {"ph": "s", **track, "tid": 1, "name": "flow", "ts": 3.0, "id": 7},
            {"ph": "f", **track, "tid": 2, "name": "flow", "ts": 5.5, "id": 7, "bp": "e"},
        ],
        "otherData": {"time": "modelled"},
    }


BROKEN = {
    "a slice without a duration": ((2, "dur", None), "event 2 of phase X needs dur"),
    "a time that is text": ((2, "ts", "2.0"), "needs ts .int or float., got '2.0'"),
    "a negative duration": ((3, "dur", -1.0), "event 3 must have dur of at least 0, got -1.0"),
    "an unknown phase": ((1, "ph", "B"), "must be of phase M, X, s, f, got 'B'"),
    "a track of number 0": ((1, "tid", 0), "event 1 must have tid of at least 1, got 0"),
    "slices that cross": ((2, "dur", 3.5), r"'inner' .2.0..5.500 us. overlaps one that ends"),
    "a flow without its finish": ((6, "id", 8), "flow 7 must have one start and one finish, got s"),
    "a flow with two starts": ((6, "ph", "s"), "one start and one finish, got s s"),
    "a flow back in time": ((5, "ts", 5.8), "flow 7 must not end before it starts, got 5.8 to 5.5"),
    "an end outside all slices": ((6, "ts", 6.5), "flow 7's end at 6.5 us lies in no slice"),
    "a finish bound to what follows": ((6, "bp", None), "event 6 of phase f needs bp"),
    "another clock's slice": ((3, "cat", "measured"), "a modelled trace has an event of category"),
    "a process that does not say": (
        (0, "args", {"name": "rank 0"}), "must have a name that says modelled, got 'rank 0'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN, ids=lambda name: name.replace(" ", "_"))
def test_a_trace_that_a_viewer_would_show_wrong_is_refused_in_a_sentence(tmp_path, case):
    (number, name, value), message = BROKEN[case]
    data = good_trace()
    data["traceEvents"][number][name] = value
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        timeline.check_trace(path)


def test_a_trace_without_a_fault_is_counted(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(good_trace()))
    zipped = tmp_path / "t.json.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert timeline.check_trace(path) == timeline.check_trace(zipped) == {
        "time": "modelled", "processes": 1, "tracks": 2, "slices": 4, "flows": 1,
    }  # fmt: skip
    zipped.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"t.json.gz: not JSON"):
        timeline.check_trace(zipped)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object with a list traceEvents"),
        ('{"traceEvents": []}', "otherData.time must be modelled or measured, got None"),
        ('{"traceEvents": [3]}', "event 0 must be of phase M, X, s, f, got 3"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_sentence(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        timeline.check_trace(path)


def test_a_gantt_that_knows_the_waits_says_what_the_last_cta_waited(tmp_path):
    fig = timeline.gantt(timeline.frame(stamps(), "modelled"), 0, HOPS, WAITS)
    title = fig.get_suptitle()
    assert title.startswith("Rank 0, modelled: launch 2.0 us, then ")
    assert "its last CTA, 0, waits 2.5 us and works longest on down, 5.5" in title
    legend = [text.get_text() for text in fig.axes[0].get_legend().get_texts()]
    assert "pale: waiting" in legend
    assert "critical path,\nanother rank" in legend  # both hops touch rank 1
    without = timeline.gantt(timeline.frame(stamps(), "modelled"))
    words = [text.get_text() for text in without.axes[0].get_legend().get_texts()]
    assert words == ["launch", "select", "split", "o_proj", "down"]


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
    assert table["polled at"].tolist() == ["o_proj.py:5", "down.py:4 < post_attn.py:7"]
    assert all("modelled" in c for c in table.columns if "us" in c.split())


def test_what_if_gains_are_against_the_whole_step_largest_first():
    cost = {"o_proj": 3.0, "down": 9.0}

    def run(clock, checks):
        assert not checks.races  # the checks cost more than the run
        total = sum(us for stage, us in cost.items() if stage not in clock.free)
        clock.modelled = lambda: SimpleNamespace(step_modelled_us=total)
        return SimpleNamespace(report=SimpleNamespace(counters=SimpleNamespace(by_stage=cost.copy)))

    table = timeline.what_if(SimpleNamespace(run=run))
    assert table["free stage"].tolist() == ["down", "o_proj"]
    assert table["gain, modelled us"].tolist() == [9.0, 3.0]
    fig = timeline.what_if_chart(table)
    title = "With the down stage free the modelled step would gain at most 9.0 of 12.0 us"
    assert fig.get_suptitle() == title
    axis = fig.axes[0]
    ends = [bar.get_x() + bar.get_width() for bar in axis.patches]
    assert ends == [3.0, 9.0, 12.0, 12.0]  # left of the step, then its gain on top
    assert "modelled" in axis.get_xlabel()


def test_the_tasks_of_a_step_lie_where_the_stages_bases_put_them():
    table = timeline.tasks(Plan(RankShape(tp=4), 1, 4))
    where = {stage: set(row[row > 0].index) for stage, row in table.iterrows()}
    assert where["split"] == set(range(8))
    assert where["o_proj"] == where["down"] == set(range(8, 200))
    assert where["router"] == set(range(200, 216))
    assert where["routed up_gate"] == set(range(192))
    assert len(where["shared up_gate"]) == 96
    assert "merge" not in where
    assert table.to_numpy().max() == 1


def test_four_tokens_shared_tasks_come_after_the_routing_and_every_task_is_somewhere():
    place = Plan(RankShape(tp=4), 4, 1)
    table = timeline.tasks(place)
    assert list(table.index)[-3:] == ["routed up_gate", "shared up_gate", "down"]
    assert table.sum(axis=1).to_dict() == {
        "split": 32, "merge": 4, "o_proj": 192, "router": 64,
        "routed up_gate": 768, "shared up_gate": 96, "down": 192,
    }  # fmt: skip
    title = timeline.occupancy(table).get_suptitle()
    assert "the merge stage is on the fewest CTAs, 4 of 256" in title


def test_a_wide_steps_tasks_are_refused():
    with pytest.raises(ValueError, match="narrow form, got a wide step of 8 tokens"):
        timeline.tasks(Plan(RankShape(tp=4), 8, 4))
