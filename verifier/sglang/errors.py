"""What SGLang's ways of saying no mean, as one code each.

It says no in five forms: ``{"error": {"message"}}``, flat ``{"object": "error", "message"}``, ``{"detail": text}``,
``{"detail": [{"msg"}]}`` of the schema check, and a finish_reason of type "abort" inside a 200.

    context_limit   the input does not fit the context         the request's own fault
    invalid_token   an id outside the vocabulary               the request's own fault
    unavailable     queue full, no memory, shutting down       worth another try
    aborted         someone aborted it
    weights_changed the engine's weights were replaced while the answer was being written
    target_error    everything else
"""

from __future__ import annotations

from typing import Any

import orjson

from wire.errors import PeerRefused

__all__ = ["refusal", "refusal_of_abort"]

_CONTEXT_SIGNS = (
    "longer than the model's context",
    "maximum context length",
    "maximum allowed length",
    "context length",
)
_VOCAB_SIGNS = ("vocab size", "out of vocabulary", "out-of-vocab", "token id")
_OVERLOAD_SIGNS = ("queue is full", "out of memory", "overloaded", "too many requests", "is disabled for shutdown")


def refusal(status: int, body: bytes) -> PeerRefused:
    """The typed error of a reply with an HTTP error status."""
    return _classify(status, _message(body) or f"HTTP status {status}")


def refusal_of_abort(status: int | None, message: str) -> PeerRefused:
    """The typed error of a finish_reason of type "abort"; ``status`` None means somebody asked for the abort."""
    if status is None and not any(sign in message.lower() for sign in (*_CONTEXT_SIGNS, *_OVERLOAD_SIGNS)):
        return PeerRefused("aborted", message or "the engine aborted it")
    return _classify(status or 500, message or "the engine aborted it")


def _classify(status: int, message: str) -> PeerRefused:
    text = message.lower()
    if status in (429, 503) or any(sign in text for sign in _OVERLOAD_SIGNS):
        return PeerRefused("unavailable", message)
    if any(sign in text for sign in _CONTEXT_SIGNS):
        return PeerRefused("context_limit", message)
    if any(sign in text for sign in _VOCAB_SIGNS):
        return PeerRefused("invalid_token", message)
    return PeerRefused("target_error", message)


def _message(body: bytes) -> str:
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode("utf-8", "replace").strip()
    if not isinstance(data, dict):
        return str(data)[:500]
    for value in (data.get("error"), data.get("message"), data.get("detail")):
        if isinstance(value, str):
            return value
        if isinstance(value, dict) and isinstance(value.get("message"), str):
            return str(value["message"])
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return str(value[0].get("msg", value[0]))
    return str(data)[:500]
