"""Runs one streamed answer, whatever its format: engine events in, bytes out, errors where they belong."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

import structlog
from aiohttp import web

from gateway.errors import GatewayError, InternalError
from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import Edge
from gateway.http.request_trace import note_error, note_finished, note_first_event
from gateway.http.sse import ClientGone, SseWriter
from gateway.ports import GenerationFinished, GenerationRequest

__all__ = ["StreamFormat", "answer_stream"]

_log = structlog.get_logger("gateway.http")


class StreamFormat(Protocol):
    """What a stream looks like: whole server-sent events as bytes."""

    def opening(self) -> bytes:
        """Sent with the first engine event."""
        ...

    def next_events(self, index: int, engine_event: EngineEvent) -> bytes:
        """What one event of choice ``index`` gives; b"" for nothing yet."""
        ...

    def closing(self) -> bytes:
        """The last bytes of a stream that went well."""
        ...

    @property
    def finished(self) -> Collection[GenerationFinished]:
        """How the choices ended that have ended."""
        ...

    def failed(self, error: GatewayError) -> bytes:
        """The last bytes of one that did not."""
        ...


async def answer_stream(
    request: web.Request, edge: Edge, choices: Sequence[GenerationRequest], form: StreamFormat
) -> web.StreamResponse:
    """Stream to the end.

    Raises:
        GatewayError: before the head was sent.
        ClientGone: the client left.
    """
    return await _Stream(request, edge, form).run(choices)


class _Stream:
    def __init__(self, request: web.Request, edge: Edge, form: StreamFormat) -> None:
        self._request = request
        self._edge = edge
        self._form = form
        self._writer = SseWriter(request, edge.counters, write_timeout_s=edge.config.write_timeout_s)
        self._is_opened = False

    async def run(self, choices: Sequence[GenerationRequest]) -> web.StreamResponse:
        idle_s = self._edge.config.keep_alive_s
        beside = (lambda: self._writer.keep_alive(idle_s)) if idle_s > 0 else None
        self._edge.counters.open_streams += 1
        try:
            await run_choices(self._edge.engine, choices, self._send, beside=beside)
            note_finished(self._request, self._form.finished)
            await self._writer.finish(self._form.closing())
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._writer.is_started:
                raise
            await self._fail_inside(error)
        finally:
            self._edge.counters.open_streams -= 1
        return self._writer.response

    async def _send(self, index: int, engine_event: EngineEvent) -> None:
        # Taken before the first await, so that no other choice's event can overtake the opening.
        data = b""
        if not self._is_opened:
            data = self._form.opening()
            self._is_opened = True
            note_first_event(self._request)
        data += self._form.next_events(index, engine_event)
        if data and not self._writer.try_write(data):
            await self._writer.write(data)

    async def _fail_inside(self, error: Exception) -> None:
        self._edge.counters.stream_errors += 1
        if not isinstance(error, GatewayError):
            _log.exception("stream_failed", exc_info=error)
            error = InternalError("An internal error ended the stream.")
        note_error(self._request, error.code)
        await self._writer.finish(self._form.failed(error))
