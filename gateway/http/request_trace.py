"""What a request that generates did, as one span: noted while it is handled, exported when it has ended.

The attributes are those of OpenTelemetry's conventions for HTTP servers and generative AI; what those have no name for
begins with ``breakeven.``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gateway.http.rate_limit import GENERATION_PATHS
from gateway.http.trace_context import TraceContext, parse_traceparent
from gateway.openai.requests import SharedFields
from gateway.ports import GenerationFinished

__all__ = [
    "RequestSpan",
    "SpanExporter",
    "note_answer",
    "note_error",
    "note_finished",
    "note_first_event",
    "trace_requests",
]

Attribute = str | int | float | bool | list[str]
_CLIENT_CLOSED_STATUS = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpan:
    """One finished span.

    Fields:
        parent: the caller's span, or None.
        begin_ns, end_ns: Unix nanoseconds.
        is_error: it failed, and not through the client's fault.
    """

    name: str
    parent: TraceContext | None
    begin_ns: int
    end_ns: int
    is_error: bool
    attributes: Mapping[str, Attribute]


class SpanExporter(Protocol):
    """Where spans go."""

    def export(self, span: RequestSpan) -> None:
        """Hand over one span; never blocks."""
        ...

    def close(self) -> None:
        """Send what is left; may block for a few seconds."""
        ...


@dataclass(slots=True)
class _Notes:
    begin_ns: int
    name: str = ""
    attributes: dict[str, Attribute] = field(default_factory=dict)


_NOTES: web.RequestKey[_Notes] = web.RequestKey("trace_notes", _Notes)


def trace_requests(exporter: SpanExporter) -> Middleware:
    """The outermost middleware: one span for each request that generates, however it ends."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in GENERATION_PATHS or request.method != "POST":
            return await handler(request)
        notes = request[_NOTES] = _Notes(begin_ns=time.time_ns())
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = _CLIENT_CLOSED_STATUS
            raise
        finally:
            exporter.export(_span(request, notes, status))

    return middleware


def note_answer(request: web.Request, shared: SharedFields, *, operation: str, response_id: str) -> None:
    """The request was understood: what it asks for."""
    notes = request.get(_NOTES)
    if notes is None:
        return
    sampling = shared.sampling
    notes.name = f"{operation} {shared.model}"
    notes.attributes |= {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "breakeven",
        "gen_ai.request.model": shared.model,
        "gen_ai.request.choice.count": shared.num_choices,
        "gen_ai.request.stream": shared.stream is not None,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.id": response_id,
        "gen_ai.response.model": shared.model,
    }
    if shared.max_new_tokens is not None:
        notes.attributes["gen_ai.request.max_tokens"] = shared.max_new_tokens


def note_first_event(request: web.Request) -> None:
    """The first bytes of a stream go out."""
    notes = request.get(_NOTES)
    if notes is not None:
        notes.attributes["gen_ai.response.time_to_first_chunk"] = (time.time_ns() - notes.begin_ns) / 1e9


def note_error(request: web.Request, code: str) -> None:
    """It failed, before or inside the answer."""
    notes = request.get(_NOTES)
    if notes is not None:
        notes.attributes["error.type"] = code


def note_finished(request: web.Request, finished: Iterable[GenerationFinished]) -> None:
    """All choices have ended: what they took and what speculation did."""
    notes = request.get(_NOTES)
    if notes is None:
        return
    choices = list(finished)
    parts = [choice.speculation for choice in choices]
    notes.attributes |= {
        "gen_ai.response.finish_reasons": [choice.finish_reason for choice in choices],
        "gen_ai.usage.input_tokens": max((choice.usage.prompt_tokens for choice in choices), default=0),
        "gen_ai.usage.output_tokens": sum(choice.usage.completion_tokens for choice in choices),
        "gen_ai.usage.cache_read.input_tokens": max((choice.usage.cached_tokens for choice in choices), default=0),
        "breakeven.spec.rounds": sum(part.num_rounds for part in parts),
        "breakeven.spec.plain_rounds": sum(part.num_plain_rounds for part in parts),
        "breakeven.spec.draft_tokens": sum(part.num_draft_tokens for part in parts),
        "breakeven.spec.accepted_tokens": sum(part.num_accepted_tokens for part in parts),
        "breakeven.queue_s": max((part.queue_s for part in parts), default=0.0),
        "breakeven.prefill_s": max((part.prefill_s for part in parts), default=0.0),
        "breakeven.verify_s": sum(part.verify_s for part in parts),
        "breakeven.draft_s": sum(part.draft_s for part in parts),
    }


def _span(request: web.Request, notes: _Notes, status: int) -> RequestSpan:
    headers = request.headers
    attributes = notes.attributes | {
        "http.request.method": request.method,
        "http.route": request.path,
        "http.response.status_code": status,
    }
    if status >= 400:
        attributes.setdefault("error.type", str(status))
    return RequestSpan(
        name=notes.name or f"{request.method} {request.path}",
        parent=parse_traceparent(headers.get("traceparent"), headers.get("tracestate")),
        begin_ns=notes.begin_ns,
        end_ns=time.time_ns(),
        is_error=status >= 500 or (status == 200 and "error.type" in attributes),
        attributes=attributes,
    )
