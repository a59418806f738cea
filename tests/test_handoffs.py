"""Waits and hand-offs of a modelled clock, on polls and stores written by hand, and on a step."""

from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from m3lab.interpreter.memory import BASE
from m3lab.layout.regions import peer_layout, scratch_layout
from m3lab.model.shapes import RankShape
from m3lab.report import handoffs

SHAPE = RankShape(tp=4)
WAVES = 8


def entry(us, cta, wave=0):
    """What the clock keeps of a word: sixteenths of a nanosecond, CTA, wave."""
    return (round(us * 16_000) << 20) | (cta << 4) | wave


def run(stores, polls, ranks=2):
    """A step and its clock. ``stores``: (rank, region, unit, us, CTA of the grid); ``polls``:
    (line, stage, [(place of the wave, word's entry, asked us)])."""
    scratch, peer = scratch_layout(SHAPE), peer_layout(SHAPE, ranks)
    size = 8 << 20
    shadow = torch.zeros(2 * ranks * size // 4, dtype=torch.int64)
    step = SimpleNamespace(
        npes=ranks,
        shape=SHAPE,
        mailboxes=SimpleNamespace(
            scratch=[SimpleNamespace(addr=BASE + 2 * r * size) for r in range(ranks)]
        ),
        peers=SimpleNamespace(addr=lambda r: BASE + (2 * r + 1) * size),
    )
    for rank, name, unit, us, cta in stores:
        peers = name in peer
        region = (peer if peers else scratch)[name]
        at = (2 * rank + peers) * size + region.offset + unit * region.unit_bytes
        shadow[at // 4 : (at + region.unit_bytes) // 4] = entry(us, cta)
    machine = SimpleNamespace(
        line=lambda op: op.line, prepared=SimpleNamespace(stages=["attention", "output", "down"])
    )
    kept = []
    for line, stage, rows in polls:
        places, words, asked = zip(*rows, strict=True)
        op = SimpleNamespace(line=line, stage=machine.prepared.stages.index(stage))
        kept.append(
            (
                machine, op, torch.tensor(places), torch.tensor(words),
                torch.tensor(asked, dtype=torch.float64) * 1000,
            )
        )  # fmt: skip
    clock = SimpleNamespace(
        started=True, polls=kept, shadow=shadow, n_waves=WAVES,
        ranks=torch.arange(ranks).repeat_interleave(4),
    )  # fmt: skip
    return step, clock


@pytest.fixture
def handed():
    """Grid CTAs 0..3 are rank 0's. CTA 0 and 1 store sums, CTA 5 (rank 1's 1) a late one, then all
    of the CTAs' intermediates; CTA 2 asks for the sums early, CTA 3 late, CTA 6 (rank 1's 2) for
    its own."""
    stores = [
        (0, "sp_l", 0, 4.0, 0), (0, "sp_l", 1, 5.0, 1), (0, "sp_l", 2, 4.5, 0),
        (1, "sp_l", 0, 7.0, 5), (0, "mid", 3, 9.0, 2),
    ]  # fmt: skip
    polls = [
        ("mailbox.py:9 < k/attention.py:3 < k/output.py:1 < post_attn.py:5", "output", [
            (2 * WAVES, entry(5.0, 1), 2.0), (2 * WAVES + 3, entry(4.5, 0), 1.5),
            (3 * WAVES, entry(5.0, 1), 6.0), (6 * WAVES, entry(7.0, 5), 2.0),
        ]),
        ("mailbox.py:9 < k/down.py:8 < post_attn.py:6", "down", [
            (3 * WAVES, entry(9.0, 2), 8.0), (6 * WAVES, 0, 8.0),
        ]),
    ]  # fmt: skip
    return run(stores, polls)


def test_a_poll_is_named_after_the_region_whose_word_it_waited_for(handed):
    polls = handoffs.polls(*handed)
    found = polls[["rank", "cta", "hand-off", "asked_modelled_us", "seen_modelled_us"]]
    assert found.to_numpy().tolist() == [
        [0, 2, "split sums", 1.5, 5.0],  # both of its waves: the first asks, the last sees
        [0, 3, "split sums", 6.0, 5.0],
        [1, 2, "split sums", 2.0, 7.0],
        [0, 3, "intermediates", 8.0, 9.0],  # what the host wrote (CTA 6's) is no hand-off
    ]
    assert polls["polled at"].tolist() == ["attention.py:3 < output.py:1"] * 3 + ["down.py:8"]


def test_a_wait_lasts_from_the_asking_until_the_word_is_there(handed):
    found = handoffs.waits(handoffs.polls(*handed))
    rows = found[["rank", "cta", "hand-off", "start_modelled_us", "end_modelled_us"]]
    assert rows.to_numpy().tolist() == [
        [0, 2, "split sums", 1.5, 5.0],
        [0, 3, "intermediates", 8.0, 9.0],  # it asked for the sums when they were there
        [1, 2, "split sums", 2.0, 7.0],
    ]


def test_waits_of_a_cta_do_not_overlap_and_cover_what_the_polls_cover():
    rng = torch.Generator().manual_seed(3)
    rows = []
    for cta in range(3):
        for _ in range(40):
            asked, length = (torch.rand(2, generator=rng) * torch.tensor([50.0, 6.0])).tolist()
            rows.append((0, cta, "x", "output", "a.py:1", asked, asked + length - 1.0))
    columns = ["rank", "cta", "hand-off", "stage", "polled at"]
    polls = pd.DataFrame(rows, columns=[*columns, "asked_modelled_us", "seen_modelled_us"])
    found = handoffs.waits(polls)
    assert (found["end_modelled_us"] > found["start_modelled_us"]).all()
    for cta in range(3):
        grid = [i / 64 for i in range(64 * 60)]
        asked = polls[polls["cta"] == cta][["asked_modelled_us", "seen_modelled_us"]].to_numpy()
        kept = found[found["cta"] == cta][["start_modelled_us", "end_modelled_us"]].to_numpy()
        for t in grid:
            expected = any(a <= t < b for a, b in asked)
            assert sum(a <= t < b for a, b in kept) == expected, (cta, t)


def test_the_skew_of_a_hand_off_is_between_its_writers_last_words(handed):
    step, clock = handed
    table = handoffs.skew(handoffs.polls(step, clock), handoffs.written(step, clock))
    assert list(table.index) == ["split sums", "intermediates"]
    sums = table.loc["split sums"]
    assert (sums["writers"], sums["readers"], sums["of them waiting"]) == (3, 3, 2)
    assert sums["first visible, modelled us"] == 4.5  # CTA 0's second word, not its first
    assert sums["spread, modelled us"] == 2.5
    assert sums["last writer"] == "rank 1 CTA 1"
    assert sums["longest wait, modelled us"] == 5.0
    assert sums["longest slack, modelled us"] == 1.0
    title = handoffs.skew_chart(table).get_suptitle()
    assert "the writers of the split sums are 2.5 us apart, the most of 2 hand-offs" in title
    assert "the longest wait, 5.0 us, is for the split sums" in title
    assert "Modelled" in title


def test_the_waits_are_summed_by_what_was_waited_for(handed):
    table = handoffs.waited_for(handoffs.waits(handoffs.polls(*handed)))
    assert list(table.index) == ["split sums", "intermediates"]
    assert table["CTAs"].tolist() == [2, 1]
    assert table["longest wait, modelled us"].tolist() == [5.0, 1.0]
    assert all("modelled" in c for c in table.columns if c != "CTAs")


def test_a_run_in_which_nothing_is_handed_over_has_empty_tables():
    step, clock = run([], [("mailbox.py:9 < k/output.py:1", "output", [(0, 0, 1.0)])])
    polls = handoffs.polls(step, clock)
    assert polls.empty
    assert handoffs.waits(polls).empty
    assert handoffs.waited_for(handoffs.waits(polls)).empty
    assert handoffs.written(step, clock).empty
    assert handoffs.skew(polls, handoffs.written(step, clock)).empty


def test_a_clock_that_has_timed_no_run_is_refused():
    with pytest.raises(ValueError, match="timed no run yet"):
        handoffs.polls(SimpleNamespace(), SimpleNamespace(started=False))


@pytest.mark.parametrize(
    ("line", "stage", "short"),
    [
        ("k/mailbox.py:75 < k/allreduce.py:5 < k/down.py:23 < k/down.py:9", "down", "down.py:23"),
        ("k/mailbox.py:75 < k/routing.py:47 < k/experts.py:54", "experts",
         "routing.py:47 < experts.py:54"),
        ("k/mailbox.py:75 < k/mailbox.py:9", "router", "mailbox.py:9"),
        ("operation 5 (llvm.load)", "router", "operation 5 (llvm.load)"),
    ],
)  # fmt: skip
def test_a_place_is_the_stages_own_line_past_the_helpers(line, stage, short):
    assert handoffs.place(line, stage) == short


@pytest.mark.slow
def test_a_steps_waits_and_work_fill_its_time_and_its_critical_path_is_of_its_polls():
    pytest.importorskip("flydsl")
    from m3lab import DecodeStep
    from m3lab.clock.clock import Clock
    from m3lab.report import timeline

    step = DecodeStep(SHAPE, 1, context=2048, npes=1, until=None, timeline=True).prepare()
    clock = Clock()
    result = step.run(clock=clock)
    polls = handoffs.polls(step, clock)
    assert set(polls["hand-off"]) <= set(handoffs.WORDS.values())
    waits = handoffs.waits(polls)
    stamped = timeline.frame(result.stamps, "modelled", clock.modelled().cta_modelled_us)
    spans = timeline.intervals(stamped, waits)
    assert (spans["waiting_modelled_us"] <= spans["modelled_us"] + 1e-9).all()
    known = waits["end_modelled_us"] - waits["start_modelled_us"]
    assert spans["waiting_modelled_us"].sum() == pytest.approx(known.sum(), rel=0.001)
    for hop in clock.critical_path():
        mine = waits[(waits["rank"] == hop.reader[0]) & (waits["cta"] == hop.reader[1])]
        during = (mine["start_modelled_us"] < hop.seen_us) & (
            hop.seen_us <= mine["end_modelled_us"] + 1e-6
        )
        assert during.sum() == 1, hop
