"""Which CTA runs which task of the post-attention kernel, and how its LDS is cut.

Plain Python: integers in, integers out, no flydsl, no torch. A ``Plan`` holds every task
count, stage base and LDS size of one build (rank shape, tokens, peers, CTAs); the kernels read
them and the tests check them against brute force. What a stage does with its tasks is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from m3lab.kernels.tuning import Tuning
from m3lab.layout.regions import N_SPLIT, ROUTER_EXPERTS
from m3lab.model.shapes import MAX_TOKENS, MX_BLOCK, PAGE_TOKENS, RankShape

WAVE = 64  # lanes of a wave
WAVES = 8  # waves of a CTA
THREADS = WAVE * WAVES
LDS_BYTES = 163_840  # of a gfx950 compute unit
TILE_ROWS = 16  # rows of one MFMA tile

O_ROWS = 32  # hidden rows of an output-projection task
CHUNK_K = 128  # k of one scaled MFMA
MX_BLOCKS_PER_CHUNK = CHUNK_K // MX_BLOCK
DOWN_CHUNKS_HELD = 6  # a token's down chunks that a wave's registers hold beside other weights
DN_ROWS = 32  # hidden rows of a down task
UG_ROWS = 16  # mid rows of a routed up / gate task
SH_ROWS = 8  # mid rows of a shared-expert task: gate and up share one MFMA tile
ROW_PAD = 4  # words between LDS rows: the 16 rows of an operand fall in distinct banks
TL_POINTS = 32  # timeline points


def scale_cols(k: int) -> int:
    """Scale columns of a weight table of ``k`` columns, padded to what the scale shuffle takes."""
    return -(-k // (8 * MX_BLOCK)) * 8


def scale_pitch(chunks: int) -> int:
    """LDS words that hold a lane's scales of ``chunks`` chunks: 16-byte reads stay aligned."""
    return chunks if chunks <= 2 else -(-chunks // 4) * 4


@dataclass(frozen=True)
class Plan:
    """Tasks, stage bases and LDS of one build.

    ``tokens`` rows on a rank of ``shape`` in a group of ``npes`` peers, on ``blocks`` CTAs;
    ``tuning`` overrides its choices.
    A stage's task t runs on CTA (base + t) mod blocks. Raises ValueError, in one sentence, for
    what does not fit or is not built.
    """

    shape: RankShape
    tokens: int
    npes: int = 4
    blocks: int = 256
    tuning: Tuning = Tuning()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"tokens must be in 1..{MAX_TOKENS}, got {self.tokens}")
        if self.npes not in (1, self.shape.tp):
            raise ValueError(
                f"peers must be 1 (solo) or the TP width {self.shape.tp}, got {self.npes}"
            )
        if self.shape.heads_per_kv > TILE_ROWS:
            raise ValueError(
                f"the query heads of a kv head must fit the {TILE_ROWS} rows of a matrix operand, "
                f"got {self.shape.heads_per_kv}"
            )
        if self.shape.kv_heads > 2:
            raise ValueError(
                f"not built yet: a rank of {self.shape.q_heads} query and {self.shape.kv_heads} kv "
                f"heads (TP width {self.shape.tp}): the weights and partitions that its output "
                "projection holds do not fit a wave's registers"
            )
        if self.tuning.ug_by_token and self.blocks % self.tokens:
            raise ValueError(
                f"ug_by_token needs CTAs that the tokens divide, got {self.blocks} CTAs for "
                f"{self.tokens} tokens"
            )
        if self.tuning.early_down_weights and self.down_chunks > DOWN_CHUNKS_HELD:
            raise ValueError(
                f"early_down_weights must be off where a token's down weights are more than "
                f"{DOWN_CHUNKS_HELD} chunks, which registers do not hold beside the first task's, "
                f"got {self.down_chunks} chunks"
            )
        if self.tuning.down_in_flight == 2 and self.down_chunks > DOWN_CHUNKS_HELD:
            raise ValueError(
                f"down_in_flight must be 1 where a token's down weights are more than "
                f"{DOWN_CHUNKS_HELD} chunks, got 2 with {self.down_chunks} chunks"
            )
        # one kv head's splits and the widest other stage side by side; every split task of a step
        # on a CTA of its own, since a long context's splits wait for each other
        beside = 0 if self.grouped else max(self.o_tasks, self.down_tasks)
        need = max(N_SPLIT * self.tokens + beside, self.split_tasks)
        if self.blocks < need:
            raise ValueError(
                f"a step of {self.tokens} tokens needs at least {need} CTAs, got {self.blocks}"
            )
        if self.lds_bytes > LDS_BYTES:
            raise ValueError(
                f"the LDS of a step of {self.tokens} tokens is {self.lds_bytes} bytes, "
                f"more than the {LDS_BYTES} of a compute unit"
            )

    # ------------------------------------------------------------------ which form

    @property
    def grouped(self) -> bool:
        """The mixture of experts runs expert by expert, its weights read once for all tokens."""
        return self.tokens >= self.tuning.grouped_from

    @property
    def two_shot(self) -> bool:
        """The all-reduces go through the row group's owner rank (two hops, half the bytes)."""
        return self.tokens >= self.tuning.two_shot_from and self.npes > 1

    # ------------------------------------------------------------------ task counts

    @property
    def partition_keys(self) -> int:
        """Selected keys of one split task (256: 16 blocks of 128 keys over 8 partitions)."""
        m = self.shape.model
        return m.topk_blocks * m.sparse_block // N_SPLIT

    @property
    def pages_per_block(self) -> int:
        return self.shape.model.sparse_block // PAGE_TOKENS

    @property
    def split_tasks(self) -> int:
        return N_SPLIT * self.tokens * self.shape.kv_heads

    @property
    def merge_tasks(self) -> int:
        """One per token; a single token's merge is folded into its output tasks."""
        return self.tokens if self.tokens > 1 and not self.tuning.merge_in_output else 0

    @property
    def o_tasks(self) -> int:
        return self.shape.hidden // O_ROWS

    @property
    def router_tasks_per_token(self) -> int:
        return self.shape.model.experts // ROUTER_EXPERTS

    @property
    def router_tasks(self) -> int:
        return self.router_tasks_per_token * self.tokens

    @property
    def router_ctas(self) -> int:
        """CTAs that share the router's tasks, before the grid wraps."""
        by_token = self.tuning.router_by_token
        return self.router_tasks_per_token if by_token else self.router_tasks

    @property
    def ug_per_slot(self) -> int:
        """Up / gate row groups of one expert (48 at W=4)."""
        return self.shape.inter // UG_ROWS

    @property
    def ug_tasks_per_token(self) -> int:
        return self.shape.model.top_k * self.ug_per_slot

    @property
    def shared_tasks(self) -> int:
        return self.shape.inter // SH_ROWS

    @property
    def down_tasks(self) -> int:
        return self.shape.hidden // DN_ROWS

    # ------------------------------------------------------------------ where they run

    @cached_property
    def bases(self) -> dict[str, int]:
        """First CTA of each stage."""
        base = {
            "split": 0,
            "merge": self.split_tasks,
            "o_proj": self.split_tasks + self.merge_tasks,
            "router": self.split_tasks + self.merge_tasks + self.o_tasks,
            "up_gate": 0,
            # past the split CTAs where the grid is wide enough; a down task never wraps
            "down": max(0, min(self.split_tasks, self.blocks - self.down_tasks)),
        }
        base = {name: first % self.blocks for name, first in base.items()}
        if not self.grouped:
            base["shared"] = self._shared_base(base)
        return base

    def ctas_of(self, stage: str, tasks: int) -> set[int]:
        """CTAs that run a stage of ``tasks`` tasks."""
        first = self.bases[stage]
        return {(first + t) % self.blocks for t in range(min(tasks, self.blocks))}

    @property
    def ug_ctas_per_token(self) -> int | None:
        """CTAs that share one token's routed up / gate tasks, None for round robin."""
        by_token = self.tuning.ug_by_token
        if by_token is None:
            by_token = self.tokens >= 4 and self.blocks % self.tokens == 0
        return self.blocks // self.tokens if by_token else None

    def ug_tasks_of(self, cta: int) -> int:
        """Routed up / gate tasks that ``cta`` runs in the narrow form."""
        per_token = self.ug_ctas_per_token
        if per_token is not None:
            return len(range(cta % per_token, self.ug_tasks_per_token, per_token))
        return len(range(cta, self.ug_tasks_per_token * self.tokens, self.blocks))

    @property
    def ug_rounds(self) -> int:
        """The most routed up / gate tasks that a CTA runs in the narrow form."""
        return max(self.ug_tasks_of(cta) for cta in range(self.blocks))

    def _shared_base(self, base: dict[str, int]) -> int:
        """First CTA of the shared expert's window, the cheapest one (the lowest at a tie).

        Cost, in this order: the most routed tasks of a CTA in the window; its router CTAs where
        that equals the most of any CTA; its down CTAs; its router CTAs.
        """
        ctas = range(self.blocks)
        load = [self.ug_tasks_of(cta) for cta in ctas]
        most = max(load)
        router = {(base["router"] + t) % self.blocks for t in range(self.router_ctas)}
        down = {cta for cta in ctas if 0 <= cta - base["down"] < self.down_tasks}

        def cost(first: int) -> tuple[int, ...]:
            window = [(first + t) % self.blocks for t in range(self.shared_tasks)]
            heaviest = max(load[cta] for cta in window)
            routers = sum(cta in router for cta in window)
            downs = sum(cta in down for cta in window)
            return heaviest, routers if heaviest == most else 0, downs, routers, first

        return min(ctas, key=cost)

    # ------------------------------------------------------------------ LDS, in 4-byte words

    @property
    def row_pad(self) -> int:
        return ROW_PAD if self.tuning.pad_rows else 0

    @property
    def xn8_row(self) -> int:
        """Pitch of a token's MXFP8 normed row."""
        return self.shape.hidden // 4 + self.row_pad

    @property
    def xsc_row(self) -> int:
        """Pitch of that row's scales, a word each."""
        return self.shape.hidden // MX_BLOCK + self.row_pad

    @property
    def ug_chunks(self) -> int:
        """128-k chunks of an up / gate product that one wave takes."""
        return self.shape.hidden // CHUNK_K // WAVES

    @property
    def down_chunks(self) -> int:
        """128-k chunks of one slot's down product."""
        return self.shape.inter // CHUNK_K

    @property
    def xn_scale_row(self) -> int:
        """Pitch of a normed row's scales in the narrow form: a wave's scales lie together."""
        return WAVES * MX_BLOCKS_PER_CHUNK * scale_pitch(self.ug_chunks) + self.row_pad

    @property
    def mid_scale_row(self) -> int:
        """Pitch of a token's mid scales in the narrow form: a slot's scales lie together."""
        slots = self.shape.model.top_k + 1
        return slots * MX_BLOCKS_PER_CHUNK * scale_pitch(self.down_chunks)

    @property
    def mid_row(self) -> int:
        """Pitch of a mid row in the wide form; the narrow form's are not padded."""
        return self.shape.inter // 4 + self.row_pad

    @property
    def midsc_row(self) -> int:
        return self.shape.inter // MX_BLOCK + self.row_pad

    @property
    def o_row(self) -> int:
        """Pitch of a token's quantized attention row."""
        return self.shape.o_k // 4 + self.row_pad

    @property
    def partial_words(self) -> int:
        """The split's partial outputs: every wave's [head][dim], fp32, of a whole matrix operand's
        heads (a rank with fewer repeats them)."""
        return WAVES * self.operand_words

    @property
    def operand_words(self) -> int:
        """Elements of the query heads that share a kv head, as a matrix operand holds them."""
        return TILE_ROWS * self.shape.model.head_dim

    @property
    def split_in_pool(self) -> bool:
        """The split's partials take their turn with the pool, where LDS is short: in the wide form
        and on a rank of several kv heads, whose mid rows are long."""
        return self.grouped or self.shape.kv_heads > 1

    @property
    def tile_words(self) -> int:
        """Partial tiles of an up / gate task, gate and up, of two tasks that take turns."""
        return 2 * 2 * THREADS * 4

    @property
    def pool_words(self) -> int:
        """The pool that the stages take turns with."""
        s, slots = self.tokens, self.shape.model.top_k + 1
        o_rows = s * self.o_row
        if not self.grouped:
            intermediates = slots * self.shape.inter  # as bf16 pairs, then as MXFP8 with its scales
            mid_words = intermediates // 2 + intermediates // 4 + self.mid_scale_row
            xn_words = max(self.shape.hidden // 2, self.xn8_row + self.xn_scale_row)
            rows = s * max(xn_words, mid_words, self.o_row)
            return max(rows, self.partial_words) if self.split_in_pool else rows
        up_gate = s * (self.xn8_row + self.xsc_row + self.shape.model.experts)
        return max(
            self.partial_words,
            up_gate + THREADS * 4,
            (slots * s + 1) * (self.mid_row + self.midsc_row),
            o_rows,
        )

    @property
    def partials_words(self) -> int:
        """The array of partials beside the pool: the narrow up / gate tasks', and the split's
        where they are not in the pool."""
        if self.grouped:
            return 4
        return self.tile_words if self.split_in_pool else max(self.tile_words, self.partial_words)

    @property
    def shared_rounds(self) -> int:
        """The most shared tasks that a CTA runs."""
        return -(-self.shared_tasks // self.blocks)

    @property
    def down_in_flight(self) -> int:
        """Tokens whose down weights are in flight when the down products start: two, one where a
        token's fill too many registers."""
        if self.tuning.down_in_flight is not None:
            return self.tuning.down_in_flight
        return 2 if self.down_chunks <= DOWN_CHUNKS_HELD else 1

    @property
    def down_round(self) -> int:
        """The routed round after which the first token's down weights are requested: the first;
        the last where they and two tasks' up / gate weights fill too many registers."""
        return 0 if self.down_chunks <= DOWN_CHUNKS_HELD else self.ug_rounds - 1

    @property
    def union_max(self) -> int:
        """The most distinct experts of the step, the shared one included."""
        return self.shape.model.top_k * self.tokens + 1

    @property
    def lds_words(self) -> dict[str, int]:
        """Words of each LDS array of a whole build (no timeline), in order of allocation."""
        words = {
            "pool": self.pool_words,
            "red": THREADS * 4,
            "q8": self.operand_words // 4,
            "partials": self.partials_words,
            "heads": 2 * WAVES * TILE_ROWS + WAVES,
            "keys": THREADS,
            "ranks": THREADS,
            "blocks": 4,
            "route": 8 * MAX_TOKENS,
            "route_weight": 8 * MAX_TOKENS,
        }
        if self.grouped:
            words |= {
                "union": self.union_max + 2,
                "union_mask": self.union_max + 2,
                "union_row": self.union_max * TILE_ROWS,
                "union_weight": self.union_max * TILE_ROWS,
            }
        return words

    @property
    def lds_bytes(self) -> int:
        """LDS of a whole build, each array 16-byte aligned, with a timeline's stamps."""
        return sum(-(-n // 4) * 16 for n in self.lds_words.values()) + 8 * TL_POINTS
