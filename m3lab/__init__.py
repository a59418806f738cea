"""The single-launch MiniMax-M3 decode layer as a workbench: build, run, verify, sweep, report.

The names below are what a notebook needs; each is imported when it is first used, so that
``import m3lab`` is quick and works without flydsl. What builds a kernel says when it needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3lab import reference, sweep
    from m3lab.interpreter.run import run
    from m3lab.kernels.post_attn import build_post_attn_kernel
    from m3lab.layout.buffers import PeerBuffers, Scratch, StepCounter
    from m3lab.layout.shuffle import (
        mxfp8_a_tiles,
        shuffle_scale,
        shuffle_weight,
        unshuffle_scale,
        unshuffle_weight,
    )
    from m3lab.model.checkpoint import load_layer
    from m3lab.model.shapes import CacheLayout, IndexHeads, ModelShape, RankShape
    from m3lab.model.weights import random_layer
    from m3lab.step import DecodeStep

__version__ = "0.1.0"

_HOME = {
    "build_post_attn_kernel": "m3lab.kernels.post_attn",
    "shuffle_weight": "m3lab.layout.shuffle",
    "unshuffle_weight": "m3lab.layout.shuffle",
    "shuffle_scale": "m3lab.layout.shuffle",
    "unshuffle_scale": "m3lab.layout.shuffle",
    "mxfp8_a_tiles": "m3lab.layout.shuffle",
    "Scratch": "m3lab.layout.buffers",
    "PeerBuffers": "m3lab.layout.buffers",
    "StepCounter": "m3lab.layout.buffers",
    "ModelShape": "m3lab.model.shapes",
    "RankShape": "m3lab.model.shapes",
    "IndexHeads": "m3lab.model.shapes",
    "CacheLayout": "m3lab.model.shapes",
    "random_layer": "m3lab.model.weights",
    "load_layer": "m3lab.model.checkpoint",
    "DecodeStep": "m3lab.step",
    "run": "m3lab.interpreter.run",
}
_MODULES = ("reference", "sweep")
_LATER = ("build_pre_attn_kernel", "build_index_score_kernel")

__all__ = [
    "CacheLayout",
    "DecodeStep",
    "IndexHeads",
    "ModelShape",
    "PeerBuffers",
    "RankShape",
    "Scratch",
    "StepCounter",
    "build_post_attn_kernel",
    "load_layer",
    "mxfp8_a_tiles",
    "random_layer",
    "reference",
    "run",
    "shuffle_scale",
    "shuffle_weight",
    "sweep",
    "unshuffle_scale",
    "unshuffle_weight",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"m3lab.{name}")
    if name in _LATER:
        raise AttributeError(f"m3lab.{name} is not built yet")
    if name not in _HOME:
        raise AttributeError(f"m3lab has no {name!r}; it has {', '.join(__all__)}")
    if _HOME[name].startswith("m3lab.kernels"):
        from m3lab.compile.trace import require_flydsl

        require_flydsl(f"m3lab.{name}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
