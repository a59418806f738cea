"""Where every mailbox region of one rank lies: names, byte offsets, sizes and shapes.

Plain Python, so that the kernels can import it: no torch, no allocator (that is ``buffers``). Two
buffers are laid out here: K4's scratch and the peer (symmetric) buffer. All sizes are
for 16 tokens, whatever the build, so one allocation serves every build of a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from m3lab.model.shapes import MAX_TOKENS, MX_BLOCK, TP_WIDTHS, RankShape

PAIR_BYTES = 8  # a mailbox pair: value word, tag word
WORD_BYTES = 4
REGION_ALIGN = 256
MAX_LAYER = 127  # a tag has 7 bits of layer + 1 below the step
MAX_STEP = (1 << 24) - 2  # the largest step whose tags all fit a signed int32

N_SPLIT = 8  # partitions of a token's selected keys (16 blocks of 128 keys, 256 keys each)
SCORE_COPIES = 8  # 240 CTAs polling one copy serialize on its lines (upstream: 37.3 -> 35.9 us)
ROUTER_EXPERTS = 8  # experts of one router task
SPARSE_TABLE_WORDS = 130  # 128 page ids, the sparse context length, a spare word

Kind = Literal["pairs", "words"]
ValueType = Literal["bf16x2", "u8x4", "f32", "i32"]


@dataclass(frozen=True)
class Region:
    """One named region of a buffer.

    ``offset`` is in bytes from the buffer's start. ``kind`` says whether a unit is an 8-byte
    mailbox pair or a plain 4-byte word, ``shape`` counts units and ``dtype`` says what a unit's
    value word holds ("bf16x2": two bf16, the lower index in the low half; "u8x4": four bytes;
    "i32" also stands for records that mix ids and float bits). ``token_axis`` is the axis of
    ``shape`` that runs over the step's rows, None where there is none. ``reserved``: units that
    the buffer sets aside where they are more than the shape's.
    """

    name: str
    offset: int
    kind: Kind
    shape: tuple[int, ...]
    dtype: ValueType
    token_axis: int | None = 0
    reserved: int = 0

    @property
    def unit_bytes(self) -> int:
        return PAIR_BYTES if self.kind == "pairs" else WORD_BYTES

    @property
    def count(self) -> int:
        """Units (pairs or words) that the shape holds."""
        return prod(self.shape)

    @property
    def capacity(self) -> int:
        """Units that the buffer sets aside."""
        return max(self.count, self.reserved)

    @property
    def nbytes(self) -> int:
        return self.capacity * self.unit_bytes

    @property
    def pairs(self) -> int:
        """The region's size in pairs, whatever its kind."""
        return self.nbytes // PAIR_BYTES

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def per_token(self) -> int:
        """Units of one token's part (in ``scores``: of one copy's)."""
        if self.token_axis is None:
            raise ValueError(f"region {self.name} is not divided by tokens")
        return prod(self.shape[self.token_axis + 1 :])

    @property
    def token_bytes(self) -> int:
        """Bytes from one token's part to the next one's."""
        return self.per_token * self.unit_bytes


@dataclass(frozen=True)
class _Entry:
    """A region before it has an offset."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: ValueType
    token_axis: int | None = 0
    reserved: int = 0


def _place(entries: list[_Entry], align: int) -> tuple[dict[str, Region], int]:
    """Lay ``entries`` out in order, each at a multiple of ``align``: (regions, total bytes)."""
    regions: dict[str, Region] = {}
    offset = 0
    for e in entries:
        region = Region(e.name, offset, e.kind, e.shape, e.dtype, e.token_axis, e.reserved)
        regions[e.name] = region
        offset = -(-region.end // align) * align
    return regions, offset


def max_union(shape: RankShape) -> int:
    """The most distinct experts of a step: every token's routed ones, then the shared one."""
    return shape.model.top_k * MAX_TOKENS + 1


def _scratch_entries(shape: RankShape) -> list[_Entry]:
    m, t, heads = shape.model, MAX_TOKENS, shape.index_heads
    slots = m.top_k + 1
    row_groups = shape.inter // MX_BLOCK  # one MXFP8 block of mid rows: a pair of 16-row tasks
    router_tasks = m.experts // ROUTER_EXPERTS
    return [
        _Entry("iscore", "pairs", (t, heads, m.max_blocks), "f32"),
        _Entry("sparse_table", "words", (t, heads, SPARSE_TABLE_WORDS), "i32"),
        _Entry("sp_o", "pairs", (t, N_SPLIT, shape.q_heads, m.head_dim // 2), "bf16x2"),
        _Entry("sp_m", "pairs", (t, N_SPLIT, shape.q_heads), "f32"),
        _Entry("sp_l", "pairs", (t, N_SPLIT, shape.q_heads), "f32"),
        _Entry("attnq", "words", (t, shape.o_k // 4), "u8x4"),
        _Entry("attnq_s", "pairs", (t,), "f32"),
        _Entry("a", "pairs", (t, m.hidden // 2), "bf16x2"),
        _Entry("xn8", "pairs", (t, m.hidden // 4), "u8x4"),
        _Entry("xsc", "pairs", (t, m.hidden // MX_BLOCK), "i32"),
        _Entry("scores", "pairs", (SCORE_COPIES, t, m.experts, 2), "i32", token_axis=1),
        # room for a pair an element, as the published kernel has it: the regions behind stay put
        _Entry(
            "mid", "pairs", (t, slots, shape.inter // 2), "bf16x2", reserved=t * slots * shape.inter
        ),
        _Entry("sel", "pairs", (t, 2, slots), "i32"),
        _Entry("sel_long", "pairs", (t, heads, N_SPLIT, m.topk_blocks, 2), "i32"),
        _Entry("xn8p", "words", (t, m.hidden // 4), "u8x4"),
        _Entry("xscp", "words", (t, m.hidden // MX_BLOCK), "i32"),
        _Entry("xndone", "pairs", (t, router_tasks), "i32"),
        _Entry("mid8p", "words", (t, slots, shape.inter // 4), "u8x4"),
        _Entry("midsp", "words", (t, slots, row_groups), "i32"),
        _Entry("ugdone", "pairs", (max_union(shape), row_groups), "i32", token_axis=None),
    ]


def _peer_entries(shape: RankShape, npes: int) -> list[_Entry]:
    if npes not in TP_WIDTHS:
        raise ValueError(f"the number of peers must be one of {TP_WIDTHS}, got {npes}")
    t, words = MAX_TOKENS, shape.hidden // 2
    return [
        _Entry("attn", "pairs", (npes, t, words), "bf16x2", token_axis=1),
        _Entry("ffn", "pairs", (npes, t, words), "bf16x2", token_axis=1),
        _Entry("a_ag", "pairs", (t, words), "bf16x2"),
        _Entry("ffn_ag", "pairs", (t, words), "bf16x2"),
        _Entry("sel_cp", "pairs", (t, N_SPLIT, shape.model.topk_blocks, 2), "i32"),
    ]


def scratch_layout(shape: RankShape) -> dict[str, Region]:
    """K4's scratch regions of one rank, in order, each 256-byte aligned.

    Region order and sizes: the specification's memory chapter. With several index heads on a rank
    (tp 1 and 2) ``iscore``, ``sparse_table`` and ``sel_long`` hold [token][index head]; the split's
    regions hold [token][partition][query head] at every width.
    """
    return _place(_scratch_entries(shape), REGION_ALIGN)[0]


def scratch_bytes(shape: RankShape) -> int:
    """Bytes of one rank's K4 scratch (3,767,808 at tp 4)."""
    return _place(_scratch_entries(shape), REGION_ALIGN)[1]


def peer_layout(shape: RankShape, npes: int) -> dict[str, Region]:
    """Regions of one rank's peer buffer in a group of ``npes`` ranks (1: solo)."""
    return _place(_peer_entries(shape, npes), REGION_ALIGN)[0]


def peer_bytes(shape: RankShape, npes: int) -> int:
    """Bytes of one rank's peer buffer (3,964,928 with four ranks)."""
    return _place(_peer_entries(shape, npes), REGION_ALIGN)[1]


def tag(step: int, layer: int) -> int:
    """The tag word of a (step, layer) launch: never 0, so zeroed memory never matches."""
    if not 0 <= layer <= MAX_LAYER:
        raise ValueError(f"layer must be in 0..{MAX_LAYER}, got {layer}")
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step must be in 0..{MAX_STEP}, got {step}")
    return step * 128 + layer + 1
