"""Answers a request with the events of a log, those there are and those that follow."""

from __future__ import annotations

from aiohttp import web

from gateway.http.edge import Edge
from gateway.http.event_log import EventLog
from gateway.http.sse import SseWriter

__all__ = ["answer_from_log"]


async def answer_from_log(request: web.Request, edge: Edge, log: EventLog, position: int) -> web.StreamResponse:
    """Stream the events from ``position`` on, to the end of the log. Whoever reads has no part in its writing.

    Raises:
        ClientGone: the client left; the log goes on.
    """
    writer = SseWriter(request, edge.counters, write_timeout_s=edge.config.write_timeout_s)
    idle_s = edge.config.keep_alive_s or None
    edge.counters.open_streams += 1
    try:
        while True:
            events = log.read(position)
            position += len(events)
            if log.is_closed:
                await writer.finish(b"".join(events))
                return writer.response
            if events:
                await writer.write(b"".join(events))
            elif not await log.wait(idle_s):
                await writer.comment()
    finally:
        edge.counters.open_streams -= 1
