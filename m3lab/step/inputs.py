"""What a decode step is given, and whether it can be used: tensors, contexts, weights, addresses.

Every refusal is a ValueError of one sentence. Nothing here lays anything out: ``step`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from m3lab.kernels.arguments import INT32_ARGS
from m3lab.model.weights import LayerWeights
from m3lab.reference import kernel as ref
from m3lab.reference.kernel import Context

if TYPE_CHECKING:
    from m3lab.step import DecodeStep

POINTER_ALIGN = 16  # the widest load of the kernel


class RequestKeys(Context, Protocol):
    """A request's keys, ``caches.KVContext`` or one like it; the scales of a static cache."""

    @property
    def k_scale_static(self) -> float: ...
    @property
    def v_scale_static(self) -> float: ...


@dataclass
class StepInputs:
    """A step's tensors for the whole model, plain: what a serving engine would hold.

    ``h_in`` bf16 [tokens, hidden]; ``q`` bf16 [tokens, q_heads, 128] after norm and RoPE; ``iq``
    bf16 [tokens, index_heads, 128]; ``contexts`` one per live request. ``scores``: fp32
    [tokens, index_heads, blocks] block scores, or None to have the reference make them from
    ``iq``.
    """

    h_in: Tensor
    q: Tensor
    iq: Tensor
    contexts: Sequence[RequestKeys]
    scores: Tensor | None = None


def check_inputs(step: DecodeStep, inputs: StepInputs) -> None:
    """ValueError naming the first tensor whose dtype or shape is not what the step needs."""
    m, n = step.model, step.tokens
    expected = {
        "h_in": (torch.bfloat16, (n, m.hidden)),
        "q": (torch.bfloat16, (n, m.q_heads, m.head_dim)),
        "iq": (torch.bfloat16, (n, m.index_heads, m.index_dim)),
    }
    if inputs.scores is not None:
        blocks = max(ref.context_blocks(k)[1] for k in step.seq_lens)
        expected["scores"] = (torch.float32, (n, m.index_heads, blocks))
    for name, (dtype, shape) in expected.items():
        tensor = getattr(inputs, name)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be {str(dtype).removeprefix('torch.')} {list(shape)}, "
                f"got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
    if not isinstance(inputs.contexts, list | tuple):
        raise ValueError(
            "contexts must be a list, one context per live request, "
            f"got {type(inputs.contexts).__name__}"
        )
    lengths = [ctx.length for ctx in inputs.contexts]
    if lengths != step.context:
        raise ValueError(
            f"contexts must hold {step.context} keys, one context per live request, got {lengths}"
        )


def check_weights(step: DecodeStep, weights: LayerWeights) -> None:
    """ValueError unless ``weights`` are a plain, unshuffled layer of the step's model."""
    if not isinstance(weights, LayerWeights):
        raise ValueError(
            "weights must be LayerWeights: the model's plain layer, which the step shards and "
            f"shuffles itself; got {type(weights).__name__}"
        )
    if weights.shape != step.model:
        raise ValueError(
            f"weights must be of the step's model {step.model}, got a layer of {weights.shape}"
        )


def check_pointers(args: dict[str, int]) -> None:
    """ValueError for a tensor argument whose address no 16-byte load may use."""
    for name, value in args.items():
        if name not in INT32_ARGS and value % POINTER_ALIGN:
            raise ValueError(
                f"{name}: the address must be a multiple of {POINTER_ALIGN}, got {value:#x}"
            )
