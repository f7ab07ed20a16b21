"""Applies the limits of an API key to the requests that generate, and tells the client what is left of them."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.http.auth import KEY_ID
from gateway.http.edge import EDGE
from gateway.http.key_limits import RateState

__all__ = ["GENERATION_PATHS", "limit_requests", "rate_limit_headers"]

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_RATE_STATE = web.RequestKey("rate_state", RateState)


@web.middleware
async def limit_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Innermost middleware: count a request from here until its last byte is written.

    Without API keys, all clients share one limit.
    """
    limits = request.app[EDGE].limits
    if not limits or request.path not in GENERATION_PATHS or request.method != "POST":
        return await handler(request)
    key_id = request[KEY_ID]
    now_s = asyncio.get_running_loop().time()
    state = limits.rate_state(key_id, now_s)
    if state is not None:
        request[_RATE_STATE] = state
    state = limits.enter(key_id, now_s)
    if state is not None:
        request[_RATE_STATE] = state
    try:
        return await handler(request)
    finally:
        limits.leave(key_id)


def rate_limit_headers(request: web.Request) -> dict[str, str]:
    """OpenAI's ``x-ratelimit-*`` headers; empty if the request has no such limit."""
    state = request.get(_RATE_STATE)
    if state is None:
        return {}
    return {
        "x-ratelimit-limit-requests": str(state.limit),
        "x-ratelimit-remaining-requests": str(state.remaining),
        "x-ratelimit-reset-requests": _duration(state.reset_s),
    }


def _duration(seconds: float) -> str:
    # OpenAI writes Go durations: 120ms, 17s, 6m0s.
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
