"""Every schedule knob: the default build is untouched, a turned knob is another kernel with the
same results, what is not built is refused."""

import re
from functools import lru_cache

import pytest

from m3lab.kernels.plan import Plan
from m3lab.kernels.tuning import Tuning
from m3lab.model.shapes import ModelShape, RankShape

SMALL = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), tp=4)
MODEL = SMALL.model
# knob, another value, tokens of the step that shows it
KNOBS = [
    ("score_copies", 1, 1),
    ("score_copies", 2, 2),
    ("early_down_weights", True, 1),
    ("poll_all", True, 1),
    ("router_by_token", True, 4),
    ("merge_in_output", True, 4),
    ("spin_whole_row", True, 4),
    ("serial_rank", True, 2),
    ("rank_up_to", 512, 1),
    ("shared_after_routing", False, 1),
    ("shared_after_routing", False, 4),
    ("rows_before_routing", True, 1),
    ("rows_before_routing", True, 4),
    ("ug_by_token", False, 4),
    ("ug_by_token", True, 2),
    ("pad_rows", False, 4),
    ("down_in_flight", 1, 2),
]
CONTEXTS = (8192, 100, 2049, 1)


# --- values ---


def test_the_defaults_are_no_change_and_have_no_number():
    assert Tuning().changes() == {}
    assert Tuning().number == 0
    assert Tuning(poll_all=True).changes() == {"poll_all": True}


def test_every_setting_has_a_number_of_its_own():
    settings = [Tuning(**{name: value}) for name, value, _ in KNOBS]
    assert len({t.number for t in settings}) == len(set(settings))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"score_copies": 3}, "score_copies must be one of 1, 2, 4, 8, got 3"),
        ({"score_copies": True}, "score_copies must be one of 1, 2, 4, 8, got True"),
        ({"poll_all": 1}, "poll_all must be one of False, True, got 1"),
        ({"poll_all": None}, "poll_all must be one of False, True, got None"),
        ({"ug_by_token": 1}, "ug_by_token must be one of False, True or None, got 1"),
        ({"down_in_flight": 3}, "down_in_flight must be one of 1, 2 or None, got 3"),
        ({"grouped_from": 6}, r"grouped_from must be one of 1, .*5, got 6"),
        ({"two_shot_from": 4}, r"two_shot_from must be one of 5, .*17, got 4"),
    ],
)
def test_a_value_that_no_build_has_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Tuning(**change)


# --- placement ---


@pytest.mark.parametrize(
    ("tp", "tokens", "change", "sentence"),
    [
        (4, 3, {"ug_by_token": True}, "ug_by_token needs CTAs that the tokens divide, got 256"),
        (2, 2, {"down_in_flight": 2}, "down_in_flight must be 1 where .* got 2 with 12 chunks"),
        (2, 1, {"early_down_weights": True}, "early_down_weights must be off .* got 12 chunks"),
    ],
)
def test_a_combination_that_cannot_be_is_refused(tp, tokens, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Plan(RankShape(tp=tp), tokens, npes=tp, tuning=Tuning(**change))


def test_merged_in_the_output_tasks_no_cta_is_kept_for_merges():
    place = Plan(RankShape(), 4, tuning=Tuning(merge_in_output=True))
    assert place.merge_tasks == 0
    assert place.bases["o_proj"] == 32


def test_round_robin_deals_every_routed_task_once():
    place = Plan(RankShape(), 4, tuning=Tuning(ug_by_token=False))
    assert place.ug_ctas_per_token is None
    assert [place.ug_tasks_of(cta) for cta in range(256)] == [3] * 256


def test_without_padding_the_sixteen_rows_of_an_operand_share_a_bank():
    place = Plan(RankShape(), 4, tuning=Tuning(pad_rows=False))
    for pitch in (place.xn8_row, place.mid_row, place.o_row):
        assert len({row * pitch % 64 for row in range(16)}) == 1


def test_thresholds_are_where_the_tuning_says():
    wide = [s for s in range(1, 17) if Plan(SMALL, s, tuning=Tuning(grouped_from=3)).grouped]
    assert wide == list(range(3, 17))
    owner = Tuning(two_shot_from=9)
    assert next(s for s in range(1, 17) if Plan(SMALL, s, tuning=owner).two_shot) == 9
    assert not Plan(SMALL, 16, tuning=Tuning(two_shot_from=17)).two_shot


# --- kernels ---


@lru_cache
def assembly(tokens, until=None, tuning=None):
    pytest.importorskip("flydsl")
    from m3lab.compile.trace import build
    from m3lab.kernels.post_attn import build_post_attn_kernel, trace_args

    given = {} if tuning is None else {"tuning": tuning}
    launcher = build_post_attn_kernel(
        4, MODEL.sm_scale, MODEL.rms_eps, 2.0, 1.0, 7.0, 0, 1, tokens,
        shape=SMALL, until=until, **given,
    )  # fmt: skip
    return build(launcher, trace_args(tokens), emit=("asm",)).asm


def without_symbol(asm):
    return re.sub(r"_ZN6flydsl\w+", "kernel", asm)


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_default_tuning_is_the_build_without_one(tokens):
    assert assembly(tokens, tuning=Tuning()) == assembly(tokens)


@pytest.mark.parametrize(("name", "value", "tokens"), KNOBS)
def test_a_turned_knob_is_another_kernel_under_another_name(name, value, tokens):
    tuning = Tuning(**{name: value})
    turned, default = assembly(tokens, tuning=tuning), assembly(tokens)
    assert f"_tu{tuning.number}_" in turned
    assert "_tu" not in default
    assert without_symbol(turned) != without_symbol(default)


@pytest.mark.parametrize(
    ("change", "tokens"), [({"two_shot_from": 9}, 9), ({"grouped_from": 4}, 4)]
)
def test_a_threshold_moves_the_form_of_the_output_projection(change, tokens):
    turned = assembly(tokens, "o_proj", Tuning(**change))
    assert without_symbol(turned) != without_symbol(assembly(tokens, "o_proj"))


def test_the_wide_experts_are_refused_wherever_they_begin():
    with pytest.raises(ValueError, match=r"experts of 2 tokens.*build at most 1"):
        assembly(2, tuning=Tuning(grouped_from=2))


# --- results ---


def run(tokens, npes=4, until=None, timeline=False, clock=None, **change):
    pytest.importorskip("flydsl")
    from m3lab.interpreter import Memory
    from m3lab.step import DecodeStep

    step = DecodeStep(
        SMALL,
        tokens,
        npes=npes,
        context=[CONTEXTS[i % 4] for i in range(tokens)],
        until=until,
        memory=Memory(poison=True),
        timeline=timeline,
        tuning=Tuning(**change),
    )
    step.prepare()
    return step, step.run(clock=clock)


default = lru_cache(run)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value", "tokens"), KNOBS)
def test_a_turned_knob_alone_changes_no_bit(name, value, tokens):
    npes = 4 if name in ("early_down_weights", "poll_all") else 1
    assert_same(tokens, npes, **{name: value})


def assert_same(tokens, npes, **change):
    """All checks of the run and all verdicts hold, and every published bit is the default's."""
    from m3lab.verify.verdicts import unequal_bits

    step, result = run(tokens, npes, **change)
    assert [v for v in step.verify(result) if not v.passed] == []
    _, expected = default(tokens, npes)
    for got, want in zip(result.ranks, expected.ranks, strict=True):
        assert got.missing == []
        for view in got.tensors():
            # only so many copies of the scores are published
            like = want[view][: len(got[view])] if view in ("keys", "sigmoids") else want[view]
            assert unequal_bits(got[view], like) == 0, view


@pytest.mark.parametrize(("tokens", "npes"), [(1, 4), (4, 1)])
def test_all_knobs_turned_at_once_change_no_bit(tokens, npes):
    every = {name: value for name, value, _ in KNOBS}
    assert_same(tokens, npes, **(every | {"score_copies": 1, "ug_by_token": False}))


def test_an_earlier_owner_reduce_changes_no_bit():
    from m3lab.verify.verdicts import unequal_bits

    step, result = run(5, 4, "o_proj", two_shot_from=5)
    _, expected = default(5, 4, "o_proj")
    for rank, want in enumerate(expected.ranks):
        gathered, current = step.peers.view(
            rank, "a_ag", step=result.step, layer=step.layer, tokens=5
        )
        assert current.all()
        assert unequal_bits(gathered.float().reshape(5, -1), want.a) == 0
        # the owner alone has the sum: h_mid is the router's then
        assert want.h_mid is not None
        assert result.ranks[rank].h_mid is None


def stamped(tokens, until, **change):
    """{point: CTAs that passed it} of a solo launch with a modelled clock."""
    pytest.importorskip("flydsl")
    from m3lab.clock.clock import Clock

    _, result = run(tokens, 1, until, timeline=True, clock=Clock(), **change)
    ticks = result.stamps[0]
    return {p: set((ticks[:, p] != 0).nonzero()[:, 0].tolist()) for p in range(32)}


def test_only_as_many_copies_of_the_scores_are_published():
    step, result = run(2, 1, "router", score_copies=2)
    scratch = step.mailboxes.scratch[0]
    _, current = scratch.view("scores", step=result.step, layer=step.layer, tokens=2)
    assert current[:2].all()
    assert not current[2:].any()


def test_router_tasks_one_token_after_another_are_on_sixteen_ctas():
    place = Plan(SMALL, 4, npes=1)
    row_in = stamped(4, "router", router_by_token=True)[22]
    assert row_in == {place.bases["router"] + i for i in range(16)}


def test_merged_in_the_output_tasks_every_one_of_them_waits_for_the_partitions():
    place = Plan(SMALL, 2, npes=1)
    partitions_in = stamped(2, "o_proj", merge_in_output=True)[3]
    assert partitions_in == {16 + i for i in range(place.o_tasks)}


def test_something_else_than_a_tuning_is_refused():
    from m3lab.step import DecodeStep

    with pytest.raises(ValueError, match="tuning must be a Tuning, got dict"):
        DecodeStep(tuning={"poll_all": True})
