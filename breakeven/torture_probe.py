"""One HTTP exchange as raw bytes, and a strict reading of its event stream: what the torture cases look at.

Deliberately not a client library: libraries forgive what the cases have to see (a missing space, a second role, bytes
after ``[DONE]``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

__all__ = ["Exchange", "Probe", "StreamBlock"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBlock:
    """One event of a stream: its lines as they came, without line ends."""

    lines: tuple[str, ...]

    @property
    def data(self) -> str | None:
        """The payload; None if it is a comment or has no data line."""
        found = [line.removeprefix("data:").removeprefix(" ") for line in self.lines if line.startswith("data:")]
        return "\n".join(found) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and everything that came back.

    Fields:
        headers: lower-case names.
        arrivals_s: seconds after the request at which each read returned bytes.
    """

    body: Any
    status: int
    headers: Mapping[str, str]
    raw: bytes
    arrivals_s: tuple[float, ...] = field(default=())

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return orjson.loads(self.raw)
        except orjson.JSONDecodeError:
            return None

    @property
    def blocks(self) -> list[StreamBlock]:
        """The stream cut at blank lines; comments included."""
        text = self.raw.decode("utf-8", errors="surrogateescape").replace("\r\n", "\n")
        return [StreamBlock(lines=tuple(block.split("\n"))) for block in text.split("\n\n") if block]

    @property
    def events(self) -> list[Json]:
        """The JSON events of the stream, in order."""
        found = []
        for block in self.blocks:
            if block.data and block.data != "[DONE]":
                try:
                    value = orjson.loads(block.data)
                except orjson.JSONDecodeError:
                    continue
                if isinstance(value, dict):
                    found.append(value)
        return found

    @property
    def choices(self) -> list[Json]:
        """All choice objects of all events, in order."""
        return [choice for event in self.events for choice in event.get("choices") or [] if isinstance(choice, dict)]

    def text(self, index: int = 0) -> str:
        """The joined text of one streamed choice."""
        parts = []
        for choice in self.choices:
            if choice.get("index") == index:
                part = (choice.get("delta") or {}).get("content") if "delta" in choice else choice.get("text")
                parts.append(part or "")
        return "".join(parts)


class Probe:
    """Sends requests to one server.

    Args:
        url: its base, with or without ``/v1``.
        timeout_s: for one whole exchange.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, model: str, timeout_s: float) -> None:
        self._session = session
        self._root = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.timeout_s = timeout_s

    async def chat(self, **fields: Any) -> Exchange:
        """POST a chat; short and greedy unless ``fields`` say otherwise."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Count from one to ten in words."}],
            "max_tokens": 24,
            "temperature": 0,
            **fields,
        }
        return await self.post("/v1/chat/completions", {key: value for key, value in body.items() if value != "omit"})

    async def complete(self, **fields: Any) -> Exchange:
        """POST a completion; short and greedy unless ``fields`` say otherwise."""
        body = {"model": self.model, "prompt": "One two three", "max_tokens": 16, "temperature": 0, **fields}
        return await self.post("/v1/completions", body)

    async def post(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Exchange:
        """POST JSON, or raw bytes as they are."""
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.request("POST", path, raw, headers={"Content-Type": "application/json", **(headers or {})})

    async def request(
        self, method: str, path: str, raw: bytes | None = None, *, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        """Any request; reads to the end of the body.

        Raises:
            TimeoutError: it did not end in time. aiohttp.ClientError: the connection broke.
        """
        begin_s = time.monotonic()
        chunks, arrivals_s = [], []
        async with (
            asyncio.timeout(self.timeout_s),
            self._session.request(method, self._root + path, data=raw, headers=headers) as response,
        ):
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                arrivals_s.append(time.monotonic() - begin_s)
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return Exchange(
                body=raw, status=response.status, headers=lowered, raw=b"".join(chunks), arrivals_s=tuple(arrivals_s)
            )

    async def leave_early(self, **fields: Any) -> None:
        """Start a long streamed chat and close the connection after the first bytes."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Tell a very long story."}],
            "max_tokens": 200,
            "stream": True,
            **fields,
        }
        async with (
            asyncio.timeout(self.timeout_s),
            self._session.post(self._root + "/v1/chat/completions", json=body) as response,
        ):
            await response.content.readany()
            response.close()
