"""API keys. Without any in the configuration, the gateway is open to all who can reach it."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.http.edge import EDGE

__all__ = ["KEY_ID", "require_api_key"]

KEY_ID = web.RequestKey("key_id", str)

# Probes must work without a key; the dashboard page holds no data, its script asks for a key by itself.
_OPEN_PATHS = frozenset({"/", "/dashboard", "/health", "/ping", "/ready"})


@web.middleware
async def require_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through if it needs no key or has a right one."""
    keys = request.app[EDGE].keys
    request[KEY_ID] = ""
    if keys and request.path not in _OPEN_PATHS:
        request[KEY_ID] = keys.check(request.headers.get("Authorization"))
    return await handler(request)
