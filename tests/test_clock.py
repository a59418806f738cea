"""Modelled time against times told by hand, on kernels made for it (``small_kernels/timed.py``).

``QUIET`` is a part on which nothing costs anything; a test gives a cost to what it is about.
"""

import pytest
import torch

pytest.importorskip("flydsl")

from small_kernels import faults, timed

from m3lab.clock.clock import Clock, LockstepProfile
from m3lab.clock.device_model import CONSTANTS, load_device_model, read_device_model
from m3lab.compile.trace import build
from m3lab.interpreter import Launch, Memory, run
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.step import DecodeStep

PART = load_device_model()
KEPT = (
    "clock_ghz", "cus", "simds", "warm_bytes", "channels", "hbm_gbs", "cu_bytes_per_clk",
    "cu_hbm_gbs", "link_gbs", "mfma_macs_per_clk", "mfma_scaled_macs_per_clk",
    "mfma_fp4_macs_per_clk",
)  # fmt: skip
QUIET = PART.with_values(
    **{name: 0.0 for name in CONSTANTS if name not in KEPT},
    **{name: 1e12 for name in KEPT if name.startswith(("hbm", "cu_", "link", "mfma"))},
)
A_WORDS = 1 << 16
NS = 1e-3  # microseconds


def launch(name, part=PART, ranks=1, a_words=A_WORDS, census=None, clock=None, n=7, **options):
    """Run a body; returns (clock, stamps int64 [rank][CTA, place, wave] in ticks, words of b)."""
    schedule = {k: options.pop(k) for k in ("seed", "cta_groups", "delay") if k in options}
    symbol = "_".join([name, *(str(int(v)) for v in options.values())])
    launcher = faults.kernel(symbol, timed.BODIES[name](**options))
    program = build(launcher, (1 << 20, 1 << 21, 7), emit=("program",)).program
    memory = Memory()
    a = memory.alloc("a", a_words * 4, rank=ranks - 1, zero=True)
    launches, outs = [], []
    for rank in range(ranks):
        outs.append(memory.alloc(f"b{rank}", 4 * (timed.WORDS + 2048), rank=rank, zero=True))
        number = rank if ranks > 1 else n
        launches.append(Launch(program, [a.addr, outs[-1].addr, number], rank))
    clock = clock or Clock(part, census=census)
    run(launches, memory, clock=clock, **schedule)
    stamps = [b.read(torch.int64, (faults.CTAS, 4, 2)) for b in outs]
    return clock, stamps, outs[0].read(torch.int32, (2048,), 4 * timed.WORDS)


def stamp_ns(name, place=0, cta=0, wave=0, part=PART, rank=0, **options):
    """One wave's stamp in ns (to 10 ns)."""
    return float(launch(name, part, **options)[1][rank][cta, place, wave]) * 10


def step_ns(name, part=PART, **options):
    return launch(name, part, **options)[0].modelled().step_modelled_us / NS


# ---------------------------------------------------------------------- waves


def test_a_loads_wait_is_paid_at_first_use_not_at_issue():
    part = QUIET.with_values(hbm_ns=1000, issue_valu_clk=4, instructions_per_op=1)
    steps = 150  # 300 operations of 4 clocks: 500 ns at 2.4 GHz
    late = stamp_ns("load_early", part=part, steps=steps, use_first=False)
    early = stamp_ns("load_early", part=part, steps=steps, use_first=True)
    assert late == pytest.approx(1000, abs=15)
    assert early == pytest.approx(1500, abs=15)


def test_a_loop_that_prefetches_hides_the_latency():
    part = QUIET.with_values(hbm_ns=160, issue_valu_clk=4, instructions_per_op=1)
    one, nine = (stamp_ns("prefetch", part=part, loads=n) for n in (1, 9))
    # a round's work takes 101 operations of 4 clocks, 168 ns: longer than the load it hides
    assert nine - one == pytest.approx(8 * 101 * 4 / 2.4, abs=50)


def test_a_loop_waits_for_what_the_round_before_requested():
    part = QUIET.with_values(hbm_ns=1000, issue_valu_clk=4, instructions_per_op=1)
    one, nine = (stamp_ns("prefetch", part=part, loads=n) for n in (1, 9))
    # two loads are in flight: a round takes half a latency and half its work
    assert nine - one == pytest.approx(8 * (1000 + 101 * 4 / 2.4) / 2, abs=50)


def test_using_an_earlier_load_waits_for_no_later_one():
    part = QUIET.with_values(hbm_ns=1000, issue_valu_clk=4, instructions_per_op=1)
    _, (stamps,), _ = launch("two_loads", part, steps=150)
    assert int(stamps[0, 0, 0]) * 10 == pytest.approx(1000, abs=15)
    assert int(stamps[0, 1, 0]) * 10 == pytest.approx(1500, abs=25)


def test_a_barrier_takes_the_slowest_wave():
    part = QUIET.with_values(issue_valu_clk=4, instructions_per_op=1, barrier_clk=24)
    _, (stamps,), _ = launch("waves_meet", part, steps=300)
    before, after = stamps[0, 0].tolist(), stamps[0, 1].tolist()
    assert before[0] == before[1]
    assert after[0] == after[1]
    assert (after[0] - before[0]) * 10 == pytest.approx(600 * 4 / 2.4 + 10, abs=25)


def test_matrix_instructions_add_up():
    part = QUIET.with_values(mfma_macs_per_clk=512)
    two, ten = (stamp_ns("matrix_chain", part=part, count=n) for n in (2, 10))
    assert ten - two == pytest.approx(8 * 16 / 2.4, abs=10)  # two waves on SIMDs of their own


def test_waves_of_one_simd_share_its_issue():
    part = QUIET.with_values(mfma_macs_per_clk=512, simds=1)
    two, ten = (stamp_ns("matrix_chain", part=part, count=n) for n in (2, 10))
    assert ten - two == pytest.approx(2 * 8 * 16 / 2.4, abs=10)


def test_bank_conflicts_cost_their_cycles():
    free, two_way = (launch("strided", QUIET, n=0, stride=s)[0].state[2].max() for s in (1, 2))
    # 64 lanes over 32 banks take two cycles where they took one: 8 loads of two waves
    assert float(two_way - free) == pytest.approx(8 * 2 * 1 / 2.4, rel=1e-6)


# ---------------------------------------------------------------------- hand-offs


def test_a_poll_ends_when_the_store_is_seen_plus_a_loads_latency():
    part = QUIET.with_values(
        issue_valu_clk=4, instructions_per_op=1, visible_ns=300, device_ns=200, launch_ns=2000
    )
    _, (stamps,), _ = launch("relay", part, ctas=2, steps=300)
    stored, polled = int(stamps[0, 0, 0]) * 10, int(stamps[1, 0, 0]) * 10
    assert stored == pytest.approx(2000 + 600 * 4 / 2.4, abs=40)
    assert polled - stored == pytest.approx(500, abs=25)


def test_a_chain_of_ctas_adds_up():
    part = QUIET.with_values(visible_ns=300, device_ns=200)
    _, (stamps,), _ = launch("relay", part, ctas=4, steps=1)
    times = [int(stamps[k, 0, 0]) * 10 for k in range(4)]
    assert times == [0, 500, 1000, 1500]


def test_a_word_from_another_gpu_comes_a_link_later():
    part = QUIET.with_values(visible_ns=300, device_ns=200, link_ns=700)
    _, stamps, _ = launch("to_a_peer", part, ranks=2)
    assert int(stamps[1][0, 0, 0]) * 10 == 1200


def test_many_pollers_of_one_line_slow_each_other():
    part = QUIET.with_values(poll_service_ns=100)
    together = stamp_ns("many_polls", cta=1, part=part, apart=False)
    apart = stamp_ns("many_polls", cta=1, part=part, apart=True)
    assert together == 600  # three CTAs of two waves in one line's queue
    assert apart == 100


def test_who_spins_waits_for_the_try_in_flight_too():
    part = QUIET.with_values(poll_service_ns=100, visible_ns=1000)
    assert stamp_ns("many_polls", cta=1, part=part, apart=True) == 1000 + 2 * 100


def test_a_poll_returns_after_the_loads_issued_before_it():
    """Vector memory returns in order: weights requested too early hold a hand-off up."""
    part = QUIET.with_values(hbm_ns=5000, device_ns=200)
    behind = stamp_ns("poll_behind_load", cta=1, part=part, load_first=True)
    alone = stamp_ns("poll_behind_load", cta=1, part=part, load_first=False)
    assert (behind, alone) == (5000, 200)


def test_who_spins_holds_back_the_polls_of_the_writer_it_waits_for():
    part = QUIET.with_values(poll_service_ns=100, visible_ns=300, channels=1)
    _, (stamps,), _ = launch("relay", part, ctas=3, steps=1)
    first = 300 + 2 * 200  # two waves spin on CTA 0's word: a try in flight, and the one that finds
    second = first + 300 + 200 + 2 * 200  # CTA 1's poll stood behind the two waves of CTA 2
    assert [int(stamps[k, 0, 0]) * 10 for k in range(3)] == [0, first, second]


def test_polls_at_another_point_of_the_program_share_the_channels():
    part = QUIET.with_values(poll_service_ns=100, visible_ns=1000, channels=1)
    _, (stamps,), _ = launch("polls_apart", part)
    assert int(stamps[1, 0, 0]) * 10 == 1000 + 2 * 200
    assert int(stamps[2, 0, 0]) * 10 == 1000 + 2 * 400  # the later point sees the earlier one's


# ---------------------------------------------------------------------- bandwidth


def test_what_is_requested_before_the_first_wait_delays_it():
    """A SIMD's older wave issues all its requests before the younger one's first."""
    part = QUIET.with_values(hbm_gbs=64)
    half = 4 * 128 * 16 * 4 / 64  # four CTAs' first rows at the part's rate, ns
    _, (alone,), _ = launch("two_streams", part, together=False)
    _, (both,), _ = launch("two_streams", part, together=True)
    assert int(alone[0, 0, 0]) * 10 == pytest.approx(half, abs=10)
    assert int(both[0, 0, 0]) * 10 == pytest.approx(1.5 * half, abs=10)
    for stamps in (alone, both):  # the bytes are the same
        assert int(stamps[0, 1, 0]) * 10 == pytest.approx(2 * half, abs=10)


def test_ctas_at_other_points_of_the_program_share_the_bandwidth_too():
    part = QUIET.with_values(hbm_gbs=64)
    _, (stamps,), _ = launch("streams_apart", part)
    two = 2 * 8 * 128 * 16 / 64
    assert int(stamps[0, 0, 0]) * 10 == pytest.approx(two, abs=10)
    assert int(stamps[2, 0, 0]) * 10 == pytest.approx(2 * two, abs=10)


def test_ctas_that_stream_together_share_the_parts_bandwidth():
    part = QUIET.with_values(hbm_gbs=64)
    one = stamp_ns("stream", part=part, ctas=1, loads=8)
    four = stamp_ns("stream", part=part, ctas=4, loads=8)
    assert one == pytest.approx(8 * 128 * 16 / 64, abs=10)
    assert four == pytest.approx(4 * one, abs=40)  # stamps count 10 ns


def test_a_cu_takes_so_many_bytes_a_clock():
    part = QUIET.with_values(cu_bytes_per_clk=16)
    assert stamp_ns("stream", part=part, ctas=4, loads=8) == pytest.approx(
        8 * 128 * 16 / 16 / 2.4, abs=10
    )


def test_a_small_buffer_is_found_warm():
    part = QUIET.with_values(hbm_ns=1000, warm_ns=100)
    options = {"part": part, "steps": 1, "use_first": True}
    assert stamp_ns("load_early", a_words=A_WORDS, **options) == 1000
    assert stamp_ns("load_early", a_words=1024, **options) == 100


# ---------------------------------------------------------------------- what it must not do


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relay", {"ctas": 4, "steps": 40}),
        ("many_polls", {"apart": False}),
        ("two_streams", {"together": True}),
        ("streams_apart", {}),
        ("polls_apart", {}),
        ("stream", {"ctas": 3, "loads": 4}),
        ("strided", {"stride": 3}),
    ],
)
def test_the_schedule_changes_neither_bits_nor_modelled_time(name, options):
    options["part"] = PART.with_values(hbm_gbs=64)
    lockstep, stamps, words = launch(name, **options)
    again, _, _ = launch(name, **options)
    assert torch.equal(again.state, lockstep.state)
    for seed in range(3):
        schedule = {"seed": seed, "cta_groups": 1 + seed, "delay": {0: 5}}
        other, got, same = launch(name, census=lockstep.census, **schedule, **options)
        assert torch.equal(other.state, lockstep.state)
        assert torch.equal(got[0], stamps[0])
        assert torch.equal(same, words)


def test_a_whole_kernel_of_four_ranks_is_timed_alike_under_every_schedule():
    shape = RankShape(ModelShape(hidden=2048, inter=512, shared_inter=512), tp=4)
    step = DecodeStep(shape, 2, context=[2049, 100], until=None).prepare()
    off = step.run()
    lockstep = Clock(PART)
    on = step.run(clock=lockstep)
    assert on.report.operations == off.report.operations
    for a, b in zip(off.ranks, on.ranks, strict=True):
        assert torch.equal(a["ar_out"], b["ar_out"])
    for seed in (0, 1):
        clock = Clock(PART, census=lockstep.census)
        step.run(clock=clock, seed=seed, cta_groups=2 + seed)
        assert torch.equal(clock.state, lockstep.state)
    readers = {h.reader for h in lockstep.critical_path()}
    assert len({rank for rank, _ in readers}) > 1  # the all-reduces lead across ranks


def test_without_a_clock_the_bits_are_the_same_and_the_clock_reads_zero():
    program = build(
        faults.kernel("load_early_9_0", timed.BODIES["load_early"](9, False)),
        (1 << 20, 1 << 21, 7), emit=("program",),
    ).program  # fmt: skip
    found = []
    for clock in (None, Clock(PART)):
        memory = Memory()
        a = memory.alloc("a", A_WORDS * 4, zero=True)
        b = memory.alloc("b", 4 * (timed.WORDS + 2048), zero=True)
        report = run([Launch(program, [a.addr, b.addr, 7])], memory, clock=clock)
        words = b.read(torch.int32, (2048,), 4 * timed.WORDS)
        found.append((words, report.operations, b.read(torch.int64, (32,))))
    (off, count, zeros), (on, same, ticks) = found
    assert torch.equal(off, on)
    assert count == same
    assert int(zeros.abs().max()) == 0
    assert int(ticks.max()) > 0


def test_a_split_schedule_is_refused_without_a_census():
    with pytest.raises(ValueError, match="needs the census of a lockstep run"):
        launch("relay", ctas=2, steps=1, cta_groups=2, seed=0)


def test_a_clock_times_one_run():
    clock = launch("relay", ctas=2, steps=1)[0]
    with pytest.raises(ValueError, match="times one run"):
        launch("relay", ctas=2, steps=1, clock=clock)
    with pytest.raises(ValueError, match="has timed no run yet"):
        Clock(PART, census=LockstepProfile()).modelled()


# ---------------------------------------------------------------------- what it tells


def test_the_critical_path_is_the_chain_of_hand_offs():
    clock = launch("relay", ctas=4, steps=200)[0]
    hops = clock.critical_path()
    assert [(h.writer[1], h.reader[1]) for h in hops] == [(0, 1), (1, 2), (2, 3)]
    for hop in hops:
        assert hop.seen_us - hop.stored_us == pytest.approx(PART.visible_ns * NS, abs=1e-3)
        assert hop.asked_us < hop.seen_us
        assert "timed.py:" in hop.line


def test_a_free_stage_costs_nothing_but_its_waits():
    plain = launch("relay", ctas=2, steps=300)[0].modelled().step_modelled_us
    free = launch("relay", ctas=2, steps=300, clock=Clock(PART, free={"relay"}))[0]
    work = 600 * 4 * PART.instructions_per_op / 2.4 * NS
    assert free.modelled().step_modelled_us < plain - work
    everything = Clock(PART, free={"relay", "kernel"})
    assert launch("relay", ctas=2, steps=300, clock=everything)[0].modelled().step_modelled_us == (
        PART.launch_ns * NS
    )


# ---------------------------------------------------------------------- parts


def test_every_constant_of_a_part_has_a_unit_and_a_source_that_says_how_far_to_trust_it():
    constants = read_device_model()["constants"]
    assert set(constants) == set(CONSTANTS)
    kinds = ("documented", "derived", "upstream", "assumed", "fitted")
    for name, entry in constants.items():
        assert entry["unit"], name
        assert entry["source"].startswith(kinds), name
    assert sum("prior" in entry for entry in constants.values()) <= 5


def test_an_unknown_part_or_constant_is_refused_by_name():
    with pytest.raises(ValueError, match="no part is named 'mi9'; there are: mi355x"):
        load_device_model("mi9")
    with pytest.raises(ValueError, match="no constant speed"):
        PART.with_values(speed=1.0)
