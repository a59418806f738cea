"""Decode steps that several test modules look at: each runs once a process.

Small hidden size, full attention: the attention stages do not know the hidden size, and the output
projection only counts its tasks by it.
"""

from dataclasses import replace
from functools import lru_cache

import torch

from m3lab.interpreter import Memory
from m3lab.kernels.tuning import Tuning
from m3lab.model.shapes import CacheLayout, ModelShape, RankShape
from m3lab.step import DecodeStep

HIDDEN = 2048
INF = float("inf")
NAN = float("nan")


def rank_shape(**model):
    return RankShape(ModelShape(hidden=HIDDEN, **model))


def run_step(tokens, scores=None, model=None, change=None, poke=None, **options):
    """(prepared step, its result) of one launch; ``scores``: fp32 [tokens, blocks] for every index
    head; ``change(inputs)`` -> the inputs to use; ``poke(step)`` changes the prepared memory."""
    schedule = options.pop("schedule", {})
    # what nobody wrote is NaN, and an error where it matters
    memory = Memory(poison=True)
    step = DecodeStep(rank_shape(**(model or {})), tokens, memory=memory, **options)
    inputs = step.random_inputs()
    if scores is not None:
        every_head = scores[:, None].expand(-1, step.model.index_heads, -1)
        inputs = replace(inputs, scores=every_head.contiguous())
    if change is not None:
        inputs = change(inputs)
    step.prepare(inputs)
    if poke is not None:
        poke(step)
    return step, step.run(**schedule)


def selection_scores():
    """[4, 512]: rows of 1, 16, 17 and 512 blocks, hostile ones."""
    scores = torch.full((4, 512), NAN)
    scores[2, :17] = torch.arange(17.0)
    scores[2, [3, 9]] = NAN
    scores[2, 4] = -INF
    scores[3] = -5.0
    scores[3, [10, 300, 400]] = 7.0
    scores[3, 20:40] = NAN
    scores[3, 77] = INF
    scores[3, 5], scores[3, 6] = 0.0, -0.0
    return scores


@lru_cache
def four_rows():
    """Solo, four tokens: contexts of 1, 2048, 2049 and 65536 keys."""
    contexts = [1, 2048, 2049, 65536]
    return run_step(4, selection_scores(), npes=1, context=contexts)


def long_scores():
    """[2, 8192]: rows of 513 and 8192 blocks."""
    scores = torch.ones(2, 8192)
    scores[1] = -3.0
    scores[1, [0, 1023, 1024]] = 5.0  # both sides of a share's edge
    scores[1, 3072:4096] = NAN  # a whole share
    scores[1, 4096] = INF
    scores[1, 8190] = 2.0
    return scores


@lru_cache
def long_rows():
    """Solo, two tokens of long contexts: 65537 keys and 1M."""
    return run_step(2, long_scores(), npes=1, context=[65537, 1 << 20])


@lru_cache
def edge_rows():
    """Solo, two tokens of equal scores: as many blocks as are ranked by counting, and one more."""
    blocks = Tuning().rank_up_to
    contexts = [blocks * 128, blocks * 128 + 1]
    return run_step(2, torch.ones(2, blocks + 1), npes=1, context=contexts)


@lru_cache
def one_row():
    """Solo, one token of 300 keys: most partitions have no key."""
    return run_step(1, npes=1, context=300)


@lru_cache
def pinned_row():
    """Solo, one token of 40 blocks, two first and three last blocks pinned."""
    scores = torch.arange(40.0).flip(0)[None] - 100
    scores[0, 0] = scores[0, 1] = -INF
    return run_step(
        1, scores, {"init_blocks": 2, "local_blocks": 3}, npes=1, context=40 * 128 - 100
    )


@lru_cache
def verified_rows():
    """Four ranks, a request of two rows verified together; one allocation, static scales."""
    return run_step(2, npes=4, q_len=2, context=2306, layout=CacheLayout(16, True), seed=5)


def with_residual(value):
    """Inputs whose last row's residual and query are ``value``."""

    def change(inputs):
        h_in, q = inputs.h_in.clone(), inputs.q.clone()
        h_in[-1] = value
        q[-1] = value
        return replace(inputs, h_in=h_in, q=q)

    return change


@lru_cache
def padded(value):
    """Solo, a live row of 700 keys, then a padding row that holds ``value`` everywhere."""
    return run_step(2, npes=1, context=700, pad_rows=1, seed=2, change=with_residual(value))


def silence_block_0(step):
    values = step._ranks[0].caches._v
    values.write(torch.zeros(8 * 2048, dtype=torch.uint8))


@lru_cache
def silent():
    """Solo, a live row, then a padding row whose one key has a value of zeros."""
    return run_step(2, npes=1, context=300, pad_rows=1, seed=3, poke=silence_block_0)


def failures(step, result):
    return [v for v in step.verify(result) if not v.passed]
