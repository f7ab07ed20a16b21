"""The events of a stream that can be read again, from any of them, while it is written and after."""

from __future__ import annotations

import asyncio

__all__ = ["EventLog"]


class EventLog:
    """Append-only; event i has the sequence number i. One writer, any number of readers, all of one event loop."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self.num_bytes = 0
        self.is_closed = False

    def append(self, data: bytes) -> None:
        """One or more whole events, each ending with a blank line."""
        self._events += [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
        self.num_bytes += len(data)
        self._wake()

    def close(self) -> None:
        """Nothing follows."""
        self.is_closed = True
        self._wake()

    def read(self, position: int) -> list[bytes]:
        """The events from ``position`` on that there are."""
        return self._events[position:]

    async def wait(self, timeout_s: float | None) -> bool:
        """Until something is added or the log is closed; False if neither happened in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        # Whoever waits is released; whoever waits from now on gets a new event.
        self._changed.set()
        self._changed = asyncio.Event()
