"""The gateway's end of the plugin's tap: announcements of what it wrote to the tensor ring, by engine request.

The plugin writes features to the ring in shared memory and says so in a datagram, before the engine's reply leaves. So
it is here already when the reply comes, or will be in a moment; a lost one only means features are fetched again.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from pathlib import Path

import msgspec

from verifier.sglang.answers import Answer
from verifier.sglang.plugin.announcement import Announcement
from wire.messages import FeatureSpan

__all__ = ["TapSource"]

# Engine requests whose announcements are kept; the engine also serves others than us.
_MAX_RIDS = 4096
_RECEIVE_BYTES = 4 << 20
_DECODER = msgspec.msgpack.Decoder(list[Announcement])


class TapSource:
    """Collects announcements. ``open`` inside the event loop, ``close`` at the end.

    Args:
        socket_path: bound here; the plugin sends to it. timeout_s: how long an announcement may lag its reply.
    """

    in_reply = False
    follows_streams = True

    def __init__(self, socket_path: Path, *, timeout_s: float) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._spans: OrderedDict[str, list[FeatureSpan]] = OrderedDict()
        self._came = asyncio.Event()

    def open(self) -> None:
        """Bind the socket, replacing what a dead gateway left."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        bound.setblocking(False)
        bound.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket = bound
        asyncio.get_running_loop().add_reader(bound.fileno(), self._receive)

    def close(self) -> None:
        """Unbind."""
        bound, self._socket = self._socket, None
        if bound is not None:
            asyncio.get_running_loop().remove_reader(bound.fileno())
            bound.close()
            self._path.unlink(missing_ok=True)

    async def spans(self, rid: str, answer: Answer | None, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """What the plugin announced, waiting for it a moment."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while (found := self._announced(rid, first=first, last=last)) is None:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        return found

    async def streamed(self, rid: str, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """The same for a stream; what lies before ``first`` is forgotten."""
        spans = self._spans.get(rid)
        if spans is not None:
            self._spans[rid] = [span for span in spans if span.start >= first]
        return await self.spans(rid, None, first=first, last=last)

    def _announced(self, rid: str, *, first: int, last: int) -> tuple[FeatureSpan, ...] | None:
        """Contiguous spans of ``first`` .. ``last`` among what was announced so far."""
        found: list[FeatureSpan] = []
        position = first
        for span in self._spans.get(rid, ()):
            if span.start == position:
                found.append(span)
                position += span.ref.shape[0]
                if position > last:
                    return tuple(found)
        return None

    def forget(self, rid: str) -> None:
        """Drop its announcements."""
        self._spans.pop(rid, None)

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            try:
                said = _DECODER.decode(data)
            except msgspec.MsgspecError:
                continue  # not from our plugin's version; its features are then missing and counted
            for one in said:
                self._spans.setdefault(one.rid, []).append(one.span)
                if len(self._spans) > _MAX_RIDS:
                    self._spans.popitem(last=False)
        self._came.set()
