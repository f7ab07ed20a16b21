"""What the soak asks, and the answer each question must get: the same text every time, whatever broke meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.identity import prompts

__all__ = ["Expected", "Task", "expected_answers", "make_tasks"]

MODEL = "smollm2-135m-instruct"
_SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.02, "presence_penalty": 0.3},
    {"temperature": 0.0, "stop": ["."]},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One request body without ``stream`` and ``speculation``."""

    index: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What plain decode answers."""

    text: str
    finish_reason: str
    completion_tokens: int


def make_tasks(count: int) -> list[Task]:
    """``count`` different requests: lengths from 8 to 120 tokens, four kinds of sampling, a seed each."""
    return [
        Task(
            index=index,
            body={
                "model": MODEL,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": (8, 24, 48, 120)[index // 4 % 4],
                "seed": index,
                **_SAMPLINGS[index % 4],
            },
        )
        for index, question in enumerate(prompts(count))
    ]


async def expected_answers(session: aiohttp.ClientSession, url: str, tasks: Sequence[Task]) -> list[Expected]:
    """Every task with speculation off, before any fault."""
    room = asyncio.Semaphore(8)

    async def one(task: Task) -> Expected:
        body = {**task.body, "speculation": {"mode": "off"}}
        async with room, session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
        choice = answer["choices"][0]
        return Expected(
            text=choice["message"]["content"],
            finish_reason=choice["finish_reason"],
            completion_tokens=answer["usage"]["completion_tokens"],
        )

    return list(await asyncio.gather(*(one(task) for task in tasks)))
