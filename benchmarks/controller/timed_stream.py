"""One streamed answer, with the time and the tokens of every event."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

__all__ = ["TimedAnswer", "stream_answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """What the client saw.

    Fields:
        begin_s: monotonic time of the request; times_s, counts: of each event with tokens, and how many it brought.
        token_ids: all of them. speculation: the server's own numbers, in ms where they are times.
    """

    begin_s: float
    times_s: list[float]
    counts: list[int]
    token_ids: list[int]
    speculation: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Tokens that came after the first event; the first is the prompt's."""
        return sum(self.counts[1:])

    @property
    def decode_s(self) -> float:
        """Seconds from the first event to the last."""
        return self.times_s[-1] - self.times_s[0]

    @property
    def tok_per_s(self) -> float:
        """Delivered rate after the first token."""
        return self.num_tokens / self.decode_s

    @property
    def ttft_ms(self) -> float:
        """From the request to the first token."""
        return 1e3 * (self.times_s[0] - self.begin_s)


async def stream_answer(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> TimedAnswer:
    """Ask for a stream and read it to its end."""
    asked = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "return_spec_stats": True,
    }
    begin_s = time.monotonic()
    times_s: list[float] = []
    counts: list[int] = []
    token_ids: list[int] = []
    speculation: dict[str, Any] = {}
    async with session.post(url + path, json=asked) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now_s = time.monotonic()
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"the stream failed: {event['error']}")
            ids = event["choices"][0].get("token_ids") if event["choices"] else None
            if ids:
                times_s.append(now_s)
                counts.append(len(ids))
                token_ids += ids
            if event.get("metrics"):
                speculation = event["metrics"]["speculative_decoding"]
    return TimedAnswer(begin_s=begin_s, times_s=times_s, counts=counts, token_ids=token_ids, speculation=speculation)
