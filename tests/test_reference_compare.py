"""Where two results count as the same."""

import math

import pytest
import torch

from m3lab.model.formats import mx_scale_byte
from m3lab.reference.compare import blocks_agree, experts_agree, rel_l2, scale_bytes_agree


def test_rel_l2_is_the_error_over_the_wanted_norm():
    assert rel_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert rel_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert rel_l2(torch.ones(2), torch.zeros(2)) == math.inf
    assert rel_l2(torch.tensor([math.nan]), torch.ones(1)) == math.inf


def test_rel_l2_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"shapes differ: got \(2,\), want \(2, 1\)"):
        rel_l2(torch.ones(2), torch.ones(2, 1))


def test_blocks_may_swap_only_where_their_scores_are_one_rounding_apart():
    scores = torch.tensor([1.0, 1.0 + 2**-22, 0.5, 0.4, math.nan])
    assert blocks_agree([0, 1, 2], [0, 1, 2], scores, [], 0.0)
    assert blocks_agree([0, 1, 2], [1, 0, 2], scores, [], 2**-20)
    assert not blocks_agree([0, 1, 2], [1, 0, 2], scores, [], 2**-24)
    assert not blocks_agree([0, 1, 3], [0, 1, 2], scores, [], 2**-20)  # 0.4 for 0.5
    assert not blocks_agree([0, 0, 2], [0, 1, 2], scores, [], 2**-20)  # twice the same
    assert not blocks_agree([0, 1], [0, 1, 2], scores, [], 2**-20)


def test_a_pinned_block_may_not_swap_at_all():
    scores = torch.tensor([1.0, 1.0, 0.5])
    assert blocks_agree([1, 0], [0, 1], scores, [], 1e-6)
    assert not blocks_agree([1, 0], [0, 1], scores, [1], 1e-6)


def test_experts_may_differ_within_a_logits_bf16_rounding():
    logits = torch.tensor([2.0, 1.0, 1.0 + 2**-7, 0.0])
    scores = logits.sigmoid()
    assert experts_agree([0, 1], [0, 2], scores, logits)
    assert not experts_agree([0, 3], [0, 2], scores, logits)


def test_scale_bytes_may_differ_by_one_only_at_the_edge_of_a_power():
    amax = torch.tensor([448.0, 448.0 * (1 + 2**-9), 600.0])
    want = mx_scale_byte(amax)
    assert want.tolist() == [127, 128, 128]
    assert scale_bytes_agree(want, want, amax)
    assert scale_bytes_agree(torch.tensor([127, 127, 128], dtype=torch.uint8), want, amax)
    assert not scale_bytes_agree(torch.tensor([127, 128, 127], dtype=torch.uint8), want, amax)
    assert not scale_bytes_agree(torch.tensor([127, 126, 128], dtype=torch.uint8), want, amax)
