"""The stage records: complete, in order, and all that a new stage needs."""

from itertools import chain

import pytest

from m3lab.kernels import stages
from m3lab.kernels.floors import Floor, StepBytes
from m3lab.kernels.plan import Plan
from m3lab.kernels.stages import O_PROJ, POST_ATTN, Point, Stage, undeclared
from m3lab.layout.regions import peer_layout, scratch_layout
from m3lab.model.shapes import CacheLayout, RankShape

W4 = RankShape(tp=4)
STEP = StepBytes(W4, (2048, 300), npes=4, layout=CacheLayout(), distinct=8)


def test_every_point_but_the_first_is_stamped_by_one_stage():
    points = list(chain.from_iterable(stage.points for stage in POST_ATTN))
    assert sorted(points) == sorted(set(Point) - {Point.BEGIN})


@pytest.mark.parametrize("stage", POST_ATTN, ids=lambda stage: stage.name)
def test_a_stages_floor_carries_its_name_and_moves_something(stage):
    assert stage.floor(STEP).stage == stage.name
    assert stage.floor(STEP).total > 0


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_every_task_is_on_a_cta(tokens):
    plan = Plan(W4, tokens)
    found = {t.name: sum(t.per_cta(plan)) for stage in POST_ATTN for t in stage.tasks}
    assert found == {
        "split": 8 * tokens, "merge": tokens if tokens > 1 else 0, "o_proj": 192,
        "router": 16 * tokens, "routed up_gate": 4 * 48 * tokens, "shared up_gate": 96,
        "down": 192,
    }  # fmt: skip


def test_what_is_handed_over_is_a_region_that_somebody_writes():
    regions = {*scratch_layout(W4), *peer_layout(W4, 4)}
    outside = {"iscore"}  # a scorer writes it before the launch
    for stage in POST_ATTN:
        assert set(stage.hand_offs) <= regions
        assert set(stage.hand_offs) - outside <= {*stage.writes}


def test_a_mailbox_is_read_by_no_stage_before_one_that_writes_it():
    regions = {*scratch_layout(W4), *peer_layout(W4, 4)} - {"iscore"}
    written = set()
    for stage in POST_ATTN:
        written |= {*stage.writes}
        assert regions & {*stage.reads} <= written, stage.name


def test_a_touch_that_nobody_declared_is_a_sentence():
    seen = {"split": {"read": {"q", "w2"}, "write": {"sp_o"}}, "toy": {"write": {"tl"}}}
    assert undeclared(seen) == [
        "split reads w2, which it does not declare",
        "toy writes tl, which it does not declare",
    ]


def toy_floor(step: StepBytes) -> Floor:
    return Floor("toy", 0, 0, 0, 4)


TOY = Stage(
    name="toy",
    entry="small_kernels.toy_stage:toy",
    writes=("ar_out",),
    floor=toy_floor,
    verdicts=(),
    ends_builds=True,
)


def test_a_new_stage_is_its_module_and_its_record(monkeypatch):
    """No other file changes: the build runs it, marks it and may stop after it."""
    pytest.importorskip("flydsl")
    from test_kernel_build import kernel

    from m3lab.compile.trace import build
    from m3lab.kernels.post_attn import trace_args

    at = POST_ATTN.index(O_PROJ) + 1
    monkeypatch.setattr(stages, "POST_ATTN", (*POST_ATTN[:at], TOY, *POST_ATTN[at:]))
    program = build(kernel(until="toy"), trace_args(), emit=("program",)).program
    assert {"o_proj", "toy"} <= set(program.loc_stages)
    assert "router" not in program.loc_stages
    before = build(kernel(until="o_proj"), trace_args(), emit=("program",)).program
    assert "toy" not in before.loc_stages
