"""A ``GatewayError`` as an OpenAI error object: always nested, always all four keys, text always bounded."""

from __future__ import annotations

import math
from typing import Any

import orjson

from gateway.errors import HTTP_ERRORS, AuthenticationFailed, GatewayError, OverloadError

__all__ = ["error_body", "error_fields", "error_headers", "error_status"]

_MAX_MESSAGE_CHARS = 600
_MAX_PARAM_CHARS = 120


def error_status(error: GatewayError) -> int:
    """The HTTP status of an error, by the table in gateway/errors.py."""
    return _row(error)[0]


def error_body(error: GatewayError) -> bytes:
    """``{"error": {message, type, param, code}}`` as JSON."""
    return orjson.dumps({"error": error_fields(error)})


def error_fields(error: GatewayError) -> dict[str, Any]:
    """The four keys of an error object."""
    return {
        "message": _bounded(error.message, _MAX_MESSAGE_CHARS),
        "type": _row(error)[1],
        "param": None if error.param is None else _bounded(error.param, _MAX_PARAM_CHARS),
        "code": error.code,
    }


def error_headers(error: GatewayError) -> dict[str, str]:
    """Headers that tell the client what to do next: when to retry, or how to authenticate."""
    if isinstance(error, OverloadError):
        wait_s = min(max(error.retry_after_s, 0.0), 120.0)  # clients stop retrying at longer waits
        return {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(math.ceil(wait_s * 1000))}
    if isinstance(error, AuthenticationFailed):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def _row(error: GatewayError) -> tuple[int, str]:
    for cls in type(error).__mro__:
        row = HTTP_ERRORS.get(cls)
        if row is not None:
            return row
    raise AssertionError("GatewayError itself has a row")


def _bounded(text: str, max_chars: int) -> str:
    # Lone surrogates can't be written as UTF-8, and a message may quote the client.
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"
