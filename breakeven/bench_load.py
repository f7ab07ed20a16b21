"""Streams from an OpenAI-compatible server, so many requests at a time, and notes when what arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from breakeven.bench_statistics import Acceptance, RequestTimes

__all__ = ["LoadClient", "Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every request asks for.

    Fields:
        prompts: used in turn. fields: further fields of the body, e.g. temperature.
    """

    model: str
    prompts: tuple[str, ...]
    max_tokens: int
    fields: Mapping[str, Any]

    def body(self, number: int) -> bytes:
        """Body of request ``number``; its number is its seed, so that a run can be repeated."""
        message = {"role": "user", "content": self.prompts[number % len(self.prompts)]}
        return orjson.dumps(
            {
                "model": self.model,
                "messages": [message],
                "max_tokens": self.max_tokens,
                "seed": number,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.fields,
            }
        )


class LoadClient:
    """One server.

    Args:
        url: its base, with or without ``/v1``. timeout_s: for one whole answer.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> None:
        self._session = session
        self._root = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s

    async def first_model(self) -> str:
        """The first model the server lists.

        Raises:
            aiohttp.ClientError: it can't be reached, or refuses. ValueError: it lists none.
        """
        async with self._session.get(f"{self._root}/v1/models", timeout=self._limit()) as response:
            response.raise_for_status()
            models = orjson.loads(await response.read()).get("data", [])
        if not models:
            raise ValueError("the server lists no model; name one with --model")
        return str(models[0]["id"])

    async def acceptance(self) -> Acceptance | None:
        """The counters of a breakeven gateway; None from any other server."""
        try:
            async with self._session.get(f"{self._root}/stats", timeout=self._limit()) as response:
                speculation = orjson.loads(await response.read())["speculation"]
            return Acceptance(
                num_rounds=speculation["num_rounds"],
                num_draft_tokens=speculation["num_draft_tokens"],
                num_accepted_tokens=speculation["num_accepted_tokens"],
            )
        except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError, KeyError, TypeError):
            return None

    async def run(self, workload: Workload, *, num_requests: int, concurrency: int) -> tuple[list[RequestTimes], float]:
        """Send ``num_requests``, ``concurrency`` at a time: as one ends the next begins.

        Returns:
            The answers in the order of their numbers, and the seconds all of it took.
        """
        numbers = iter(range(num_requests))
        answers: dict[int, RequestTimes] = {}

        async def worker() -> None:
            for number in numbers:
                answers[number] = await self._one(workload.body(number))

        begin_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, num_requests)):
                group.create_task(worker())
        return [answers[number] for number in sorted(answers)], time.perf_counter() - begin_s

    async def _one(self, body: bytes) -> RequestTimes:
        begin_s = time.perf_counter()
        arrivals_s: list[float] = []
        num_tokens, error = 0, ""
        headers = {"Content-Type": "application/json"}
        url = f"{self._root}/v1/chat/completions"
        try:
            async with self._session.post(url, data=body, headers=headers, timeout=self._limit()) as response:
                if response.status != 200:
                    error = f"status {response.status}: {(await response.text())[:200]}"
                else:
                    num_tokens, error = await _read_stream(response, arrivals_s)
        except (aiohttp.ClientError, TimeoutError) as problem:
            error = str(problem) or type(problem).__name__
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            error = f"malformed event: {problem}"
        return RequestTimes(
            begin_s=begin_s,
            arrivals_s=tuple(arrivals_s),
            end_s=time.perf_counter(),
            num_tokens=num_tokens,
            error=error,
        )

    def _limit(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self._timeout_s)


async def _read_stream(response: aiohttp.ClientResponse, arrivals_s: list[float]) -> tuple[int, str]:
    """Note when each event with text came; returns (completion tokens, error or "")."""
    num_tokens, is_done = 0, False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            continue
        event = orjson.loads(data)
        if "error" in event:
            return num_tokens, str(event["error"].get("message", event["error"]))
        if _has_text(event.get("choices", ())):
            arrivals_s.append(time.perf_counter())
        usage = event.get("usage")
        if usage:
            num_tokens = usage["completion_tokens"]
    if not is_done:
        return num_tokens, "the stream ended without [DONE]"
    # A server without usage in streams: events are the best count there is.
    return num_tokens or len(arrivals_s), ""


def _has_text(choices: Sequence[Mapping[str, Any]]) -> bool:
    for choice in choices:
        delta = choice.get("delta") or {}
        if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False
