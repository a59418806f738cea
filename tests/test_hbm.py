"""HBM shared over time against arithmetic, and against a simulation a nanosecond at a time."""

import numpy as np
import pytest

from m3lab.clock.hbm import SLOT_NS, Hbm

ZERO = np.zeros(1, dtype=np.int64)


def serve(hbm, requests):
    """Ends of (rank, start, bytes) requests."""
    rank, start, size = zip(*requests, strict=True)
    return hbm.serve(np.array(rank), np.array(start, dtype=float), np.array(size, dtype=float))


def test_one_cu_takes_no_more_than_it_can():
    assert serve(Hbm(1, 1000.0, 10.0), [(0, 7.0, 5000)])[0] == pytest.approx(7 + 500, abs=1e-6)


def test_equal_requests_share_the_part_and_end_together():
    ends = serve(Hbm(1, 10.0, 10.0), [(0, 0.0, 1000)] * 4)
    assert ends == pytest.approx([400.0] * 4, abs=1e-6)


def test_a_small_request_ends_early_and_leaves_its_share():
    ends = serve(Hbm(1, 10.0, 10.0), [(0, 0.0, 3000), (0, 0.0, 1000)])
    assert ends == pytest.approx([400.0, 200.0], abs=1e-6)


def test_ranks_have_parts_of_their_own():
    ends = serve(Hbm(2, 10.0, 10.0), [(0, 0.0, 1000), (1, 0.0, 1000)])
    assert ends == pytest.approx([100.0, 100.0], abs=1e-6)


def test_what_was_served_before_is_not_free_any_more():
    hbm = Hbm(1, 10.0, 10.0)
    assert serve(hbm, [(0, 100.0, 1000)]) == pytest.approx([200.0])
    assert serve(hbm, [(0, 0.0, 2000)]) == pytest.approx([300.0])


def test_a_request_long_after_the_last_one_finds_its_slot():
    assert serve(Hbm(1, 10.0, 10.0), [(0, 1e6, 100)]) == pytest.approx([1e6 + 10])


@pytest.mark.parametrize("seed", range(6))
def test_served_as_a_simulation_a_nanosecond_at_a_time_would(seed):
    rng = np.random.default_rng(seed)
    n, rate, cu = 12, 100.0, 30.0
    start, size = rng.uniform(0, 800, n), rng.uniform(500, 20_000, n)
    ends = serve(Hbm(1, rate, cu), [(0, s, b) for s, b in zip(start, size, strict=True)])
    left, simulated, now = size.copy(), np.zeros(n), 0.0
    while (left > 0).any():
        active = (left > 0) & (start <= now)
        share = np.where(active, np.minimum(cu, rate / max(active.sum(), 1)), 0.0)
        for _ in range(3):  # what capped ones leave goes to the others
            free = rate - share.sum()
            able = active & (share < cu)
            share = np.where(able, np.minimum(cu, share + free / max(able.sum(), 1)), share)
        done = active & (left <= share)
        simulated[done] = now + left[done] / share[done]
        left = np.maximum(left - share, 0)
        now += 1.0
    assert ends == pytest.approx(simulated, abs=SLOT_NS)
    hbm = Hbm(1, rate, cu)
    serve(hbm, [(0, s, b) for s, b in zip(start, size, strict=True)])
    assert hbm.used.sum() == pytest.approx(size.sum())
    assert hbm.used.max() <= rate * SLOT_NS * (1 + 1e-9)
