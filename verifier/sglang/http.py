"""SGLang's HTTP API as typed calls. Every failure is one of wire.errors' PeerErrors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
import orjson

from verifier.sglang.answers import Answer, read_answers, read_chunk
from verifier.sglang.errors import refusal
from wire.errors import PeerLate, PeerLost, PeerRefused

__all__ = ["EngineHttp"]

# SGLang closes an idle connection after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). A POST on one that it is just closing fails,
# and aiohttp may not send it again; so ours are given up first.
_KEEPALIVE_S = 3.0
# Parsing more than this takes over a millisecond and leaves the event loop.
_LARGE_BODY_BYTES = 512 * 1024


class EngineHttp:
    """A connection pool to one engine; open inside a running event loop."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the pool; it connects at the first call. Reopening drops all connections."""
        await self.close()
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        """A JSON object.

        Raises:
            PeerError: no connection, an error status, too slow, or no JSON object.
        """
        with _translated(f"GET {path}", timeout_s):
            async with asyncio.timeout(timeout_s), self._live().get(self.url + path) as response:
                body = await response.read()
                if response.status >= 400:
                    raise refusal(response.status, body)
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise PeerLost(f"{path} is not SGLang's: it answers no JSON") from None
        if not isinstance(data, dict):
            raise PeerLost(f"{path} is not SGLang's: it answers no object")
        return data

    async def generate(self, payload: dict[str, Any]) -> list[Answer]:
        """One batch request; the payload holds lists. The caller sets the time limit.

        Raises:
            PeerLost: no connection. PeerRefused: the engine answered with an error, or with something else.
        """
        with _translated("POST /generate", None):
            async with self._live().post(self.url + "/generate", data=orjson.dumps(payload), headers=_JSON) as response:
                body = await response.read()
                if response.status >= 400:
                    raise refusal(response.status, body)
        try:
            if len(body) > _LARGE_BODY_BYTES:
                return await asyncio.to_thread(read_answers, body)
            return read_answers(body)
        except msgspec.MsgspecError as error:
            raise PeerRefused("target_error", f"unreadable reply: {error}") from None

    async def stream(self, payload: dict[str, Any]) -> AsyncIterator[Answer]:
        """Chunks of one streaming request as they come.

        Raises:
            PeerLost: the connection broke. PeerRefused: the engine answered with an error.
        """
        with _translated("stream of /generate", None):
            async with self._live().post(self.url + "/generate", data=orjson.dumps(payload), headers=_JSON) as response:
                if response.status >= 400:
                    raise refusal(response.status, await response.read())
                async for data in _events(response.content):
                    if data == b"[DONE]":
                        return
                    yield _chunk(data)
        raise PeerLost("the stream ended without its end mark")

    async def abort(self, rid: str) -> None:
        """Stop one request at once; unknown ones are ignored by the engine.

        Raises:
            PeerError: the abort did not reach it.
        """
        with _translated("POST /abort_request", 5.0):
            body = orjson.dumps({"rid": rid})
            async with (
                asyncio.timeout(5.0),
                self._live().post(self.url + "/abort_request", data=body, headers=_JSON) as response,
            ):
                await response.read()

    def _live(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise PeerLost("the client is not running")
        return self._session


_JSON = {"Content-Type": "application/json"}


def _chunk(data: bytes) -> Answer:
    try:
        chunk = read_chunk(data)
    except msgspec.MsgspecError as error:
        raise PeerRefused("target_error", f"unreadable chunk: {error}") from None
    if isinstance(chunk, tuple):
        status, message = chunk
        raise refusal(status, orjson.dumps({"message": message}))
    return chunk


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Payloads of server-sent events. Chunks are cumulative by default, so lines outgrow readline's limit."""
    buffer = bytearray()
    async for piece in content.iter_any():
        buffer += piece
        while (end := buffer.find(b"\n\n")) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + 2]
            if event.startswith(b"data:"):
                yield event[5:].strip()


@contextmanager
def _translated(what: str, timeout_s: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise PeerLate(f"{what}: no answer within {timeout_s or 5.0:g} s") from None
    except (aiohttp.ClientError, ConnectionError) as error:
        raise PeerLost(f"{what}: {error or type(error).__name__}") from None
