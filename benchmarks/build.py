"""Seconds to build the post-attention kernel: each phase cold, then loading it from the cache.

Run: python benchmarks/build.py [TOKENS ...]   (default 1 2 4). Every build goes to a cache of its
own that is deleted afterwards. Prints a table, a row per token count, and the instruction count.
The kernel stops after the stage "o_proj": later stages are not built yet.
"""

import argparse
import tempfile
import time
from pathlib import Path

import pandas as pd

from m3lab.compile.isa import figures_of
from m3lab.compile.trace import build_cached, require_flydsl, spec_key
from m3lab.model.shapes import MAX_TOKENS, ModelShape, RankShape

PHASES = ("trace", "passes", "lower", "asm", "size")


def measure(tokens: int) -> dict[str, float]:
    """One cold build with all parts but the code object, then one from its cache."""
    from m3lab.kernels.post_attn import ARG_NAMES, build_post_attn_kernel

    model = ModelShape()
    parameters = {
        "npes": 4,
        "sm_scale": model.sm_scale,
        "eps": model.rms_eps,
        "route_scale": model.route_scale,
        "shared_weight": model.shared_weight,
        "swiglu_limit": model.swiglu_limit,
        "init_blocks": model.init_blocks,
        "local_blocks": model.local_blocks,
        "tokens": tokens,
        "shape": RankShape(model, 4),
        "until": "o_proj",
    }

    def make():
        return build_post_attn_kernel(**parameters), [0] * len(ARG_NAMES)

    emit = ("program", "asm", "size")
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        made = build_cached(spec_key(parameters), make, emit=emit, cache=Path(cache))
        cold = time.perf_counter() - start
        start = time.perf_counter()
        build_cached(spec_key(parameters), make, emit=("program",), cache=Path(cache))
        cached = time.perf_counter() - start
    phases = {name: made.seconds.get(name, 0.0) for name in PHASES}
    instructions = figures_of(made).instructions
    return {**phases, "cold": cold, "cached program": cached, "instructions": instructions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokens", nargs="*", type=int, default=[1, 2, 4])
    tokens = parser.parse_args().tokens
    if any(not 1 <= n <= MAX_TOKENS for n in tokens):
        parser.error(f"tokens must be in 1..{MAX_TOKENS}; given {tokens}")
    require_flydsl("building kernels")
    import m3lab.kernels.post_attn  # noqa: F401  (so that no build is charged for the imports)

    frame = pd.DataFrame([measure(n) for n in tokens], index=pd.Index(tokens, name="tokens"))
    print("seconds (instructions: a count)")
    print(frame.to_string(float_format=lambda x: f"{x:.2f}"))


if __name__ == "__main__":
    main()
