"""Stage 0, the selection, run as part of the traced kernel: what each CTA attends to and the sparse
page table it publishes, against lists worked out by hand."""

import pytest
import torch
from kernel_steps import edge_rows, four_rows, long_rows, padded, pinned_row, verified_rows

from m3lab.kernels.tuning import Tuning


def blocks_of(step, table, row):
    """Block numbers of a row's published slots, by the block table the kernel was given."""
    n = min(16, -(-max(step.seq_lens[row], 1) // 128))
    pages = table[row, : 8 * n].view(n, 8)
    assert torch.equal(pages - pages[:, :1], torch.arange(8, dtype=torch.int32).expand(n, 8))
    ids = {int(block_id): b for b, block_id in enumerate(step.block_table[row].tolist())}
    stride = step.layout.page_stride
    return [ids[first // stride] for first in pages[:, 0].tolist()]


def selected(run, row):
    step, result = run
    return blocks_of(step, result.ranks[0].table, row)


def context_of(run, row):
    return int(run[1].ranks[0].table[row, 128])


def test_a_context_of_one_key_selects_its_one_block():
    assert selected(four_rows(), 0) == [0]
    assert context_of(four_rows(), 0) == 1


def test_sixteen_blocks_are_all_kept_in_id_order_whatever_their_scores():
    assert selected(four_rows(), 1) == list(range(16))
    assert context_of(four_rows(), 1) == 2048


def test_seventeen_blocks_lose_the_lower_of_two_nans_and_the_tail_is_last():
    """NaN is below -inf, and of two NaNs the higher block id wins."""
    by_score = [15, 14, 13, 12, 11, 10, 8, 7, 6, 5, 2, 1, 0]
    assert selected(four_rows(), 2) == [*by_score, 4, 9, 16]
    assert context_of(four_rows(), 2) == 15 * 128 + 1


def test_512_blocks_rank_by_score_then_by_the_higher_id():
    """+inf outranks the pinned tail; +0 and -0 are equal, so the higher of their ids goes first."""
    assert selected(four_rows(), 3) == [77, 400, 300, 10, 6, 5, *range(510, 501, -1), 511]
    assert context_of(four_rows(), 3) == 16 * 128


def test_513_equal_blocks_keep_the_highest_ids():
    """The eight CTAs' candidates are merged."""
    assert selected(long_rows(), 0) == [*range(511, 496, -1), 512]
    assert context_of(long_rows(), 0) == 15 * 128 + 1


def test_the_highest_of_equal_blocks_are_kept_on_both_sides_of_the_long_selection():
    last = Tuning().rank_up_to - 1
    assert selected(edge_rows(), 0) == [*range(last - 1, last - 16, -1), last]
    assert selected(edge_rows(), 1) == [*range(last, last - 15, -1), last + 1]
    assert context_of(edge_rows(), 0) == 16 * 128
    assert context_of(edge_rows(), 1) == 15 * 128 + 1


def test_a_million_keys_rank_by_score_then_by_the_higher_id():
    """One share holds NaN alone; its candidates lose to every number."""
    assert selected(long_rows(), 1) == [4096, 1024, 1023, 0, 8190, *range(8189, 8179, -1), 8191]
    assert context_of(long_rows(), 1) == 16 * 128


def test_pinned_first_blocks_lead_and_pinned_last_blocks_follow():
    """Blocks 0, 1 at 1e30 and 37..39 at 1e29: higher ids first, the tail (39) last of all."""
    assert selected(pinned_row(), 0) == [1, 0, 38, 37, *range(2, 13), 39]
    assert context_of(pinned_row(), 0) == 15 * 128 + 28


def test_a_padding_row_selects_page_0_and_one_key():
    run = padded(0.0)
    assert run[0].block_table[1].eq(0).all()
    assert run[1].ranks[0].table[1, :8].tolist() == list(range(8))
    assert context_of(run, 1) == 1


def test_rows_of_one_request_see_their_own_contexts():
    """2306 keys, two rows: row 0 sees 2305, one key of block 18, row 1 sees two."""
    assert [context_of(verified_rows(), row) for row in (0, 1)] == [15 * 128 + 1, 15 * 128 + 2]
    assert selected(verified_rows(), 0)[-1] == selected(verified_rows(), 1)[-1] == 18


def test_pages_of_one_allocation_are_sixteen_apart():
    step, result = verified_rows()
    assert step.layout.page_stride == 16
    first = result.ranks[0].table[:, :128:8]
    assert first.remainder(16).eq(0).all()
    assert first.unique().numel() > 1


@pytest.mark.parametrize("run", [four_rows, edge_rows, long_rows, pinned_row, verified_rows])
def test_the_reference_selects_the_same(run):
    step, result = run()
    for row in range(step.tokens):
        want = step.selections[0][row]
        assert selected((step, result), row) == want.blocks.tolist()
        assert context_of((step, result), row) == want.n_ctx
