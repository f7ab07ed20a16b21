"""Writes one server-sent-event stream.

The response head is sent with the first event, so that an error before it can still become a real status. The last
event and the end of the body go out in one write, because official clients close the connection as soon as they have
read ``[DONE]``. Keep-alive comments are only written after idle seconds: some load tools can't read comment lines.
"""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from gateway.edge_counters import EdgeCounters

__all__ = ["ClientGone", "SseWriter"]

_KEEP_ALIVE = b": keep-alive\n\n"
# Below the transport's high-water mark of 64 KiB.
_SMALL_BYTES = 32 << 10
_HEAD = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGone(Exception):
    """The client closed the connection or stopped reading; nobody is left to answer."""


class SseWriter:
    """The response side of one stream; writes from several tasks go out whole and in order of their calls.

    Args:
        request: the request to answer.
        write_timeout_s: how long a client may not read before it counts as gone.
    """

    def __init__(self, request: web.Request, counters: EdgeCounters, *, write_timeout_s: float) -> None:
        self._request = request
        self._counters = counters
        self._write_timeout_s = write_timeout_s
        self._lock = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last_write_s = self._loop.time()
        self._flowing: asyncio.Transport | None = None  # set once the head is out
        self._is_chunked = False
        self.response = web.StreamResponse(headers=_HEAD)

    @property
    def is_started(self) -> bool:
        """The 200 head is out; an error can only be told inside the stream from now on."""
        return self.response.prepared

    def try_write(self, data: bytes) -> bool:
        """Send events if that needs no waiting, which is nearly always; False = nothing was sent, use ``write``.

        The head is out, the kernel took all bytes so far and these are few, so they go to the transport at once,
        framed here: without lock, timer and aiohttp's five calls, which cost as much as all formatting
        (docs/LOG.md, the edge).

        Raises:
            ClientGone: nobody reads.
        """
        transport = self._flowing
        if transport is None or len(data) > _SMALL_BYTES or self._lock.locked() or transport.get_write_buffer_size():
            return False
        if transport.is_closing():
            raise ClientGone
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._last_write_s = self._loop.time()
        return True

    async def write(self, data: bytes) -> None:
        """Send events.

        Raises:
            ClientGone: nobody reads.
        """
        await self._send(data, is_last=False)

    async def finish(self, data: bytes) -> None:
        """Send the last events and the end of the body. A client that has left by now had all it wanted."""
        await self._send(data, is_last=True)

    async def keep_alive(self, idle_s: float) -> None:
        """Runs beside the stream, until cancelled: a comment whenever nothing was written for ``idle_s`` seconds."""
        while True:
            wait_s = self._last_write_s + idle_s - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            await self.comment()

    async def comment(self) -> None:
        """A comment, so that nobody between takes the connection for dead.

        Raises:
            ClientGone: nobody reads.
        """
        self._counters.keep_alives += 1
        await self.write(_KEEP_ALIVE)

    async def _send(self, data: bytes, *, is_last: bool) -> None:
        try:
            async with self._lock, asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                self._last_write_s = self._loop.time()
                if is_last:
                    await self.response.write_eof(data)
                else:
                    await self.response.write(data)
                    self._flow()
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from None
        except ConnectionError:
            if not is_last:
                raise ClientGone from None

    def _flow(self) -> None:
        """The head and some of the body are out: from now on ``try_write`` may go past aiohttp."""
        if self._flowing is None:
            self._is_chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
            self._flowing = self._request.transport
