"""DecodeLoop: several decode steps through several layers, as a server runs them.

The layers share one scratch and one peer buffer a rank; a step counter makes the tags; layer i
reads (ar, h2) buffer i % 2 and writes (i + 1) % 2; contexts grow by the step's own keys. What comes
before the attention (norm, QKV, RoPE, cache insert, index scores) is the kernel reference's on the
host until a pre-attention kernel does it. Each launch is judged by ``verify`` on its own inputs,
and against a reference that has been on its own from the first embedding on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m3lab.layout.buffers import Allocation
from m3lab.model.context import KVContext, random_context
from m3lab.model.shapes import CacheLayout, RankShape
from m3lab.model.weights import LayerWeights
from m3lab.reference import kernel as ref
from m3lab.reference.compare import rel_l2
from m3lab.step import DecodeStep, Mailboxes, StepInputs, StepResult
from m3lab.verify.verdicts import EXACT_ALARM, Verdict

if TYPE_CHECKING:
    from m3lab.interpreter import Memory

FIRST_SPARSE_LAYER = 3  # layers 0..2 of the model are dense
NEW_KEYS = ("k", "k_scale", "v", "v_scale", "index_k")


class GrownContext(ref.Inserted):
    """A random prompt followed by the keys that the steps have inserted."""

    base: KVContext

    @property
    def k_scale_static(self) -> float:
        return self.base.k_scale_static

    @property
    def v_scale_static(self) -> float:
        return self.base.v_scale_static


@dataclass
class History:
    """What a layer has inserted for its requests: per request, the new keys in order, by name."""

    prompts: list[KVContext]
    new: list[dict[str, Tensor]] = field(default_factory=list)

    def insert(self, pre: ref.PreAttention, q_len: int) -> list[GrownContext]:
        """The requests' contexts with this step's ``q_len`` keys a request appended."""
        step = {
            "k": pre.k.bytes,
            "k_scale": pre.k.scale,
            "v": pre.v.bytes,
            "v_scale": pre.v.scale,
            "index_k": pre.ik,
        }
        contexts = []
        for i, prompt in enumerate(self.prompts):
            rows = slice(i * q_len, (i + 1) * q_len)
            mine = {name: step[name][rows] for name in NEW_KEYS}
            if len(self.new) <= i:
                self.new.append(mine)
            else:
                self.new[i] = {n: torch.cat([self.new[i][n], mine[n]]) for n in NEW_KEYS}
            keys = self.new[i]
            base = random_context(
                prompt.shape,
                prompt.length + len(keys["k"]),
                seed=prompt.seed,
                request=prompt.request,
                static=prompt.static,
            )
            contexts.append(
                GrownContext(
                    base, keys["k"], keys["k_scale"], keys["v"], keys["v_scale"], keys["index_k"]
                )
            )
        return contexts


@dataclass
class LayerRun:
    """One layer of one step: its launch and its verdicts, those on the chain so far at the end."""

    step: int
    layer: int
    result: StepResult
    verdicts: list[Verdict]


class DecodeLoop:
    """``steps`` decode steps of ``tokens`` rows through ``layers`` sparse layers.

    ``prompt``: keys that each request already has, one number or one per request; every step adds
    ``q_len``. The other options are ``DecodeStep``'s. Weights of layer i are drawn from
    ``seed`` + i. Raises ValueError with one sentence for anything out of range.
    """

    def __init__(
        self,
        shape: RankShape | None = None,
        tokens: int = 1,
        *,
        layers: int = 3,
        steps: int = 4,
        prompt: int | Sequence[int] = 2046,
        q_len: int = 1,
        npes: int | None = None,
        layout: CacheLayout | None = None,
        experts: Sequence[int] | None = None,
        seed: int = 0,
        memory: Memory | None = None,
    ) -> None:
        if layers < 1 or steps < 1:
            raise ValueError(f"layers and steps must be at least 1, got {layers} and {steps}")
        self.shape = shape or RankShape()
        self.tokens, self.layers, self.steps, self.q_len = tokens, layers, steps, q_len
        self.npes = self.shape.tp if npes is None else npes
        self.layout, self.seed = layout or CacheLayout(), seed
        requests = tokens // q_len
        self.prompt = [prompt] * requests if isinstance(prompt, int) else list(prompt)
        self._options: dict[str, Any] = {"experts": experts, "q_len": q_len, "npes": self.npes}
        self._memory = memory

    # --- what the layers stand on ---

    def prepare(self) -> DecodeLoop:
        """Mailboxes, the two (ar, h2) buffers, and every layer with its weights and caches."""
        if self._memory is None:
            from m3lab.interpreter import Memory

            self._memory = Memory()
        self.mailboxes = Mailboxes.on(self._memory, self.shape, self.npes)
        self.buffers = [[self._pair(rank, i) for i in (0, 1)] for rank in range(self.npes)]
        self.stack = [self._layer(i) for i in range(self.layers)]
        self.histories = [History(self._prompts(i)) for i in range(self.layers)]
        self.chain = [History(self._prompts(i)) for i in range(self.layers)]
        return self

    def _pair(self, rank: int, i: int) -> dict[str, Allocation]:
        """The (ar, h2) buffer ``i`` of a rank, by the kernel's argument names."""
        assert self._memory is not None
        nbytes = self.tokens * self.shape.hidden * 2
        return {
            name: self._memory.alloc(f"{name}_{i}", nbytes, rank=rank)
            for name in ("ar_out", "h_mid")
        }

    def _prompts(self, layer: int) -> list[KVContext]:
        static = self.layout.static_scale
        return [
            random_context(self.shape.model, n, seed=self.seed + layer, request=i, static=static)
            for i, n in enumerate(self.prompt)
        ]

    def _layer(self, i: int) -> DecodeStep:
        step = DecodeStep(
            self.shape,
            self.tokens,
            context=self.prompt,
            room=self.steps * self.q_len,
            layout=self.layout,
            until=None,
            seed=self.seed + i,
            layer=FIRST_SPARSE_LAYER + i,
            memory=self._memory,
            mailboxes=self.mailboxes,
            outputs=[pair[(i + 1) % 2] for pair in self.buffers],
            **self._options,
        )
        return step.prepare()

    # --- running ---

    def embeddings(self, number: int) -> Tensor:
        """bf16 [tokens, hidden]: what the step's tokens put into the first layer."""
        gen = torch.Generator().manual_seed(self.seed * 9973 + number)
        return torch.randn(self.tokens, self.shape.hidden, generator=gen).bfloat16()

    def run(self, **options: Any) -> Iterator[LayerRun]:
        """Every layer of every step in order; ``options`` go to the interpreter's ``run``."""
        for number in range(self.steps):
            self.mailboxes.next_step()
            embedded = self.embeddings(number)
            for pairs in self.buffers:
                pairs[0]["ar_out"].write(embedded)
                pairs[0]["h_mid"].write(torch.zeros_like(embedded))
            chained = embedded.float(), torch.zeros_like(embedded).float()
            for i in range(self.layers):
                result = self._launch(i, options)
                chained = self._chained(i, *chained)
                verdicts = self.stack[i].verify(result) + self._end(result, chained)
                yield LayerRun(number, i, result, verdicts)

    def _launch(self, i: int, options: dict[str, Any]) -> StepResult:
        step = self.stack[i]
        shape = (self.tokens, self.shape.hidden)
        source = self.buffers[0][i % 2]
        ar, res = (source[name].read(torch.bfloat16, shape) for name in ("ar_out", "h_mid"))
        pre = self._pre_attention(step.weights, self.histories[i], ar, res)
        contexts = self.histories[i].insert(pre, self.q_len)
        inputs = StepInputs(
            h_in=pre.normed.h.bfloat16(),
            q=pre.q.bfloat16(),
            iq=pre.iq.bfloat16(),
            contexts=contexts,
        )
        step.advance(inputs)
        return step.run(new_step=False, **options)

    def _pre_attention(
        self, weights: LayerWeights, history: History, ar: Tensor, res: Tensor
    ) -> ref.PreAttention:
        """K1 by the reference, at the positions that the history has come to."""
        done = len(history.new[0]["k"]) if history.new else 0
        lengths = [n + done + self.q_len for n in self.prompt]
        positions = [row.position for row in ref.step_rows(lengths, self.q_len)]
        static = self._static()
        model = self.shape.model
        return ref.pre_attention(weights, model, ar, res, torch.tensor(positions), static)

    def _static(self) -> tuple[float, float] | None:
        if not self.layout.static_scale:
            return None
        prompt = self.histories[0].prompts[0]
        return prompt.k_scale_static, prompt.v_scale_static

    # --- the reference on its own ---

    def _chained(self, i: int, ar: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
        """(ar, h2) after layer ``i`` by the reference alone, from its own (ar, res)."""
        weights, history = self.stack[i].weights, self.chain[i]
        ar, res = ar.bfloat16(), res.bfloat16()
        pre = self._pre_attention(weights, history, ar, res)
        contexts = history.insert(pre, self.q_len)
        rows = ref.step_rows([c.length for c in contexts], self.q_len)
        ranks = list(range(self.npes))
        scores = ref.score_rows(pre.iq, rows, contexts, self.shape.model.sm_scale)
        h, static = pre.normed.h, self._static()
        attention = ref.attention_half(
            weights, self.shape, pre.q, h, rows, contexts, scores, ranks, static
        )
        mlp = ref.mlp_half(weights, self.shape, attention.a, h, ranks)
        return mlp.out, attention.h_mid

    def _end(self, result: StepResult, chained: tuple[Tensor, Tensor]) -> list[Verdict]:
        """The layer's two outputs against the reference that has run on its own."""
        views = result.ranks[0]
        out = []
        for name, want in zip(("ar_out", "h_mid"), chained, strict=True):
            error = rel_l2(views[name], want)
            name = f"loop_{name}"
            out.append(Verdict(name, 0, None, "chained", error, EXACT_ALARM, error <= EXACT_ALARM))
        return out

    def close(self) -> None:
        """Free the loop's device memory. Idempotent."""
        for step in self.stack:
            step.close()
        self.mailboxes.free()
        for pairs in self.buffers:
            for pair in pairs:
                for allocation in pair.values():
                    allocation.free()

    def __enter__(self) -> DecodeLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
