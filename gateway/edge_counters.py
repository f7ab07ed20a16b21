"""What the HTTP edge counts itself; everything else comes from the engine's snapshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["EdgeCounters", "EdgeStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeStats:
    """One consistent copy of the counters, as /stats and /metrics show it.

    ``responses``: by "<route> <status>". ``client_closed``: requests whose client left, or stopped reading, before the
    end of its answer. ``open_streams`` is a gauge, the others only grow.
    """

    responses: dict[str, int]
    client_closed: int
    open_streams: int
    keep_alives: int
    stream_errors: int


class EdgeCounters:
    """Mutable counters of one application; touched only on its event loop."""

    def __init__(self) -> None:
        self.responses: Counter[str] = Counter()
        self.client_closed = 0
        self.open_streams = 0
        self.keep_alives = 0
        self.stream_errors = 0

    def snapshot(self) -> EdgeStats:
        """A frozen copy."""
        return EdgeStats(
            responses=dict(self.responses),
            client_closed=self.client_closed,
            open_streams=self.open_streams,
            keep_alives=self.keep_alives,
            stream_errors=self.stream_errors,
        )
