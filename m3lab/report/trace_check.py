"""Whether a trace file is one that a viewer shows as meant: checks for ``timeline.write_trace``.

Plain JSON in, counts or one sentence out, after the Trace Event Format's document (complete events,
flow events, metadata). What the trace is about, and making it, is ``timeline``'s.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

KINDS = ("modelled", "measured")  # whose clock times are of
# phase -> the fields that the Trace Event Format asks of it, and their kinds
_Kinds = dict[str, tuple[type, ...]]
_NUMBER = (int, float)
_TRACK: _Kinds = {"pid": (int,), "tid": (int,), "name": (str,)}
FIELDS: dict[str, _Kinds] = {
    "M": _TRACK | {"args": (dict,)},
    "X": _TRACK | {"ts": _NUMBER, "dur": _NUMBER, "cat": (str,)},
    "s": _TRACK | {"ts": _NUMBER, "id": (int, str), "cat": (str,)},
    "f": _TRACK | {"ts": _NUMBER, "id": (int, str), "cat": (str,), "bp": (str,)},
}


def check_trace(path: Path) -> dict[str, Any]:
    """What a trace file holds: ``time`` (modelled or measured), processes, tracks, slices, flows.

    ``path``: JSON, gzipped where the name ends in ``.gz``.
    Raises ValueError, in one sentence, for a file that is no trace or that a viewer would show
    wrong: an event without the fields of its phase, a negative duration, slices of a track that
    overlap and do not nest, a flow without exactly one start and one later finish, an end of a flow
    outside every slice of its track, or times that do not say whose clock they are of.
    """
    try:
        content = Path(path).read_bytes()
        data = json.loads(gzip.decompress(content) if Path(path).suffix == ".gz" else content)
    except (ValueError, EOFError, gzip.BadGzipFile) as exc:
        raise ValueError(f"{path}: not JSON ({exc})") from exc
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError(f"{path}: not a trace: it must be an object with a list traceEvents")
    events = data["traceEvents"]
    try:
        for number, event in enumerate(events):
            _check_fields(number, event)
        time = _check_time(data, events)
        tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for event in events:
            if event["ph"] == "X":
                tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        for track, slices in tracks.items():
            _check_nesting(track, slices)
        flows = _check_flows(events, tracks)
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from None
    return {
        "time": time,
        "processes": len({pid for pid, _ in tracks}),
        "tracks": len(tracks),
        "slices": sum(map(len, tracks.values())),
        "flows": flows,
    }


def _check_fields(number: int, event: Any) -> None:
    if not isinstance(event, dict) or event.get("ph") not in FIELDS:
        phase = event.get("ph") if isinstance(event, dict) else event
        raise ValueError(f"event {number} must be of phase {', '.join(FIELDS)}, got {phase!r}")
    for name, kinds in FIELDS[event["ph"]].items():
        value = event.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            words = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"event {number} of phase {event['ph']} needs {name} ({words}), got {value!r}"
            )
        least = 1 if name in ("pid", "tid") else 0  # viewers take number 0 for the idle task
        if isinstance(value, _NUMBER) and name != "id" and not least <= value < float("inf"):
            raise ValueError(f"event {number} must have {name} of at least {least}, got {value}")


def _check_time(data: dict[str, Any], events: list[dict[str, Any]]) -> str:
    """Whose clock the times are of: said once for all, by every process and by every slice."""
    time = (data.get("otherData") or {}).get("time")
    if time not in KINDS:
        raise ValueError(f"otherData.time must be {' or '.join(KINDS)}, got {time!r}")
    names = {
        e["pid"]: e["args"].get("name") for e in events if (e["ph"], e["name"]) == _PROCESS_NAME
    }
    for event in events:
        if event["ph"] != "M" and time not in event["cat"]:
            raise ValueError(f"a {time} trace has an event of category {event['cat']!r}")
        if time not in str(names.get(event["pid"])):
            raise ValueError(
                f"process {event['pid']} must have a name that says {time}, "
                f"got {names.get(event['pid'])!r}"
            )
    return str(time)


_PROCESS_NAME = ("M", "process_name")
_CLOSE = 5e-4  # us: half of the nanosecond that times are written to


def _check_nesting(track: tuple[int, int], slices: list[dict[str, Any]]) -> None:
    """A slice ends before the next one of its track begins, or holds it whole."""
    open_until: list[float] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= start + _CLOSE:
            open_until.pop()
        if open_until and end > open_until[-1] + _CLOSE:
            raise ValueError(
                f"on track {track[1]} of process {track[0]} the slice {event['name']!r} "
                f"({start}..{end:.3f} us) overlaps one that ends at {open_until[-1]:.3f} us"
            )
        open_until.append(end)


def _check_flows(events: list[dict[str, Any]], tracks: dict[Any, list[dict[str, Any]]]) -> int:
    """Each flow's two ends; how many flows there are."""
    ends: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault((event["cat"], event["id"]), []).append(event)
    for (_, number), pair in ends.items():
        phases = sorted(e["ph"] for e in pair)
        if phases != ["f", "s"]:
            raise ValueError(
                f"flow {number} must have one start and one finish, got {' '.join(phases)}"
            )
        start, finish = sorted(pair, key=lambda e: e["ph"], reverse=True)
        if finish["ts"] < start["ts"]:
            raise ValueError(
                f"flow {number} must not end before it starts, got {start['ts']} to {finish['ts']}"
            )
        for event in pair:
            mine = tracks.get((event["pid"], event["tid"]), [])
            if not any(
                s["ts"] - _CLOSE <= event["ts"] <= s["ts"] + s["dur"] + _CLOSE for s in mine
            ):
                raise ValueError(
                    f"flow {number}'s end at {event['ts']} us lies in no slice of track "
                    f"{event['tid']} of process {event['pid']}"
                )
    return len(ends)
