"""One request of the soak: how the client behaves, and whether what it got is right."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
import orjson

from benchmarks.soak.tasks import Expected, Task

__all__ = ["Behaviour", "Outcome", "Record", "ask"]


class Behaviour(StrEnum):
    """What the client does."""

    STREAM = "stream"
    WHOLE = "whole"
    LEAVE = "leave"  # disconnects in the middle
    SLOW = "slow"  # reads with pauses
    MALFORMED = "malformed"


class Outcome(StrEnum):
    """How it ended. The last three are faults of the product."""

    RIGHT = "right"
    LEFT = "left"
    REFUSED = "refused"  # a typed 4xx, where one was due
    TYPED_ERROR = "typed_error"  # a nested error object or event; the text before it was right
    WRONG_TEXT = "wrong_text"  # differs from plain decode: a token lost, doubled, reordered or changed
    NO_END = "no_end"  # the stream or connection ended without an answer or an error
    NOT_REFUSED = "not_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One finished request. Times in s on time.monotonic(); ``gaps_s`` are the times between content events."""

    task: int
    behaviour: Behaviour
    outcome: Outcome
    begin_s: float
    end_s: float
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    detail: str = ""


# Each with what is wrong with it. All must be refused with a nested error of status 4xx.
_MALFORMED: tuple[bytes, ...] = (
    b"{",
    b"[]",
    b'{"messages": 3}',
    b'{"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "' + b"word " * 20_000 + b'"}]}',  # longer than the context
    b"\xff\xfe{}",
)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    task: Task,
    expected: Expected,
    behaviour: Behaviour,
    mode: str,
    rng: random.Random,
) -> Record:
    """Send one request, read it as ``behaviour`` says, judge it."""
    begin = time.monotonic()
    body = {**task.body, "speculation": {"mode": mode}}
    ttft: float | None = None
    gaps: list[float] = []
    detail = ""
    try:
        if behaviour is Behaviour.MALFORMED:
            outcome, detail = await _malformed(session, url, rng)
        elif behaviour is Behaviour.WHOLE:
            outcome, detail = await _whole(session, url, body, expected)
        else:
            stream = _Stream(expected)
            leave_after = rng.randrange(1, 12) if behaviour is Behaviour.LEAVE else None
            pause_s = 0.05 if behaviour is Behaviour.SLOW else 0.0
            outcome, detail = await stream.read(session, url, body, leave_after=leave_after, pause_s=pause_s)
            times = stream.times
            ttft = times[0] - begin if times else None
            gaps = [b - a for a, b in itertools.pairwise(times)]
    except (TimeoutError, aiohttp.ClientError) as error:
        outcome, detail = Outcome.NO_END, f"{type(error).__name__}: {error}"
    return Record(
        task=task.index,
        behaviour=behaviour,
        outcome=outcome,
        begin_s=begin,
        end_s=time.monotonic(),
        ttft_s=ttft,
        gaps_s=tuple(gaps),
        detail=detail[:200],
    )


async def _malformed(session: aiohttp.ClientSession, url: str, rng: random.Random) -> tuple[Outcome, str]:
    body = rng.choice(_MALFORMED)
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        answer = await response.read()
        if not 400 <= response.status < 500:
            return Outcome.NOT_REFUSED, f"{response.status} for {body[:60]!r}"
        return _error_outcome(answer, Outcome.REFUSED)


async def _whole(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], expected: Expected
) -> tuple[Outcome, str]:
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.read()
        if response.status != 200:
            return _error_outcome(answer, Outcome.TYPED_ERROR)
    parsed = orjson.loads(answer)
    choice = parsed["choices"][0]
    return _compare(
        Expected(
            text=choice["message"]["content"],
            finish_reason=choice["finish_reason"],
            completion_tokens=parsed["usage"]["completion_tokens"],
        ),
        expected,
    )


class _Stream:
    """Reads one event stream and compares it with what was due."""

    def __init__(self, expected: Expected) -> None:
        self.times: list[float] = []
        self._expected = expected

    async def read(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: dict[str, Any],
        *,
        leave_after: int | None,
        pause_s: float,
    ) -> tuple[Outcome, str]:
        text, finish, tokens, error, is_done = "", "", 0, b"", False
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return _error_outcome(await response.read(), Outcome.TYPED_ERROR)
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    error = line[6:]
                    continue
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    if choice["delta"].get("content"):
                        self.times.append(time.monotonic())
                        text += choice["delta"]["content"]
                    finish = choice.get("finish_reason") or finish
                if leave_after is not None and len(self.times) >= leave_after:
                    break
                if pause_s:
                    await asyncio.sleep(pause_s)
        if not self._expected.text.startswith(text):
            return Outcome.WRONG_TEXT, f"{text[-80:]!r}"
        if leave_after is not None and not is_done:
            return Outcome.LEFT, ""
        if error:
            return _error_outcome(error, Outcome.TYPED_ERROR)
        if not is_done:
            return Outcome.NO_END, "no [DONE]"
        return _compare(Expected(text=text, finish_reason=finish, completion_tokens=tokens), self._expected)


def _compare(found: Expected, expected: Expected) -> tuple[Outcome, str]:
    if found == expected:
        return Outcome.RIGHT, ""
    return Outcome.WRONG_TEXT, f"{found} instead of {expected}"


def _error_outcome(answer: bytes, outcome: Outcome) -> tuple[Outcome, str]:
    """``outcome`` if the answer is a nested error object with message and type."""
    try:
        error = orjson.loads(answer)["error"]
        return outcome, f"{error['code']}: {error['message']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return Outcome.NO_END, f"no error object: {answer[:80]!r}"
