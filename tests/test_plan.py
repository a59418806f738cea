"""Where tasks run and how LDS is cut, against brute force and the published figures."""

import pytest

from m3lab.kernels.plan import LDS_BYTES, Plan
from m3lab.model.shapes import MAX_TOKENS, ModelShape, RankShape

SHAPE = RankShape()
SMALL = RankShape(ModelShape(hidden=2048))
ALL_TOKENS = range(1, MAX_TOKENS + 1)


@pytest.mark.parametrize(
    ("tokens", "router", "shared"), [(1, 200, 216), (2, 210, 160), (3, 219, 160), (4, 228, 132)]
)
def test_bases_of_the_w4_rank_are_the_published_ones(tokens, router, shared):
    bases = Plan(SHAPE, tokens).bases
    assert bases["router"] == router
    assert bases["shared"] == shared
    assert bases["split"] == bases["up_gate"] == 0
    assert bases["down"] == 8 * tokens


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_split_merge_and_output_tasks_do_not_share_a_cta_while_there_is_room(tokens):
    place = Plan(SHAPE, tokens)
    split = place.ctas_of("split", place.split_tasks)
    merge = place.ctas_of("merge", place.merge_tasks)
    out = place.ctas_of("o_proj", place.o_tasks)
    assert len(split) == 8 * tokens
    assert len(merge) == (0 if tokens == 1 else tokens)
    assert not split & merge
    if len(split) + len(merge) + len(out) <= place.blocks:
        assert not out & (split | merge)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 16])
def test_every_routed_up_gate_task_has_exactly_one_cta(tokens):
    place = Plan(SHAPE, tokens)
    total = sum(place.ug_tasks_of(cta) for cta in range(place.blocks))
    assert total == 4 * 48 * tokens
    assert place.ug_rounds == max(place.ug_tasks_of(cta) for cta in range(place.blocks))


def test_tokens_get_equal_shares_of_the_ctas_only_where_they_divide_them():
    assert [Plan(SHAPE, s).ug_ctas_per_token for s in (1, 2, 3, 4, 5, 8)] == [
        None, None, None, 64, None, 32,
    ]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_no_window_of_shared_tasks_is_cheaper(tokens):
    """The rule of the specification, window by window."""
    place = Plan(SHAPE, tokens)
    g = place.blocks
    routed = [0] * g
    for task in range(4 * 48 * tokens):
        if tokens == 4:
            cta = task // 192 * 64 + task % 192 % 64
        else:
            cta = task % g
        routed[cta] += 1
    router = {(place.bases["router"] + t) % g for t in range(16 * tokens)}
    down = set(range(8 * tokens, 8 * tokens + 192))

    def cost(base):
        window = {(base + i) % g for i in range(96)}
        peak = max(routed[c] for c in window)
        busy = len(window & router)
        return (peak, busy if peak == max(routed) else 0, len(window & down), busy)

    best = min(range(g), key=cost)  # min keeps the first: the lowest base at a tie
    assert place.bases["shared"] == best


def test_wide_form_from_five_tokens_and_owner_reduce_from_twelve_with_peers():
    assert [s for s in ALL_TOKENS if Plan(SHAPE, s).grouped] == list(range(5, 17))
    assert [s for s in ALL_TOKENS if Plan(SHAPE, s).two_shot] == list(range(12, 17))
    assert not Plan(SHAPE, 16, npes=1).two_shot


@pytest.mark.parametrize("shape", [SHAPE, SMALL])
def test_sixteen_rows_of_an_operand_start_in_distinct_banks(shape):
    place = Plan(shape, 1)
    for pitch in (place.xn8_row, place.xsc_row, place.mid_row, place.midsc_row, place.o_row):
        assert len({row * pitch % 64 for row in range(16)}) == 16, pitch


@pytest.mark.parametrize("shape", [SHAPE, SMALL])
@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_lds_of_every_build_fits_a_compute_unit(shape, tokens):
    place = Plan(shape, tokens)
    assert 0 < sum(4 * n for n in place.lds_words.values()) <= place.lds_bytes <= LDS_BYTES


@pytest.mark.parametrize("tokens", ALL_TOKENS)
def test_pool_holds_each_stage_that_takes_its_turn(tokens):
    for shape in (SHAPE, SMALL):
        place = Plan(shape, tokens)
        rows = tokens * (shape.o_k // 4 + 4)
        if place.grouped:
            normed = tokens * (shape.hidden // 4 + 4 + shape.hidden // 32 + 4 + 128)
            intermediates = (5 * tokens + 1) * (shape.inter // 4 + 4 + shape.inter // 32 + 4)
            need = [rows, 8 * shape.o_k, normed + 8 * 64 * 4, intermediates]
        else:
            intermediates, chunks = 5 * shape.inter, shape.inter // 128
            scales = 5 * 4 * {1: 1, 2: 2, 3: 4}.get(chunks, -(-chunks // 4) * 4)
            normed = shape.hidden // 4 + 4 + 8 * 4 * {16: 2, 48: 8}[shape.hidden // 128] + 4
            row = max(shape.hidden // 2, normed, intermediates // 2 + intermediates // 4 + scales)
            need = [rows, tokens * row]
        assert place.pool_words == max(need)


@pytest.mark.parametrize(("tokens", "enough"), [(1, 200), (4, 224), (8, 64), (16, 128)])
def test_too_few_ctas_are_refused_with_both_numbers(tokens, enough):
    assert Plan(SHAPE, tokens, blocks=enough).blocks == enough
    with pytest.raises(ValueError, match=f"at least {enough} CTAs, got {enough - 1}"):
        Plan(SHAPE, tokens, blocks=enough - 1)


@pytest.mark.parametrize("tokens", [0, 17])
def test_token_counts_out_of_range_are_refused(tokens):
    with pytest.raises(ValueError, match=rf"1\.\.16, got {tokens}"):
        Plan(SHAPE, tokens)


def test_peers_must_be_the_tp_width_or_one():
    with pytest.raises(ValueError, match="TP width 4, got 2"):
        Plan(SHAPE, 1, npes=2)


def test_a_rank_of_the_whole_model_is_refused_until_it_is_built():
    with pytest.raises(ValueError, match=r"not built yet.*TP width 1"):
        Plan(RankShape(tp=1), 1, npes=1)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_down_tasks_have_a_cta_each_and_do_not_wrap(tp, tokens):
    place = Plan(RankShape(tp=tp), tokens, npes=tp)
    assert 0 <= place.bases["down"] <= place.blocks - place.down_tasks
    assert place.lds_bytes <= LDS_BYTES


def test_on_two_ranks_the_splits_partials_take_their_turn_in_the_pool():
    place = Plan(RankShape(tp=2), 4, npes=2)
    assert place.pool_words >= place.partial_words
    assert place.partials_words == 2 * 2 * 512 * 4
    assert not Plan(RankShape(tp=4), 4).split_in_pool


def test_a_shape_whose_lds_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=f"more than the {LDS_BYTES} of a compute unit"):
        Plan(RankShape(ModelShape(hidden=16384)), 4, blocks=1024)
