"""Generates one response without a client waiting for it; what comes of it is found in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from gateway.errors import GatewayError, InternalError
from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import Edge
from gateway.http.response_store import StoredResponse
from gateway.openai.framing import DONE
from gateway.openai.responses_stream import ResponsesStream
from gateway.ports import GenerationRequest

__all__ = ["end_background", "run_in_background"]

_log = structlog.get_logger("gateway.http")


async def run_in_background(
    edge: Edge, entry: StoredResponse, generations: Sequence[GenerationRequest], form: ResponsesStream
) -> None:
    """Generate to the end; an error becomes the response's own. ``end_background`` must follow."""

    def write(data: bytes) -> None:
        if entry.events is not None:
            entry.events.append(data)

    async def collect(index: int, engine_event: EngineEvent) -> None:
        write(form.next_events(index, engine_event))

    write(form.opening())
    try:
        await run_choices(edge.engine, generations, collect)
        write(form.closing())
    except GatewayError as error:
        write(form.failed(error))
    except Exception as error:  # noqa: BLE001 # a request boundary (STYLE E3)
        _log.exception("background_response_failed", response_id=entry.response.response_id, exc_info=error)
        write(form.failed(InternalError("An internal error ended the response.")))


def end_background(edge: Edge, entry: StoredResponse) -> None:
    """The work is over; if it did not come to its end, it was cancelled."""
    is_cancelled = entry.response.is_running
    if is_cancelled:
        entry.response.cancel()
    if entry.events is not None:
        if is_cancelled:
            entry.events.append(DONE)  # the API has no event for it
        entry.events.close()
    edge.responses.settle(entry, time.monotonic())
