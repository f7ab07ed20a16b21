"""W3C trace context: whose trace a request belongs to, from the headers ``traceparent`` and ``tracestate``.

A header that breaks the format is ignored, as the standard wants: the request then begins a trace of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["TraceContext", "parse_traceparent"]

# version-trace_id-parent_id-flags; a version newer than 00 may have more fields behind another dash.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MAX_STATE_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The span of a caller. ``trace_id`` has 128 bits, ``span_id`` 64; neither is 0."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


def parse_traceparent(header: str | None, state: str | None = None) -> TraceContext | None:
    """The caller's context, or None if there is none or it is malformed.

    Args:
        state: the ``tracestate`` header, passed on as it is unless it is too long.
    """
    match = _TRACEPARENT.fullmatch((header or "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    context = TraceContext(
        trace_id=int(trace_id, 16),
        span_id=int(span_id, 16),
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=state if state and len(state) <= _MAX_STATE_CHARS else "",
    )
    return context if context.trace_id and context.span_id else None
