"""Where a starting SGLang stands, from its log, and whether it still moves. Pure: lines and times are arguments."""

from __future__ import annotations

import re
from collections import deque
from typing import Final

__all__ = ["LoadWatch"]

_KEPT_LINES = 400
# A load that reads less than this between two looks does not move by reading.
_MOVED_BYTES = 1 << 20

# What a line says has begun: (pattern, phase, share of the whole load done by then).
_MARKS: Final[tuple[tuple[str, str, float], ...]] = (
    (r"server_args=", "starting processes", 0.02),
    (r"Init (torch distributed|parallel) begin", "connecting ranks", 0.05),
    (r"Load weight begin", "loading weights", 0.10),
    (r"Load weight end", "allocating the KV cache", 0.70),
    (r"KV Cache is allocated", "allocating the KV cache", 0.75),
    (r"Capture.*graph.*begin", "capturing CUDA graphs", 0.80),
    (r"Capture.*graph.*end", "starting the server", 0.95),
    (r"Uvicorn running on", "warming up", 0.97),
    (r"The server is fired up", "ready", 1.0),
)
_SHARDS = re.compile(r"(?:shards|Capturing batches)[^%]*?(\d+)%")
_SPANS: Final = {"loading weights": (0.10, 0.60), "capturing CUDA graphs": (0.80, 0.15)}


class LoadWatch:
    """Feed it every line; ask it for phase, progress and stall.

    Args:
        stall_timeout_s: no line and no reading for so long is a stall.
        now_s: monotonic seconds at the start.
    """

    def __init__(self, *, stall_timeout_s: float, now_s: float) -> None:
        self.phase = "starting"
        self.progress = 0.0
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._stall_timeout_s = stall_timeout_s
        self._moved_s = now_s
        self._read_bytes = 0

    def line(self, text: str, *, now_s: float) -> None:
        """One line of the log; a progress bar's carriage returns are lines too."""
        self.lines.append(text)
        self._moved_s = now_s
        for pattern, phase, share in _MARKS:
            if share >= self.progress and re.search(pattern, text):
                self.phase, self.progress = phase, share
        found = _SHARDS.search(text)
        if found and self.phase in _SPANS:
            first, width = _SPANS[self.phase]
            self.progress = max(self.progress, first + width * int(found.group(1)) / 100)

    def read(self, total_bytes: int, *, now_s: float) -> None:
        """Bytes its processes have read so far."""
        if abs(total_bytes - self._read_bytes) >= _MOVED_BYTES:
            self._read_bytes, self._moved_s = total_bytes, now_s

    def stalled_for_s(self, now_s: float) -> float | None:
        """Seconds without movement if that is too long, else None."""
        still_s = now_s - self._moved_s
        return still_s if still_s >= self._stall_timeout_s else None
