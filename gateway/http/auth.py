"""API keys. Without any in the configuration, the gateway is open to all who can reach it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.errors import AuthenticationFailed
from gateway.http.edge import EDGE

__all__ = ["check_api_key", "require_api_key"]

# Probes must work without a key; the dashboard page holds no data, its script asks for a key by itself.
_OPEN_PATHS = frozenset({"/", "/dashboard", "/health", "/ping", "/ready"})


@web.middleware
async def require_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request through if it needs no key or has a right one."""
    api_keys = request.app[EDGE].config.api_keys
    if api_keys and request.path not in _OPEN_PATHS:
        check_api_key(request.headers.get("Authorization"), api_keys)
    return await handler(request)


def check_api_key(authorization: str | None, api_keys: Sequence[str]) -> None:
    """Compare the bearer token with every key, in a time that depends on neither.

    Raises:
        AuthenticationFailed: no token, or a wrong one.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise AuthenticationFailed("An API key is required: Authorization: Bearer <key>.", code="missing_api_key")
    # Equal lengths for compare_digest, and no early end at the first match.
    given = _digest(token.strip())
    matches = [hmac.compare_digest(given, _digest(key)) for key in api_keys]
    if not any(matches):
        raise AuthenticationFailed("The API key is not valid here.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
