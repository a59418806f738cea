"""DecodeStep: one decode step of one layer, from shapes to verdicts. The one driver of the package.

It makes (or takes) weights, inputs and contexts, lays them out as the kernel reads them, writes the
indexer's scores into their region as a separate scorer would, launches every rank, and reads the
published regions back. It holds no stage's arithmetic: that is the kernel's and the references';
the comparison of the two is ``m3lab.verify``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m3lab.compile.trace import BuildResult, build_cached, spec_key
from m3lab.kernels.arguments import ARG_NAMES
from m3lab.kernels.plan import TL_POINTS
from m3lab.kernels.stages import stages_until
from m3lab.kernels.tuning import Tuning
from m3lab.layout.buffers import MAX_LAYER, Allocation, PeerBuffers, Scratch, StepCounter
from m3lab.layout.kv_cache import PagedCaches
from m3lab.layout.shard import PreparedLayer, prepare
from m3lab.model.context import BLOCK_TOKENS, KVContext, random_context
from m3lab.model.shapes import MAX_TOKENS, CacheLayout, ModelShape, RankShape
from m3lab.model.weights import LayerWeights, random_layer, weight_specs
from m3lab.reference import kernel as ref
from m3lab.reference.pre_attn import block_scores
from m3lab.step.inputs import StepInputs, check_inputs, check_pointers, check_weights
from m3lab.verify.views import RankViews, read_views

if TYPE_CHECKING:
    from m3lab.interpreter import Memory, RunReport
    from m3lab.verify.verdicts import Verdict

BACKENDS = ("auto", "interpreter", "hip")
SPARE_BLOCKS = 8  # never-written cache blocks that stand for every block nobody selects
NAN_BF16 = torch.tensor(float("nan"), dtype=torch.bfloat16)
BLOCKS = 256  # CTAs of a launch, the builder's default
SPARE_BYTES = 1 << 26  # a rank's arena besides its expert tables
EXPERT_POOL = 8  # routed experts that random weights hold: 28 MB each at full shape
STEERING = 4.0  # taken off an absent expert's correction bias; a sigmoid and its bias are below 2
OUTPUTS = ("h_mid", "ar_out")
ATTENTION_WEIGHTS = ("w_o", "s_o")
MLP_WEIGHTS = ("g_post", "w_gate", "bias", "w13", "s13", "w2", "s2")


@dataclass
class Mailboxes:
    """What all layers of a model share: every rank's scratch and step counter, the peer buffers."""

    scratch: list[Scratch]
    counters: list[StepCounter]
    peers: PeerBuffers

    @classmethod
    def on(cls, memory: Memory, shape: RankShape, npes: int) -> Mailboxes:
        return cls(
            [Scratch(shape, memory, rank) for rank in range(npes)],
            [StepCounter(memory, rank) for rank in range(npes)],
            PeerBuffers(shape, memory, npes),
        )

    def next_step(self) -> None:
        """Tags of a new decode step."""
        for counter in self.counters:
            counter.increment()

    def free(self) -> None:
        """Give the memory back. Idempotent."""
        for scratch, counter in zip(self.scratch, self.counters, strict=True):
            scratch.free()
            counter.free()
        self.peers.free()


@dataclass
class StepResult:
    """One launch of every rank: its views, the interpreter's report, wall seconds (not a GPU's).

    ``stamps``: per rank the kernel's timeline, int64 [blocks, points] ticks of 10 ns, of a step
    made with ``timeline``; without a clock every tick is 0. See ``m3lab.report.timeline``.
    """

    ranks: list[RankViews]
    step: int
    report: RunReport
    seconds: float
    stamps: list[Tensor] = field(default_factory=list)


def expert_pool(model: ModelShape, seed: int, size: int = EXPERT_POOL) -> tuple[int, ...]:
    """``size`` routed experts drawn from ``seed``, sorted.

    The first ``top_k`` are always among them: a padding row that holds NaN picks those, since its
    routing keys are equal but for the expert number.
    """
    gen = torch.Generator().manual_seed(seed * 7919 + 5)
    others = model.top_k + torch.randperm(model.experts - model.top_k, generator=gen)
    return tuple(sorted([*range(model.top_k), *others[: size - model.top_k].tolist()]))


def with_routing_bias(layer: LayerWeights) -> LayerWeights:
    """``layer`` with a correction bias that keeps the routing among the experts it holds.

    Every absent expert's bias is lowered by more than a sigmoid can make up; those of the present
    ones stay, so which of them a token gets is still decided by its scores.
    """
    bias = layer.bias - STEERING
    here = [e for e in layer.present if e != layer.shared_entry]
    bias[here] = layer.bias[here]
    return replace(layer, bias=bias)


@lru_cache(maxsize=2)
def _random_layer(model: ModelShape, seed: int, experts: tuple[int, ...] | None) -> LayerWeights:
    """Drawn once a process: half a second an expert at full shape, and a layer is only read."""
    layer = random_layer(model, seed, experts=experts)
    return layer if experts is None else with_routing_bias(layer)


class DecodeStep:
    """One layer's decode step of ``tokens`` rows on ``npes`` ranks of a ``shape.tp``-wide shard.

    ``context``: keys a request's last row sees, its own new tokens included: one number, or one per
    live request. A request has ``q_len`` consecutive rows; the last ``pad_rows`` rows are padding.
    ``npes`` is 1 (rank 0 alone, its partial sum as the result) or ``shape.tp``. ``until`` names the
    stage the build stops after, None builds them all. ``experts``: the routed experts that random
    weights hold (default: ``expert_pool``); the correction bias keeps the routing
    among them, and every other expert is poisoned: its scales are NaN, its elements never written.
    ``timeline`` builds the kernel with its stamps, ``tuning`` with other schedule knobs.
    ``room``: keys by which ``advance`` may lengthen each request; every block then has a place of
    its own. ``mailboxes``: those of a model whose other layers share them (default: own ones).
    ``outputs``: per rank the allocations of ``h_mid`` and ``ar_out`` (default: own ones).
    Call ``prepare``, then ``run`` as often as wanted, then ``verify``.

    Raises ValueError with one sentence for anything out of range.
    """

    def __init__(
        self,
        shape: RankShape | None = None,
        tokens: int = 1,
        *,
        context: int | Sequence[int] = 2048,
        q_len: int = 1,
        npes: int | None = None,
        pad_rows: int = 0,
        layout: CacheLayout | None = None,
        until: str | None = "o_proj",
        experts: Sequence[int] | None = None,
        seed: int = 0,
        layer: int = 3,
        backend: str = "auto",
        memory: Memory | None = None,
        timeline: bool = False,
        mailboxes: Mailboxes | None = None,
        outputs: Sequence[dict[str, Allocation]] | None = None,
        room: int = 0,
        tuning: Tuning | None = None,
    ) -> None:
        self.shape = RankShape() if shape is None else shape
        if not isinstance(self.shape, RankShape):
            raise ValueError(f"shape must be a RankShape, got {type(shape).__name__}")
        self.tuning = Tuning() if tuning is None else tuning
        if not isinstance(self.tuning, Tuning):
            raise ValueError(f"tuning must be a Tuning, got {type(tuning).__name__}")
        self.model = self.shape.model
        self.tokens, self.q_len, self.pad_rows = tokens, q_len, pad_rows
        self.npes = self.shape.tp if npes is None else npes
        self.layout = layout or CacheLayout()
        self.until, self.seed, self.layer = until, seed, layer
        self.timeline = timeline
        self._check_build(backend)
        self.experts = self._experts_of(experts)
        self.requests = (tokens - pad_rows) // q_len
        self.context = self._contexts_of(context)
        self._first_context = self.context
        self.seq_lens = self._row_lengths()
        self.room = self._room_of(room)
        self._memory = memory
        self._shared, self._outputs = mailboxes, outputs
        self._own: Mailboxes | None = None
        self._ranks: list[_Rank] = []

    # --- what may be asked for ---

    def _check_build(self, backend: str) -> None:
        _integer("tokens", self.tokens, f"1..{MAX_TOKENS}")
        _integer("q_len", self.q_len, f"1..{self.tokens}")
        _integer("pad_rows", self.pad_rows, f"0..{self.tokens - 1}")
        _integer("seed", self.seed, "0..2147483647")
        _integer("layer", self.layer, f"0..{MAX_LAYER}")
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be in 0..2147483647, got {self.seed}")
        if not 0 <= self.layer <= MAX_LAYER:
            raise ValueError(f"layer must be in 0..{MAX_LAYER}, got {self.layer}")
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"tokens must be in 1..{MAX_TOKENS}, got {self.tokens}")
        if self.q_len < 1 or self.tokens % self.q_len:
            raise ValueError(
                f"tokens must be a multiple of q_len >= 1, got tokens {self.tokens}, "
                f"q_len {self.q_len}"
            )
        if not 0 <= self.pad_rows < self.tokens or self.pad_rows % self.q_len:
            raise ValueError(
                f"pad_rows must be a multiple of q_len {self.q_len} in 0..{self.tokens - 1}, "
                f"got {self.pad_rows}"
            )
        if self.npes not in (1, self.shape.tp):
            raise ValueError(
                f"npes must be 1 (solo) or the TP width {self.shape.tp}, got {self.npes}"
            )
        if self.shape.kv_heads != self.shape.index_heads:
            raise ValueError(
                f"a rank needs an index head per kv head, got {self.shape.index_heads} "
                f"and {self.shape.kv_heads}"
            )
        stages_until(self.until)  # refuses what is no stage to stop after
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "hip":
            raise ValueError(
                "backend 'hip' is not built yet; use 'interpreter' (or 'auto', which takes it)"
            )

    def _experts_of(self, experts: Sequence[int] | None) -> tuple[int, ...] | None:
        """The routed experts of random weights, sorted; None where no stage reads one."""
        m = self.model
        if self.until == "o_proj":
            return None
        if experts is None:
            return expert_pool(m, self.seed)
        pool = tuple(sorted(set(experts)))
        if len(pool) < m.top_k or not all(0 <= e < m.experts for e in pool):
            raise ValueError(
                f"experts must be at least {m.top_k} ids in 0..{m.experts - 1}, got {pool}"
            )
        return pool

    def _contexts_of(self, context: int | Sequence[int]) -> list[int]:
        one = not isinstance(context, Sequence) or isinstance(context, str)
        each: list[Any] = [context] * self.requests if one else [*context]  # type: ignore[misc]
        if len(each) != self.requests:
            raise ValueError(
                f"context must be one number or one per live request ({self.requests}), "
                f"got {len(each)}"
            )
        for n in each:
            _integer("context", n, f"{self.q_len}..{self.model.max_context}")
            if not self.q_len <= n <= self.model.max_context:
                raise ValueError(
                    f"context must be in {self.q_len}..{self.model.max_context} "
                    f"(a request's own new tokens count), got {n}"
                )
        return each

    def _room_of(self, room: int) -> int:
        most = self.model.max_context - max(self.context)
        if not 0 <= room <= most:
            raise ValueError(f"room must be in 0..{most} keys past the context, got {room}")
        return room

    def _row_lengths(self) -> list[int]:
        """Keys each row sees: row j of a request of q rows sees n - (q - 1 - j); padding rows 0."""
        rows = [n - (self.q_len - 1 - j) for n in self.context for j in range(self.q_len)]
        return rows + [0] * self.pad_rows

    # --- weights, inputs, memory ---

    def random_inputs(self) -> StepInputs:
        """Inputs drawn from the seed; every request has keys of its own."""
        gen = torch.Generator().manual_seed(self.seed * 1_000_003 + 17)
        m = self.model

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=gen).bfloat16()

        return StepInputs(
            h_in=normal(self.tokens, m.hidden),
            q=normal(self.tokens, m.q_heads, m.head_dim),
            iq=normal(self.tokens, m.index_heads, m.index_dim),
            contexts=[
                random_context(m, n, seed=self.seed, request=i, static=self.layout.static_scale)
                for i, n in enumerate(self.context)
            ],
        )

    def prepare(
        self, inputs: StepInputs | None = None, weights: LayerWeights | None = None
    ) -> DecodeStep:
        """Make or take inputs and weights, choose blocks, fill caches, build the kernel."""
        self.inputs = inputs or self.random_inputs()
        check_inputs(self, self.inputs)
        self.weights = weights or _random_layer(self.model, self.seed, self.experts)
        check_weights(self, self.weights)
        self._choose_blocks()
        self.block_table = self._block_table()
        self.build = build_for(self)
        if self._memory is None:
            from m3lab.interpreter import Memory

            self._memory = Memory(capacity=max(1 << 28, self._weight_bytes()))
        if self._shared is None:
            self._own = Mailboxes.on(self._memory, self.shape, self.npes)
        self._ranks = [_Rank(self, rank, self._memory) for rank in range(self.npes)]
        return self

    @property
    def mailboxes(self) -> Mailboxes:
        """The mailboxes in use; ValueError before ``prepare`` has made them."""
        boxes = self._shared or self._own
        if boxes is None:
            raise ValueError("the step has no mailboxes yet: call prepare first")
        return boxes

    @property
    def peers(self) -> PeerBuffers:
        return self.mailboxes.peers

    def advance(self, inputs: StepInputs) -> None:
        """Take the next decode step's inputs; its contexts may be longer, within the room.

        Only the keys past the old lengths are written to the caches, as a step's insert would.
        """
        old = self.context
        for i, (ctx, least) in enumerate(zip(inputs.contexts, old, strict=True)):
            most = self._first_context[i] + self.room
            if not least <= ctx.length <= most:
                raise ValueError(f"request {i} must have {least}..{most} keys, got {ctx.length}")
        self.context = [ctx.length for ctx in inputs.contexts]
        self.seq_lens = self._row_lengths()
        check_inputs(self, inputs)
        self.inputs = inputs
        self._choose_blocks()
        for rank in self._ranks:
            rank.rebind(old)

    def _choose_blocks(self) -> None:
        self.scores = self._block_scores()
        units = self.tokens * self.shape.kv_heads
        self.selections = [
            [self._select(rank, unit) for unit in range(units)] for rank in range(self.npes)
        ]

    def _weight_bytes(self) -> int:
        """Room for every rank's weights, absent experts included: such memory is never touched."""
        if self.until == "o_proj":
            return 0
        specs = weight_specs(self.model)
        tables = sum(prod(specs[name][0]) for name in ("w13", "s13", "w2", "s2"))
        return (tables // self.shape.tp + SPARE_BYTES) * self.npes

    @property
    def live_rows(self) -> int:
        """Rows of live requests; those after them are padding."""
        return self.requests * self.q_len

    def _request_of(self, row: int) -> int | None:
        """The live request of ``row``; None for a padding row."""
        return None if row >= self.live_rows else row // self.q_len

    # Every row attends once per kv head of the rank, each with an index head of its own:
    # unit = row * kv heads + kv head. With one kv head a rank (tp 4 and 8) a unit is a row.

    def _block_scores(self) -> list[list[Tensor | None]]:
        """[rank][unit]: fp32 [blocks] scores, None where all blocks are kept unscored."""
        heads = self.shape.kv_heads
        units = [(row, head) for row in range(self.tokens) for head in range(heads)]
        first = [rank * self.model.index_heads // self.shape.tp for rank in range(self.npes)]
        return [[self._unit_scores(row, f + head) for row, head in units] for f in first]

    def _unit_scores(self, row: int, index_head: int) -> Tensor | None:
        """A row's block scores by an index head of the model."""
        blocks = ref.context_blocks(self.seq_lens[row])[1]
        request = self._request_of(row)
        if request is None or blocks <= self.model.topk_blocks:
            return None
        if self.inputs.scores is not None:
            return self.inputs.scores[row, index_head, :blocks].float()
        ctx = self.inputs.contexts[request]
        keys = torch.stack([ctx.index_k(b) for b in range(blocks)])
        iq = self.inputs.iq[row, index_head]
        return block_scores(iq, keys, self.seq_lens[row], self.model.sm_scale)

    def _select(self, rank: int, unit: int) -> ref.Selection:
        context, blocks = ref.context_blocks(self.seq_lens[unit // self.shape.kv_heads])
        m, scores = self.model, self.scores[rank][unit]
        return ref.select(scores, blocks, context, m.init_blocks, m.local_blocks, m.topk_blocks)

    def _block_table(self) -> Tensor:
        """int32 [tokens, width]: distinct shuffled ids for the blocks some rank selects.

        Block 0 is the padding rows' page; blocks nobody selects share a few ids of blocks that are
        never written, so that a stray read is caught as a read of unwritten memory. With room to
        grow every block is one that may be selected.
        """
        blocks = [ref.context_blocks(n + self.room)[1] for n in self.context]
        if self.room:
            used = {(request, b) for request, n in enumerate(blocks) for b in range(n)}
        else:
            used = set().union(*(self._selected_by(rank) for rank in range(self.npes)))
        gen = torch.Generator().manual_seed(self.seed + 99)
        self.n_blocks = 1 + SPARE_BLOCKS + len(used)
        ids = (1 + torch.randperm(self.n_blocks - 1, generator=gen)).tolist()
        spare, ids = ids[:SPARE_BLOCKS], ids[SPARE_BLOCKS:]
        self.block_ids = dict(zip(sorted(used), ids, strict=True))
        table = torch.zeros(self.tokens, max(blocks), dtype=torch.int32)
        for row in range(self.tokens):
            request = self._request_of(row)
            if request is None:
                continue
            for b in range(blocks[request]):
                table[row, b] = self.block_ids.get((request, b), spare[b % SPARE_BLOCKS])
        return table

    def _selected_by(self, rank: int) -> set[tuple[int, int]]:
        """(request, block) of everything a rank's live rows attend to."""
        per_request = self.q_len * self.shape.kv_heads
        return {
            (unit // per_request, b)
            for unit in range(self.live_rows * self.shape.kv_heads)
            for b in self.selections[rank][unit].blocks.tolist()
        }

    # --- launching and reading back ---

    def run(self, *, new_step: bool = True, **options: Any) -> StepResult:
        """Launch every rank once and read what they published.

        ``options`` go to ``m3lab.interpreter.run`` (checks, seed, cta_groups, delay ...). Every run
        is a new step, since tags must never repeat on the same scratch; ``new_step`` False leaves
        the counting to whoever runs several layers a step.
        """
        from m3lab.interpreter import Launch
        from m3lab.interpreter.run import run

        if not self._ranks:
            self.prepare()
        assert self._memory is not None
        assert self.build.program is not None
        launches = []
        if new_step:
            self.mailboxes.next_step()
        for rank in self._ranks:
            rank.begin()
            args = rank.arguments()
            check_pointers(args)
            launches.append(Launch(self.build.program, list(args.values()), rank.rank))
        clock = time.perf_counter()
        report = run(launches, self._memory, **options)
        seconds = time.perf_counter() - clock
        views = [rank.views() for rank in self._ranks]
        stamps = [rank.stamps() for rank in self._ranks] if self.timeline else []
        return StepResult(views, self._ranks[0].counter.value, report, seconds, stamps)

    def verify(self, result: StepResult) -> list[Verdict]:
        """Every published intermediate against the kernel reference, and the end against exact."""
        from m3lab.verify import verify

        return verify(self, result)

    def close(self) -> None:
        """Free the step's device memory. Idempotent."""
        for rank in self._ranks:
            rank.free()
        if self._own is not None:
            self._own.free()
        self._ranks = []

    def __enter__(self) -> DecodeStep:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Rank:
    """One rank's device memory: weights, caches, tables, inputs, outputs."""

    def __init__(self, step: DecodeStep, rank: int, memory: Memory) -> None:
        self.step, self.rank = step, rank
        shape = step.shape
        prepared: PreparedLayer = prepare(step.weights, shape, rank)
        self.scratch = step.mailboxes.scratch[rank]
        self.counter = step.mailboxes.counters[rank]
        self.caches = PagedCaches(shape, step.layout, memory, rank, step.n_blocks)
        self._fill_caches()
        given = {**self._inputs(), "block_table": step.block_table}
        self.placed: dict[str, Allocation] = {
            name: memory.upload(name, t, rank=rank) for name, t in given.items()
        }
        names = ATTENTION_WEIGHTS + (() if step.until == "o_proj" else MLP_WEIGHTS)
        self.placed |= prepared.upload(memory, names)
        row_bytes = step.tokens * shape.hidden * 2
        for name in OUTPUTS if step._outputs is None else ():
            self.placed[name] = memory.alloc(name, row_bytes, rank=rank)
        self.outputs = step._outputs[rank] if step._outputs else self.placed
        if step.timeline:
            self.placed["tl"] = memory.alloc("tl", BLOCKS * TL_POINTS * 8, rank=rank, zero=True)

    def _inputs(self) -> dict[str, Tensor]:
        """What changes from step to step, besides the caches."""
        step, n = self.step, self.step.shape.q_heads
        heads = slice(self.rank * n, (self.rank + 1) * n)
        return {
            "h_in": step.inputs.h_in,
            "q": step.inputs.q[:, heads].contiguous(),
            "seq_lens": torch.tensor(step.seq_lens, dtype=torch.int32),
        }

    def _fill_caches(self) -> None:
        """The blocks this rank may attend to, and the padding rows' page 0."""
        step = self.step
        if step.room:
            for request, n in enumerate(step.context):
                self._write_keys(request, 0, n)
        else:
            for request, block in sorted(step._selected_by(self.rank)):
                last = min((block + 1) * BLOCK_TOKENS, step.context[request])
                self._write_keys(request, block * BLOCK_TOKENS, last)
        if step.pad_rows:
            self.caches.fill(padding_context(step), [0], [0], parts=("kv",))

    def _write_keys(self, request: int, first: int, last: int) -> None:
        """Keys ``first`` .. ``last`` - 1 of a request into their cache blocks."""
        ctx, kv = self.step.inputs.contexts[request], self.step.shape.kv_range(self.rank)
        while first < last:
            block, at = divmod(first, BLOCK_TOKENS)
            n = min(BLOCK_TOKENS - at, last - first)
            part = (slice(at, at + n), slice(kv.start, kv.stop))
            tensors = [t(block)[part] for t in (ctx.k, ctx.v, ctx.k_scale, ctx.v_scale)]
            self.caches.write_kv(self.step.block_ids[request, block], *tensors, first=at)
            first += n

    def rebind(self, old: Sequence[int]) -> None:
        """The step's new inputs; the keys past the ``old`` lengths."""
        for name, tensor in self._inputs().items():
            self.placed[name].write(tensor)
        for request, n in enumerate(self.step.context):
            self._write_keys(request, old[request], n)

    def begin(self) -> None:
        """The indexer's scores under this step's tag; no output left from the launch before."""
        step = self.step
        for name in OUTPUTS:
            self.outputs[name].write(NAN_BF16.repeat(step.tokens, step.model.hidden))
        for unit, scores in enumerate(step.scores[self.rank]):
            if scores is not None:
                at = divmod(unit, step.shape.kv_heads)
                self.scratch.put("iscore", at, scores, self.counter.value, step.layer)

    def arguments(self) -> dict[str, int]:
        """The kernel's arguments by name, in order; 0 for what this build does not read."""
        step, caches = self.step, self.caches
        given = {name: a.addr for name, a in (self.placed | self.outputs).items()}
        given |= {
            "k_cache": caches.k_addr,
            "v_cache": caches.v_addr,
            "k_scale": caches.k_scale_addr,
            "v_scale": caches.v_scale_addr,
            "scratch": self.scratch.addr,
            "sym": step.peers.addr(self.rank),
            "peers": step.peers.table_addr(self.rank),
            "step": self.counter.addr,
            "rank": self.rank,
            "layer": step.layer,
            "bt_width": step.block_table.shape[1],
            "q_len": step.q_len,
        }
        return {name: given.get(name, 0) for name in ARG_NAMES}

    def views(self) -> RankViews:
        """Read every region this build publishes."""
        step, number = self.step, self.counter.value
        return read_views(step, self.rank, self.scratch, step.peers, self.outputs, number)

    def stamps(self) -> Tensor:
        """The kernel's timeline: int64 [blocks, points] ticks of 10 ns; 0: not stamped."""
        return self.placed["tl"].read(torch.int64, (BLOCKS, TL_POINTS))

    def free(self) -> None:
        for allocation in self.placed.values():
            allocation.free()
        self.caches.free()


def padding_context(step: DecodeStep) -> KVContext:
    """What page 0 holds for padding rows: one whole finite block, no request's."""
    return random_context(
        step.model,
        step.model.sparse_block,
        seed=step.seed,
        request=1_000,
        static=step.layout.static_scale,
    )


def build_for(step: DecodeStep, emit: Sequence[str] = ("program",)) -> BuildResult:
    """The kernel of this step, in the parts ``emit`` names (see ``build``); cached."""
    parameters = kernel_parameters(step)
    return build_cached(
        spec_key({"kernel": "post_attn", **parameters}),
        lambda: _launcher(parameters),
        emit=emit,
    )


def kernel_parameters(step: DecodeStep) -> dict[str, Any]:
    """Keyword arguments of ``build_post_attn_kernel`` for this step."""
    m = step.model
    parameters = {
        "npes": step.npes,
        "sm_scale": m.sm_scale,
        "eps": m.rms_eps,
        "route_scale": m.route_scale,
        "shared_weight": m.shared_weight,
        "swiglu_limit": m.swiglu_limit,
        "init_blocks": m.init_blocks,
        "local_blocks": m.local_blocks,
        "tokens": step.tokens,
        "shape": step.shape,
        "cache": step.layout,
        "until": step.until,
    }
    if step.timeline:
        parameters["timeline"] = True
    if step.tuning.changes():
        parameters["tuning"] = step.tuning
    return parameters


def _launcher(parameters: dict[str, Any]) -> tuple[Any, list[int]]:
    from m3lab.kernels.post_attn import build_post_attn_kernel, trace_args

    return build_post_attn_kernel(**parameters), trace_args()


def _integer(name: str, value: Any, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer in {allowed}, got {value!r}")
