"""The framing of server-sent events: ``data: `` with the space, one line, no id."""

from __future__ import annotations

__all__ = ["DONE", "event", "named_event"]

DONE = b"data: [DONE]\n\n"


def event(payload: bytes) -> bytes:
    """One event of one-line JSON, without a name: what chat and completions have."""
    return b"data: %b\n\n" % payload


def named_event(name: str, payload: bytes) -> bytes:
    """One event of one-line JSON with its name: what the Responses API has."""
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), payload)
