"""What the drafter does with the messages that wait: merge those of one request, choose a batch, choose what to evict.

Pure. The I/O thread queues messages while the engine runs; when the engine is free, everything that waits becomes one
plan. Several messages of one request wait when a reply was late and the gateway went on: the newest one's round is the
only one worth drafting for, but the older ones' tokens and features still have to be applied, in order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wire.messages import DraftExtend
from wire.sampling import SamplingParams

__all__ = ["DraftPlan", "DraftWork", "Waiting", "choose_evictions", "drop_request", "merge_waiting", "plan_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A message that waits for the engine, and who gets the reply."""

    peer: bytes
    message: DraftExtend


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWork:
    """All waiting messages of one request.

    Fields:
        skipped: older than a re-sync from position 0, which replaces all they could do; oldest first.
        applied: to be applied in this order; only the last one's draft is wanted.
        sampling: the newest stated among all of them, None if none stated it.
    """

    request_id: str
    skipped: tuple[Waiting, ...]
    applied: tuple[Waiting, ...]
    sampling: SamplingParams | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What to run now and what waits on, both in order of arrival."""

    works: tuple[DraftWork, ...]
    left: tuple[Waiting, ...]


def merge_waiting(waiting: Sequence[Waiting]) -> tuple[DraftWork, ...]:
    """Group messages by request, in order of each request's first message; no message is lost or reordered."""
    groups: dict[str, list[Waiting]] = {}
    for entry in waiting:
        groups.setdefault(entry.message.request_id, []).append(entry)
    return tuple(_merge(request_id, entries) for request_id, entries in groups.items())


def _merge(request_id: str, entries: Sequence[Waiting]) -> DraftWork:
    resyncs = [index for index, entry in enumerate(entries) if entry.message.start == 0]
    first = resyncs[-1] if resyncs else 0
    stated = [entry.message.sampling for entry in entries if entry.message.sampling is not None]
    return DraftWork(
        request_id=request_id,
        skipped=tuple(entries[:first]),
        applied=tuple(entries[first:]),
        sampling=stated[-1] if stated else None,
    )


def plan_batch(waiting: Sequence[Waiting], *, max_requests: int) -> DraftPlan:
    """The first ``max_requests`` requests with all their messages; later requests' messages stay in order."""
    works = merge_waiting(waiting)
    later = {work.request_id for work in works[max_requests:]}
    return DraftPlan(
        works=works[:max_requests],
        left=tuple(entry for entry in waiting if entry.message.request_id in later),
    )


def drop_request(waiting: Sequence[Waiting], request_id: str) -> list[Waiting]:
    """Without the messages of a request that was closed: nobody reads their replies any more."""
    return [entry for entry in waiting if entry.message.request_id != request_id]


def choose_evictions(held: Sequence[str], *, max_requests: int, needed: Collection[str]) -> list[str]:
    """Which requests' states to free.

    Args:
        held: request ids, least recently used first.
        needed: those of the running batch; never evicted.
    """
    excess = len(held) - max_requests
    if excess <= 0:
        return []
    return [request_id for request_id in held if request_id not in needed][:excess]
