"""What one rank published in a launch, as plain tensors read from its regions and outputs.

Reading only: where the regions lie is ``memory_layout``'s, what the values should be ``verify``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m3lab.kernels.tuning import TWO_SHOT_FROM
from m3lab.layout.buffers import Allocation, PeerBuffers, Scratch

if TYPE_CHECKING:
    from m3lab.step import DecodeStep

TOKENS_SECOND = ("partials", "ffn", "keys", "sigmoids")  # views whose token axis is the second


@dataclass
class RankViews:
    """What one rank published, as plain tensors; None where this build does not publish it.

    ``sp_o`` fp32 (bf16 values) [tokens, 8, heads, 128]; ``sp_m``, ``sp_l`` fp32
    [tokens, 8, heads]; ``table`` int32 [tokens, kv heads * 130]; ``attnq`` uint8 [tokens, o_k] with
    ``attnq_s`` fp32 [tokens]; ``partials`` fp32 (bf16 values) [npes, tokens, hidden]: every rank's
    o_proj rows as pushed to this one; ``a`` and ``h_mid`` fp32 (bf16 values) [tokens, hidden].
    From the router: ``xn8`` uint8 E4M3 [tokens, hidden] with ``xsc`` uint8 E8M0
    [tokens, hidden / 32]; ``keys`` int32 and ``sigmoids`` fp32 [copies, tokens, experts]. From the
    experts: ``experts`` int32 and ``weights`` fp32 [tokens, slots], the shared expert last;
    ``intermediates`` fp32 (bf16 values) [tokens, slots, inter]; ``ffn`` as ``partials``, of the MLP
    (a rank alone pushes nothing); ``ar_out`` fp32 (bf16 values) [tokens, hidden].
    ``missing``: regions with a pair whose tag is not this launch's.
    """

    sp_o: Tensor
    sp_m: Tensor
    sp_l: Tensor
    table: Tensor
    attnq: Tensor | None
    attnq_s: Tensor | None
    partials: Tensor
    a: Tensor
    h_mid: Tensor | None
    xn8: Tensor | None = None
    xsc: Tensor | None = None
    keys: Tensor | None = None
    sigmoids: Tensor | None = None
    experts: Tensor | None = None
    weights: Tensor | None = None
    intermediates: Tensor | None = None
    ffn: Tensor | None = None
    ar_out: Tensor | None = None
    missing: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Tensor:
        """A published tensor by name; ValueError where this build does not publish it."""
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"this build does not publish {name}")
        return tensor

    def rows(self, name: str, rows: int) -> Tensor:
        """The first ``rows`` rows of a published tensor."""
        tensor = self[name]
        return tensor[:, :rows] if name in TOKENS_SECOND else tensor[:rows]

    def tensors(self) -> dict[str, Tensor]:
        """Every published tensor, by name."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: t for name, t in named.items() if isinstance(t, Tensor)}


def publishes_h_mid(
    tokens: int, until: str | None = "o_proj", owner_from: int = TWO_SHOT_FROM
) -> bool:
    """Whether a build writes h_mid: the router does at 1 token and from ``owner_from`` on."""
    return until != "o_proj" or 2 <= tokens < owner_from


def read_views(
    step: DecodeStep,
    rank: int,
    scratch: Scratch,
    peers: PeerBuffers,
    outputs: dict[str, Allocation],
    number: int,
) -> RankViews:
    """Read every region this build publishes; ``number`` is the step of the launch's tags."""
    reader = _Reader(step, rank, scratch, peers, outputs, number)
    views = reader.attention()
    if step.until != "o_proj":
        reader.router(views)
    if step.until is None:
        reader.experts(views)
    return views


@dataclass
class _Reader:
    step: DecodeStep
    rank: int
    scratch: Scratch
    peers: PeerBuffers
    outputs: dict[str, Allocation]
    number: int
    missing: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.step.tokens

    def region(self, name: str, first: int | None = None) -> Tensor:
        """Typed values of a scratch region, or of its ``first`` entries; its name is noted where a
        tag is not this launch's."""
        values, current = self.scratch.view(
            name, step=self.number, layer=self.step.layer, tokens=self.tokens
        )
        if current is not None and not bool(current[:first].all()):
            self.missing.append(name)
        return values[:first]

    def pushed(self, name: str) -> Tensor:
        """fp32 [npes, tokens, hidden]: what every rank pushed into this one's peer region."""
        values, current = self.peers.view(
            self.rank, name, step=self.number, layer=self.step.layer, tokens=self.tokens
        )
        if not bool(current.all()):
            self.missing.append(name)
        return values.float().reshape(self.step.npes, self.tokens, -1)

    def output(self, name: str) -> Tensor:
        shape = (self.tokens, self.step.model.hidden)
        return self.outputs[name].read(torch.bfloat16, shape).float()

    def attention(self) -> RankViews:
        n, heads, dim = self.tokens, self.step.shape.q_heads, self.step.model.head_dim
        tuning, until = self.step.tuning, self.step.until
        merged = n > 1 and not tuning.merge_in_output
        h_mid = publishes_h_mid(n, until, tuning.two_shot_from)
        return RankViews(
            sp_o=self.region("sp_o").float().reshape(n, 8, heads, dim),
            sp_m=self.region("sp_m").reshape(n, 8, heads),
            sp_l=self.region("sp_l").reshape(n, 8, heads),
            table=self.region("sparse_table").reshape(n, -1),
            attnq=self.region("attnq").reshape(n, -1) if merged else None,
            attnq_s=self.region("attnq_s").reshape(n) if merged else None,
            partials=self.pushed("attn"),
            a=self.region("a").float().reshape(n, -1),
            h_mid=self.output("h_mid") if h_mid else None,
            missing=self.missing,
        )

    def router(self, views: RankViews) -> None:
        n = self.tokens
        views.xn8 = self.region("xn8").reshape(n, -1)
        views.xsc = self.region("xsc").reshape(n, -1).to(torch.uint8)
        pairs = self.region("scores", self.step.tuning.score_copies)
        views.keys = pairs[..., 0].contiguous()
        views.sigmoids = pairs[..., 1].contiguous().view(torch.float32)

    def experts(self, views: RankViews) -> None:
        n, slots = self.tokens, self.step.model.top_k + 1
        record = self.region("sel").reshape(n, 2, slots)
        views.experts = record[:, 0].contiguous()
        views.weights = record[:, 1].contiguous().view(torch.float32)
        views.intermediates = self.region("mid").float().reshape(n, slots, -1)
        views.ar_out = self.output("ar_out")
        # a rank alone pushes nothing: its partial row is the output
        views.ffn = self.pushed("ffn") if self.step.npes > 1 else views.ar_out[None]
