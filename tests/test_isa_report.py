"""Figures of assembly: against counts done by hand, by other means, and on a real kernel."""

import importlib
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from m3lab.compile.isa import (
    CLASSES,
    IsaFigures,
    by_stage,
    classify,
    difference,
    figures,
    figures_of,
    mix_table,
    mnemonics,
    peer_table,
    table,
)
from m3lab.compile.trace import build

SMALL = Path(__file__).parent / "small_kernels"

METADATA = """\
	.amdgpu_metadata
---
amdhsa.kernels:
  - .agpr_count:     4
    .group_segment_fixed_size: 2048
    .name:           by_hand
    .private_segment_fixed_size: 16
    .sgpr_count:     30
    .sgpr_spill_count: 5
    .vgpr_count:     64
    .vgpr_spill_count: 3
...

	.end_amdgpu_metadata
"""

BY_HAND = (
    """\
	.text
	s_nop 0 ; not the kernel's: before its label
by_hand:
	.file	1 "" "select"
	.file	2 "router"
	s_load_dwordx2 s[0:1], s[2:3], 0x0
	.loc	1 10 4 prologue_end
	s_waitcnt lgkmcnt(0)
	v_mov_b32_dpp v1, v2 row_shr:1 ; s_barrier in a comment
	;;#ASMSTART
	v_exp_f32_e32 v1, v1
	;;#ASMEND
.LBB0_1:                                ; label s_barrier
	.loc	2 20 4
	buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen
	buffer_load_ubyte v0, v9, s[4:7], 0 offen
	buffer_wbl2 sc1
	v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], v[0:3]
	v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21
	ds_read_b128 v[0:3], v4
	ds_write_b32 v0, v1
	ds_bpermute_b32 v0, v1, v2
	.loc	1 11 4
	v_cvt_pk_fp8_f32 v0, v1, v2
	v_add_f32_e32 v0, v1, v2
	s_barrier
	s_add_u32 s0, s0, 1
	s_cbranch_scc1 .LBB0_1
	global_store_dwordx2 v0, v[0:1], s[2:3] sc0 sc1
	s_sleep 1
	s_endpgm
.Lfunc_end0:
	s_nop 0
"""
    + METADATA
)
HAND_MIX = {
    "mfma": 2,
    "dpp": 1,
    "cross-lane": 1,
    "transcendental": 1,
    "convert": 1,
    "valu": 1,
    "cache control": 1,
    "buffer load": 2,
    "global store": 1,
    "lds read": 1,
    "lds write": 1,
    "scalar load": 1,
    "wait": 1,
    "barrier": 1,
    "branch": 2,
    "control": 1,
    "salu": 1,
}


@pytest.fixture(scope="module")
def three_loads(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SMALL))
        launcher = importlib.import_module("three_loads").launch
        cache = tmp_path_factory.mktemp("cache")
        return build(launcher, (1 << 40, 1 << 41), emit=("asm", "lines", "size"), cache=cache)


def test_a_text_counted_by_hand_gives_the_hand_counts():
    found = figures(BY_HAND)
    assert found.mix == HAND_MIX
    assert found.instructions == 20
    assert (found.vgpr, found.agpr, found.sgpr) == (64, 4, 30)
    assert (found.vgpr_spills, found.sgpr_spills) == (3, 5)
    assert (found.lds_bytes, found.scratch_bytes) == (2048, 16)
    assert found.name == "by_hand"


def test_the_small_kernel_has_the_instructions_its_source_has(three_loads):
    found = figures_of(three_loads)
    assert found.mix["buffer load"] == 3
    assert found.mix["lds write"] == 1
    assert found.mix["lds read"] == 1
    assert found.mix["barrier"] == 1
    assert found.mix["global store"] == 1
    assert "mfma" not in found.mix
    assert found.lds_bytes == 128 * 4
    assert found.problems() == []


def test_counts_agree_with_a_plain_search_of_the_text(three_loads):
    body = three_loads.asm.split("three_loads:\n")[1].split(".Lfunc_end0")[0]
    found = figures_of(three_loads)
    assert found.instructions == len(re.findall(r"^\t[a-z]+_", body, re.MULTILINE))
    assert found.instructions == sum(found.mix.values())
    assert found.mix["wait"] == body.count("s_waitcnt")
    assert found.mix["branch"] == 1  # s_endpgm
    # each instruction takes 4 or 8 bytes
    assert 4 * found.instructions <= found.code_bytes <= 8 * found.instructions


def test_registers_and_lds_agree_with_the_kernel_descriptor(three_loads):
    """The metadata and the .amdhsa_ directives are written by different parts of the compiler."""
    directives = dict(re.findall(r"\.amdhsa_(\w+) (\d+)", three_loads.asm))
    found = figures_of(three_loads)
    assert found.vgpr == int(directives["next_free_vgpr"])
    assert found.lds_bytes == int(directives["group_segment_fixed_size"])
    assert found.scratch_bytes == int(directives["private_segment_fixed_size"])


def test_line_tables_change_no_count(three_loads):
    with_lines, without = (list(mnemonics(t)) for t in (three_loads.lines, three_loads.asm))
    assert with_lines == without


def test_instructions_are_shared_out_to_the_stages(three_loads):
    frame = by_stage(three_loads.lines)
    assert frame["total"].sum() == figures_of(three_loads).instructions
    assert frame.loc["sum", "buffer load"] == 3
    assert frame.loc["kernel", "barrier"] == 1
    assert frame.loc["kernel", "buffer load"] == 0


def test_an_instruction_belongs_to_the_last_position_before_it():
    frame = by_stage(BY_HAND)
    assert frame.loc["(none)", "total"] == 1  # the scalar load before the first .loc
    assert frame.loc["select", "total"] == 3 + 8
    assert frame.loc["router", "total"] == 8
    assert frame.loc["router", "mfma"] == 2


def test_assembly_without_line_tables_is_refused_by_stage(three_loads):
    with pytest.raises(ValueError, match=r"no \.loc lines; build it with emit"):
        by_stage(three_loads.asm)


@pytest.mark.parametrize(
    ("mnemonic", "expected"),
    [
        ("v_mfma_f32_16x16x128_f8f6f4", "mfma"),
        ("v_accvgpr_read_b32", "valu"),
        ("v_add_f32_dpp", "dpp"),
        ("v_permlane32_swap_b32_e32", "cross-lane"),
        ("v_readfirstlane_b32", "cross-lane"),
        ("v_writelane_b32", "cross-lane"),
        ("v_rsq_f32_e32", "transcendental"),
        ("v_cvt_scalef32_pk_f32_fp4", "convert"),
        ("v_cmp_lt_f32_e32", "valu"),
        ("v_dot2_f32_bf16", "valu"),
        ("buffer_inv", "cache control"),
        ("buffer_load_dwordx4", "buffer load"),
        ("buffer_store_short", "buffer store"),
        ("global_load_dwordx2", "global load"),
        ("flat_store_dword", "global store"),
        ("global_atomic_add", "atomic"),
        ("scratch_load_dword", "scratch"),
        ("ds_read2st64_b32", "lds read"),
        ("ds_write_b8", "lds write"),
        ("ds_add_u32", "lds other"),
        ("s_buffer_load_dwordx4", "scalar load"),
        ("s_waitcnt_depctr", "wait"),
        ("s_branch", "branch"),
        ("s_memrealtime", "control"),
        ("s_and_saveexec_b64", "salu"),
        ("unheard_of", "other"),
    ],
)
def test_each_instruction_is_in_its_class(mnemonic, expected):
    assert classify(mnemonic) == expected
    assert expected in CLASSES


def test_spilled_vgprs_scratch_and_too_much_lds_are_problems():
    good = IsaFigures("k", 10, 64, 0, 100, 0, 50, 163_840, 0)
    assert good.problems() == []  # SGPR spills are allowed
    assert "spills 3 VGPRs" in replace(good, vgpr_spills=3).problems()[0]
    assert "16 bytes of scratch" in replace(good, scratch_bytes=16).problems()[0]
    assert "the limit is 163840" in replace(good, lds_bytes=163_841).problems()[0]
    assert len(figures(BY_HAND).problems()) == 2


def test_a_kernel_with_more_values_than_registers_is_flagged(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SMALL))
    launcher = importlib.import_module("too_many_values").launch
    found = figures_of(build(launcher, (0, 0), emit=("asm",), cache=tmp_path))
    assert found.vgpr == 128  # all that 16 waves leave a lane
    assert found.mix["global load"] == found.mix["global store"] == 300
    assert found.vgpr_spills > 100
    assert found.mix["scratch"] == 2 * found.vgpr_spills  # each is written once and read once
    assert found.scratch_bytes >= 4 * found.vgpr_spills
    assert len(found.problems()) == 2


def test_the_table_has_the_peers_columns_and_leaves_unknown_figures_empty():
    frame = table([figures(BY_HAND), figures(BY_HAND, code_bytes=120)], labels=[1, 2])
    row = frame.loc[1]
    assert list(row[["instructions", "VGPR", "SGPR spills", "LDS bytes"]]) == [20, 64, 5, 2048]
    assert list(row[["MFMA", "buffer loads", "LDS reads", "waits", "barriers"]]) == [2, 2, 1, 1, 1]
    assert row["code bytes"] is pd.NA
    assert frame.loc[2, "code bytes"] == 120
    assert set(peer_table().columns) <= set(frame.columns)


def test_the_mix_table_sums_to_the_total():
    frame = mix_table([figures(BY_HAND)])
    assert frame.drop(columns="total").sum(axis=1).tolist() == frame["total"].tolist() == [20]
    assert "atomic" not in frame.columns


def test_a_difference_is_after_minus_before():
    before = figures(BY_HAND, code_bytes=100)
    after = replace(before, vgpr=48, mix={**before.mix, "mfma": 3, "atomic": 1}, code_bytes=None)
    frame = difference(before, after)
    assert frame.loc["VGPR", ["before", "after", "change"]].tolist() == [64, 48, -16]
    assert frame.loc["VGPR", "percent"] == -25
    assert frame.loc["mix: mfma", "change"] == 1
    assert frame.loc["mix: atomic", "change"] == 1
    assert frame.loc["mix: atomic", "percent"] is pd.NA  # from nothing
    assert frame.loc["code bytes", "change"] is pd.NA
    assert frame.loc["barriers", "change"] == 0


def test_the_peers_figures_are_the_specs():
    frame = peer_table()
    assert frame.loc[(1, False), "code bytes"] == 31776
    assert frame.loc[(4, True), "MFMA"] == 148
    assert frame.loc[(16, True), "SGPR spills"] == 344
    assert frame.loc[(2, False), "MFMA"] is pd.NA
    assert len(frame) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no .amdgpu_metadata"),
        (BY_HAND.replace("amdhsa.kernels:", "amdhsa.kernels: []\nx:"), "one kernel; it holds 0"),
    ],
)
def test_text_that_is_no_kernels_assembly_is_refused(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        figures(text)


def test_a_build_without_assembly_is_refused(three_loads):
    with pytest.raises(ValueError, match='build it with emit "asm"'):
        figures_of(replace(three_loads, asm=None))
