"""Launches of the whole kernel that the router's and the experts' tests look at, one a process.

Small hidden and intermediate sizes; unwritten memory is NaN, every check is on, and experts outside
the pool hold NaN scales.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from m3lab.interpreter import Memory
from m3lab.model.shapes import ModelShape, RankShape
from m3lab.model.weights import random_layer
from m3lab.step import DecodeStep

POOL = (0, 1, 2, 3, 40, 63, 64, 127)


def rank_shape(tp=4, inter=None, **model):
    inter = inter or 128 * tp
    return RankShape(
        ModelShape(**({"hidden": 2048, "inter": inter, "shared_inter": inter} | model)), tp
    )


def run_whole(tokens, *, shape=None, bias=None, poke=None, run=None, **options):
    """(prepared step, its result); ``bias``: every expert's correction bias, experts outside the
    pool set to -4; ``poke(step)`` changes the prepared memory; ``run``: options of the launch."""
    given = {
        "npes": 1,
        "context": 200,
        "until": None,
        "experts": POOL,
        "memory": Memory(poison=True),
    }
    step = DecodeStep(shape or rank_shape(), tokens, **(given | options))
    weights = None
    if bias is not None:
        outside = torch.full((128,), -4.0)
        outside[list(POOL)] = bias[list(POOL)]
        weights = replace(random_layer(step.model, 0, experts=POOL), bias=outside)
    step.prepare(weights=weights)
    if poke is not None:
        poke(step)
    return step, step.run(**(run or {}))


def silence_padding(step):
    """The padding rows' one key has a value of zeros, and their residual is zero."""
    rank = step._ranks[0]
    rank.caches._v.write(torch.zeros(8 * 2048, dtype=torch.uint8))
    h_in = step.inputs.h_in.clone()
    h_in[step.live_rows :] = 0
    rank.placed["h_in"].write(h_in)


@lru_cache
def one_token():
    return run_whole(1)


@lru_cache
def three_tokens():
    return run_whole(3, bias=torch.linspace(0.3, -0.3, 128))


@lru_cache
def four_tokens():
    """From four tokens on a token's tasks have CTAs of their own, and the shared expert's tasks run
    after the routing."""
    return run_whole(4)


@lru_cache
def other_constants():
    """A SwiGLU limit that most values pass, another route scale, another shared weight."""
    model = {"swiglu_limit": 0.5, "route_scale": 1.5, "shared_weight": 0.25}
    return run_whole(2, shape=rank_shape(**model))


@lru_cache
def equal_scores():
    """A live row, then a row of zeros: every logit of it is 0. No bias: a tie of all experts."""

    def no_bias(step):
        silence_padding(step)
        step._ranks[0].placed["bias"].write(torch.zeros(128))

    pool = (0, 1, 2, 3)  # what a tie picks; the live row's picks do not matter here
    return run_whole(2, pad_rows=1, poke=no_bias, until="router", experts=pool)
