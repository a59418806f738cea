"""A step's byte floors by stage, from the stage records. No times here.

A floor counts each needed byte once per rank and step (``m3lab.kernels.floors`` holds the
formulas). A kernel moves more: several CTAs read the same table, a poll is read again. The ratio of
moved to floor is what a report shows.
"""

from __future__ import annotations

from m3lab.kernels.floors import Floor, StepBytes, expert_bytes, selected_keys
from m3lab.kernels.stages import POST_ATTN, stages_until
from m3lab.model.shapes import CacheLayout, RankShape

__all__ = ["Floor", "expert_bytes", "selected_keys", "step_floors"]

HBM_PEAK = 8.0e12  # bytes/s, MI355X data sheet
HBM_SEEN = 7.2e12  # bytes/s measured upstream on the part, not here


def step_floors(
    shape: RankShape,
    seq_lens: list[int],
    npes: int,
    layout: CacheLayout | None = None,
    distinct_experts: int | None = None,
) -> dict[str, Floor]:
    """Floors by stage of one rank's step with rows that see ``seq_lens`` keys.

    ``distinct_experts``: routed experts the step's rows choose together; None leaves the router
    and the experts out (the attention half).
    """
    step = StepBytes(shape, tuple(seq_lens), npes, layout or CacheLayout(), distinct_experts or 0)
    stages = POST_ATTN if distinct_experts is not None else stages_until("o_proj")
    return {stage.name: stage.floor(step) for stage in stages}
