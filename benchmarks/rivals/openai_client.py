"""Speaks /v1/completions, streamed, to any OpenAI-compatible server."""

from __future__ import annotations

import time
from typing import Any

import aiohttp
import orjson

from benchmarks.rivals.measure import Answer, Ask

__all__ = ["OpenAICompletions"]


class OpenAICompletions:
    """One system behind a URL. ``extra`` goes into every body."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, extra: dict[str, Any]) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._extra = extra

    async def __call__(self, ask: Ask) -> Answer:
        """Stream one answer.

        Raises:
            RuntimeError: the server answered with an error.
        """
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "temperature": ask.temperature,
            "max_tokens": ask.max_tokens,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
            **self._extra,
        }
        pieces: list[tuple[float, str]] = []
        acceptance: float | None = None
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self._url}: {response.status} {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"{self._url}: {event['error']}")
                text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                if text:
                    pieces.append((time.perf_counter(), text))
                spec = (event.get("metrics") or {}).get("speculative_decoding") or {}
                acceptance = spec.get("mean_acceptance_length") or acceptance
        return Answer(pieces=tuple(pieces), acceptance_length=acceptance)
