"""Building K4: what is refused, what a kernel is called, what the machine code may not hold."""

import inspect
import re

import pytest

from m3lab.compile.isa import figures, peer_table, table
from m3lab.compile.trace import build
from m3lab.kernels.arguments import ARG_NAMES, INT32_ARGS
from m3lab.kernels.plan import LDS_BYTES
from m3lab.kernels.post_attn import build_post_attn_kernel, kernel_symbol, trace_args
from m3lab.model.shapes import CacheLayout, IndexHeads, ModelShape, RankShape

MODEL = ModelShape()
SPEC = {
    "npes": 4,
    "sm_scale": MODEL.sm_scale,
    "eps": MODEL.rms_eps,
    "route_scale": 2.0,
    "shared_weight": 1.0,
    "swiglu_limit": 7.0,
    "init_blocks": 0,
    "local_blocks": 1,
    "until": "o_proj",
}


def kernel(**changes):
    return build_post_attn_kernel(**(SPEC | changes))


def assembly(tokens=1, **changes):
    return build(kernel(tokens=tokens, **changes), trace_args(tokens), emit=("asm",)).asm


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"until": "merge"}, "until must be one of .* got 'merge'"),
        ({"until": None, "tokens": 5}, "not built yet: the router and experts of 5 tokens"),
        ({"tokens": 17}, r"tokens must be in 1\.\.16, got 17"),
        ({"tokens": 0}, r"tokens must be in 1\.\.16, got 0"),
        ({"npes": 2}, "TP width 4, got 2"),
        ({"local_blocks": 0}, "local_blocks must be at least 1, got 0"),
        ({"init_blocks": 12, "local_blocks": 5}, r"in 1\.\.16, got 12 \+ 5"),
        ({"heads": IndexHeads(4, 1), "npes": 1}, "four index heads need four peers, got 1"),
        ({"heads": IndexHeads(4, 1), "init_blocks": 1}, "init_blocks must be 0 with four"),
        ({"heads": IndexHeads(4, 1)}, "not built yet: the selection with four index heads"),
        ({"fuse_k1": True}, "not built yet: the fused pre-attention kernel"),
        ({"tokens": 2, "blocks": 200}, "at least 208 CTAs, got 200"),
        ({"shape": RankShape(tp=1), "npes": 1}, "not built yet: a rank of 64 query"),
    ],
)
def test_an_unsupported_build_is_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        kernel(**changes)
    assert "\n" not in str(refused.value)


def test_arguments_are_the_published_ones_in_their_order():
    names = list(inspect.signature(kernel().func).parameters)
    assert names == [*ARG_NAMES, "stream"]
    assert len(trace_args()) == len(ARG_NAMES) == 33
    assert ARG_NAMES.index("rank") == 24
    assert ARG_NAMES[24:28] == INT32_ARGS


def test_the_symbol_is_a_mangled_name_of_its_own_length():
    symbol = kernel_symbol("stem", (0.5, 2.0), tp=4, tl=True)
    found = re.fullmatch(r"_ZN6flydsl(\d+)(stem_tp4_tl1_f[0-9a-f]{8})E", symbol)
    assert found
    assert int(found.group(1)) == len(found.group(2))


def test_other_constants_give_another_symbol():
    base = kernel_symbol("stem", (0.5, 2.0), tp=4)
    assert kernel_symbol("stem", (0.5, 2.5), tp=4) != base
    assert kernel_symbol("stem", (0.5, 2.0), tp=8) != base
    assert kernel_symbol("stem", (0.5, 2.0), tp=4) == base


def metadata(asm, name):
    return int(re.findall(rf"\.{name}:\s+(\d+)", asm)[-1])


@pytest.mark.parametrize("tokens", [1, 2, 4, 16])
def test_no_vector_register_is_spilled_and_lds_fits(tokens):
    asm = assembly(tokens)
    assert metadata(asm, "vgpr_spill_count") == 0
    assert metadata(asm, "private_segment_fixed_size") == 0
    assert metadata(asm, "agpr_count") == 0
    assert metadata(asm, "vgpr_count") <= 256  # two waves a SIMD: 512 threads on four SIMDs
    assert metadata(asm, "group_segment_fixed_size") <= LDS_BYTES


@pytest.mark.parametrize(
    ("tp", "tokens", "shared_fp8"),
    [(4, 1, False), (4, 3, True), (8, 4, False), (2, 1, False), (2, 4, True)],
)
def test_whole_builds_of_every_width_spill_no_vector_register(tp, tokens, shared_fp8):
    shape = RankShape(tp=tp)
    asm = assembly(tokens, until=None, shape=shape, npes=tp, shared_fp8=shared_fp8)
    assert metadata(asm, "vgpr_spill_count") == 0
    assert metadata(asm, "private_segment_fixed_size") == 0
    assert metadata(asm, "group_segment_fixed_size") <= LDS_BYTES


@pytest.mark.parametrize("tokens", [1, 4])
def test_the_whole_kernel_needs_less_than_a_public_peers(tokens):
    """Counts of the peer's static, table-shared build; registers are no cost below 256."""
    asm = assembly(tokens, until=None, cache=CacheLayout(static_scale=True))
    ours, peer = table([figures(asm)]).iloc[0], peer_table().loc[(tokens, False)]
    for name in (
        "instructions",
        "LDS bytes",
        "MFMA",
        "buffer loads",
        "LDS reads",
        "waits",
        "barriers",
    ):
        assert ours[name] <= peer[name], name


def test_weights_of_a_task_are_requested_before_its_products():
    """Left alone, the compiler moves each load to the product that uses it."""
    asm = assembly(1, until=None)
    ops = re.findall(r"^\t(buffer_load_\w+|v_mfma_scale\w*|s_barrier)", asm, re.M)
    text = " ".join("M" if op.startswith("v_") else "B" if op == "s_barrier" else "L" for op in ops)
    # the routed task's 12 tiles and 6 scale dwords, the shared task's 6 products while they are on
    # their way, then the routed 12: nothing in between
    assert re.search(r"(L ){18}(M ){6}B (M ){12}B", text)


@pytest.mark.parametrize("until", ["o_proj", None])
def test_no_buffer_needs_a_waterfall_loop(until):
    """A descriptor the compiler cannot prove uniform is read lane by lane in a loop."""
    asm = assembly(until=until)
    assert "s_and_saveexec" in asm  # the kernel has masked code, but
    assert not re.search(r"v_cmp_eq_u64.*\n(.*\n){0,6}.*s_and_saveexec", asm)


def test_stamps_are_emitted_only_with_a_timeline():
    assert "s_memrealtime" not in assembly()
    assert assembly(timeline=True).count("s_memrealtime") == 15
    assert "s_memrealtime" not in assembly(until=None)
    assert assembly(until=None, timeline=True).count("s_memrealtime") == 29


def test_a_static_scale_is_read_once_not_per_key():
    def loads(asm):
        return len(re.findall(r"^\tbuffer_load", asm, re.M))

    assert loads(assembly(cache=CacheLayout(static_scale=True))) == loads(assembly()) - 2


def test_a_tracing_is_repeatable():
    assert assembly(2) == assembly(2)
