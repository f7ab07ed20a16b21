"""Gives a breakeven server the /v1/completions of llama.cpp's server, which tightwad's proxy needs.

The difference: ``logprobs.content`` is a list of {id, token, logprob}. Everything else is passed on, with speculation
off: tightwad's target and draft are plain engines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

__all__ = ["adapted"]


@asynccontextmanager
async def adapted(session: aiohttp.ClientSession, url: str, model: str) -> AsyncIterator[str]:
    """Serve the adapter on a free port; yields its URL."""

    async def completions(request: web.Request) -> web.Response:
        asked = await request.json()
        body = {
            "model": model,
            "prompt": asked["prompt"],
            "max_tokens": asked["max_tokens"],
            "temperature": asked["temperature"],
            "logprobs": 1,
            "return_token_ids": True,
            "ignore_eos": True,
            "speculation": {"mode": "off"},
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                return web.json_response(answer, status=response.status)
        choice = answer["choices"][0]
        return web.json_response({"choices": [{**choice, "logprobs": {"content": _content(choice)}}]})

    async def healthy(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice["logprobs"]
    return [
        {"id": token_id, "token": token, "logprob": logprob}
        for token_id, token, logprob in zip(
            choice["token_ids"], logprobs["tokens"], logprobs["token_logprobs"], strict=True
        )
    ]
