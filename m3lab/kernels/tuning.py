"""The kernel's schedule knobs: what a tuner turns, with today's best settings as defaults.

Most stand for a change whose gain was measured by others on an MI355X (docs/model.md's table), so
that every one of them can be modelled, and swept as an ablation. Plain values only: what a knob
does is decided where the schedule is, in ``placement`` and the stage modules. None leaves a choice
to ``Plan``. No knob changes what a step computes, not by a bit.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields

from m3lab.layout.regions import SCORE_COPIES
from m3lab.model.shapes import MAX_TOKENS

PER_TOKEN_MAX = 4  # the most that the narrow form is built for
GROUPED_FROM = 5
TWO_SHOT_FROM = 12
CHOICES: dict[str, tuple[int, ...]] = {
    "score_copies": tuple(n for n in (1, 2, 4, 8) if n <= SCORE_COPIES),
    "rank_up_to": (128, 256, 512),
    "down_in_flight": (1, 2),
    "grouped_from": tuple(range(1, PER_TOKEN_MAX + 2)),
    "two_shot_from": tuple(range(GROUPED_FROM, MAX_TOKENS + 2)),
}
OPTIONAL = ("ug_by_token", "down_in_flight")  # may be None


@dataclass(frozen=True)
class Tuning:
    """Schedule knobs of one build of the post-attention kernel; figures are microseconds, MI355X.

    ``score_copies``: copies of the router scores, polled by as many parties of CTAs (1 -> 8:
    37.3 -> 35.9 at one token).
    ``early_down_weights``: token 0's down weights requested with the first up / gate task's, not
    after it (32.8 -> 34.3 at one token).
    ``poll_all``: every thread polls every split partition at once; False: wave 0 waits first
    (True: +0.4 at one token).
    ``router_by_token``: the router's tasks of one token after another on the same CTAs; False: a
    CTA per (token, experts) (74.7 -> 64.1 at four tokens).
    ``merge_in_output``: several tokens' partitions merged in every output task; False: by one CTA
    a token (True: +14 at four tokens).
    ``spin_whole_row``: every thread spins on the whole normed row; False: wave 0 waits for its
    last words first (True: +3 on the shared expert at four tokens).
    ``rows_before_routing``: all waves fetch the normed rows before the first ones route; False: the
    waves that do not route fetch them meanwhile (nobody published a figure).
    ``serial_rank``: one lane counts a block's rank over all keys; False: eight share it (1.9 for
    61 keys).
    ``rank_up_to``: blocks of a context up to which blocks are ranked by counting, every one against
    every other; longer contexts are sorted by a token's eight CTAs together, one hop more.
    ``shared_after_routing``: the shared expert's tasks after the routing or before it (after:
    -0.42 of a layer at four tokens).
    ``ug_by_token``: routed up / gate tasks on CTAs of their token, or round robin (by token: -0.3
    of a layer at four tokens).
    ``pad_rows``: LDS rows padded so that a matrix operand's 16 rows meet no bank twice (unpadded:
    +3 a task at 16 tokens).
    ``down_in_flight``: tokens whose down weights are in flight when the down products start.
    ``grouped_from``: tokens from which the experts' form is the wide one.
    ``two_shot_from``: tokens from which all-reduces go through an owner rank; 17: never.

    Raises ValueError, in one sentence, for a value that no build has.
    """

    score_copies: int = SCORE_COPIES
    early_down_weights: bool = False
    poll_all: bool = False
    router_by_token: bool = False
    merge_in_output: bool = False
    spin_whole_row: bool = False
    rows_before_routing: bool = False
    serial_rank: bool = False
    rank_up_to: int = 256
    shared_after_routing: bool = True
    ug_by_token: bool | None = None
    pad_rows: bool = True
    down_in_flight: int | None = None
    grouped_from: int = GROUPED_FROM
    two_shot_from: int = TWO_SHOT_FROM

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), CHOICES.get(f.name, (False, True))
            if value is None and f.name in OPTIONAL:
                continue
            # 1 == True: the type counts too
            if type(value) is not type(choices[0]) or value not in choices:
                allowed = ", ".join(map(str, choices))
                none = " or None" if f.name in OPTIONAL else ""
                raise ValueError(f"{f.name} must be one of {allowed}{none}, got {value!r}")

    def changes(self) -> dict[str, int | None]:
        """The knobs that are not at their default."""
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}

    @property
    def number(self) -> int:
        """A short number of the changed knobs for a kernel's name; 0 for the defaults."""
        changed = self.changes()
        return zlib.crc32(repr(sorted(changed.items())).encode()) if changed else 0
