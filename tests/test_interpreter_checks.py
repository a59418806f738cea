"""Each check of the interpreter fires on a kernel with exactly that fault, and not on its repaired
twin. The kernels are real FlyDSL kernels (``small_kernels/faults.py``)."""

import re

import pytest
import torch

pytest.importorskip("flydsl")

from small_kernels import faults

from m3lab.compile.trace import build
from m3lab.interpreter import (
    Checks,
    Deadlock,
    Launch,
    LdsRace,
    Memory,
    Misaligned,
    NaNMade,
    NonUniform,
    OutOfBounds,
    PartialMask,
    ProgramOrder,
    StaleRead,
    UninitializedRead,
    UnknownOperation,
    run,
)

WORDS = faults.CTAS * faults.THREADS
EXPECTED = {
    "past_the_end": (OutOfBounds, "past the end of b"),
    "misaligned": (Misaligned, "aligned to 4 bytes"),
    "nowhere": (OutOfBounds, "outside all memory"),
    "past_lds": (OutOfBounds, "LDS byte 1024"),
    "unwritten_stored": (UninitializedRead, "a store"),
    "unwritten_bytes": (UninitializedRead, "a store"),
    "unwritten_branch": (UninitializedRead, "a branch"),
    "unwritten_address": (UninitializedRead, "an address"),
    "undefined_stored": (UninitializedRead, "a store"),
    "unwritten_lds": (UninitializedRead, "a store"),
    "inactive_lane": (UninitializedRead, "a store"),
    "partial_barrier": (PartialMask, "barrier"),
    "barrier_under_lanes": (PartialMask, "barrier"),
    "partial_mfma": (PartialMask, "mfma"),
    "lane_wise_descriptor": (NonUniform, "descriptor's base"),
    "race_write_read": (LdsRace, "reads LDS byte"),
    "race_read_write": (LdsRace, "changes LDS byte"),
    "race_write_write": (LdsRace, "changes"),
    "same_value_twice": (LdsRace, "changes"),
    "race_wide": (LdsRace, "reads LDS byte"),
    "stale_load": (StaleRead, "read without device scope"),
    "stale_store": (StaleRead, "stored without device scope"),
    "no_flag": (StaleRead, "no flag in between"),
    "flag_too_early": (StaleRead, "no flag in between"),
    "fences": (StaleRead, "without an acquire"),
    "wave_ahead": (StaleRead, "no flag in between"),
    "relay": (StaleRead, "no flag in between"),
    "later_writer": (ProgramOrder, "later point"),
    "never_written": (Deadlock, "polls b"),
    "unknown": (UnknownOperation, "made.up"),
    "makes_nan": (NaNMade, "NaN"),
}


def run_fault(name, buggy, **options):
    """Build and run a fault's kernel; a holds small words in its first half, b is zeroed."""
    launcher = faults.kernel(f"{name}_{int(buggy)}", faults.FAULTS[name](buggy))
    program = build(launcher, (1 << 20, 1 << 21, 7), emit=("program",)).program
    memory = Memory()
    a = memory.alloc("a", WORDS * 4)
    half = WORDS // 2
    a.write(torch.arange(half, dtype=torch.int32) % 100 + 1)
    if name == "misaligned" or name not in UNWRITTEN:
        a.write(torch.arange(WORDS, dtype=torch.int32) % 100 + 1)
    b = memory.alloc("b", max(WORDS, 1024 if name in HAND_OFFS else 0) * 4, zero=True)
    checks = Checks(nan=True)
    n = half if name in UNWRITTEN else 128 if name == "past_lds" else 7
    report = run([Launch(program, [a.addr, b.addr, n])], memory, checks=checks, **options)
    return b.read(torch.int32, (b.nbytes // 4,)), report


UNWRITTEN = {k for k in EXPECTED if k.startswith("unwritten") and k != "unwritten_lds"}
HAND_OFFS = {
    "stale_load", "stale_store", "no_flag", "flag_too_early", "fences", "wave_ahead", "relay",
}  # fmt: skip


def test_every_fault_has_its_error():
    assert set(EXPECTED) == set(faults.FAULTS)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_fault_is_found_where_it_is(name):
    kind, words = EXPECTED[name]
    with pytest.raises(kind, match=re.escape(words)) as caught:
        run_fault(name, True)
    assert "faults.py:" in str(caught.value)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_the_repaired_twin_passes(name):
    run_fault(name, False)


@pytest.mark.parametrize("name", ["stale_load", "flag_too_early", "later_writer", "never_written"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_hand_off_faults_are_found_in_split_schedules(name, seed):
    kind, _ = EXPECTED[name]
    with pytest.raises(kind):
        run_fault(name, True, seed=seed, cta_groups=4)
    run_fault(name, False, seed=seed, cta_groups=4)


@pytest.mark.parametrize("name", sorted(HAND_OFFS - {"no_flag"}))
def test_a_repaired_hand_off_gives_the_data(name):
    words, _ = run_fault(name, False)
    assert words[512 : 512 + 128].tolist() == [3 * t + 7 for t in range(128)]


def test_an_error_names_line_cta_wave_and_lane():
    with pytest.raises(OutOfBounds) as caught:
        run_fault("past_the_end", True)
    text = str(caught.value)
    assert "rank 0 CTA 3 wave 1 lane 63" in text
    assert re.search(r"faults\.py:\d+", text)


def test_a_deadlock_names_the_pair_and_what_was_wanted():
    with pytest.raises(Deadlock) as caught:
        run_fault("never_written", True)
    assert "polls b+16 (rank 0): found words [0], wants one of [7]" in str(caught.value)


def test_several_waves_may_store_one_value():
    _, report = run_fault("race_write_write", False)
    assert report.same_value_stores == 0  # one store operation: no wave found another's word
    _, report = run_fault("same_value_twice", False)
    assert report.same_value_stores == faults.CTAS * 64


def test_a_delay_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match="names neither a rank"):
        run_fault("race_wide", False, delay={"outptu": 3})
