"""From the probe's events to the parts of a round: which of its time was HTTP, queue, forward and reply. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["PARTS", "Event", "read_events", "round_parts"]

# Part, and the event that ends it: the first of its name after the event before, or the last where it says so. The
# client's own begin and end stand around them, so the parts add up to the round.
PARTS: Final[tuple[tuple[str, str, bool], ...]] = (
    ("http_in", "tokenizer_in", False),  # client's JSON, TCP, uvicorn, pydantic
    ("tokenizer_manager", "scheduler_sent", False),
    ("to_scheduler", "scheduler_in", False),  # ZeroMQ, unpickling, until the scheduler's loop looks
    ("queue", "pass_begin", False),  # prefix match, allocation, building the batch
    ("launch", "pass_launched", True),  # the host's work of the pass
    ("wait_gpu", "pass_done", True),  # until its results are on the host
    ("results", "reply_sent", True),
    ("detokenizer", "tokenizer_out", False),  # both hops; one hop without a detokenizer
    ("http_out", "", False),  # reply's JSON, TCP, the client's parsing
)


@dataclass(frozen=True, slots=True)
class Event:
    """time_s: CLOCK_MONOTONIC. number: what the event carries, if anything."""

    time_s: float
    name: str
    number: float | None


def read_events(texts: Iterable[str]) -> list[Event]:
    """All events of all processes in order of time. A line cut by a kill is left out."""
    events = []
    for text in texts:
        for line in text.splitlines():
            fields = line.split(" ")
            if len(fields) in (2, 3) and fields[0].isdecimal():
                number = float(fields[2]) if len(fields) == 3 else None
                events.append(Event(int(fields[0]) / 1e9, fields[1], number))
    return sorted(events, key=lambda event: event.time_s)


def round_parts(events: list[Event], begin_s: float, end_s: float) -> dict[str, float]:
    """Milliseconds of each part of the round from ``begin_s`` to ``end_s``, during which nothing else ran.

    A station that does not exist (no detokenizer, another server in front) adds its time to the next part. Also
    ``gpu``: the passes' own time on the GPU, where it was measured, and ``passes``: how many there were.
    """
    low = bisect.bisect_left(events, begin_s, key=lambda event: event.time_s)
    high = bisect.bisect_right(events, end_s, key=lambda event: event.time_s)
    inside = events[low:high]
    parts: dict[str, float] = {}
    reached = begin_s
    for name, event_name, takes_last in PARTS:
        times = [e.time_s for e in inside if e.name == event_name and e.time_s >= reached]
        if not event_name:
            at = end_s
        elif times:
            at = times[-1] if takes_last else times[0]
        else:
            continue
        parts[name] = (at - reached) * 1e3
        reached = at
    gpu = [e.number for e in inside if e.name == "pass_gpu_ms" and e.number is not None]
    if gpu:
        parts["gpu"] = sum(gpu)
    parts["passes"] = float(sum(e.name == "pass_begin" for e in inside))
    return parts
