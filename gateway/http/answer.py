"""Answers one generation request, as a stream or as one JSON object. Chat and completions share all of it.

The order of things is what makes errors honest: the request is parsed, then admitted (429 or 503 cost nothing), then
tokenized, and the 200 head of a stream is only sent with the engine's first event. After the head, an error can only be
one nested error event followed by ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import Edge
from gateway.http.request_trace import note_answer, note_finished
from gateway.http.server_timing import TIMINGS, speculation_timings
from gateway.http.stream import answer_stream
from gateway.openai.answer_plan import AnswerPlan, Collected, Tally
from gateway.openai.chunk_stream import ChunkStream
from gateway.openai.requests import SharedFields
from gateway.openai.responses import response_body
from gateway.ports import GenerationFinished

__all__ = ["admitted", "answer", "client_deadline_s"]


@contextmanager
def admitted(edge: Edge, num_choices: int) -> Iterator[None]:
    """Holds the engine's room for ``num_choices`` generations.

    Raises:
        QueueFull, NotReady, Draining: there is none.
    """
    edge.engine.admit(num_choices)
    try:
        yield
    finally:
        edge.engine.release(num_choices)


def client_deadline_s(request: web.Request, shared: SharedFields) -> float | None:
    """How long the client itself will wait: official clients say so in a header. It is a limit between two reads, so it
    bounds the whole answer only if that is not streamed."""
    if shared.stream is not None:
        return None
    try:
        deadline_s = float(request.headers.get("x-stainless-read-timeout", ""))
    except ValueError:
        return None
    return deadline_s if 0 < deadline_s < 86_400 else None


async def answer(request: web.Request, edge: Edge, plan: AnswerPlan) -> web.StreamResponse:
    """Generate and send; call inside ``admitted``."""
    operation = "chat" if plan.head.endpoint == "chat" else "text_completion"
    note_answer(request, plan.shared, operation=operation, response_id=plan.head.response_id)
    if plan.shared.stream is None:
        return await _answer_whole(request, edge, plan)
    return await answer_stream(request, edge, plan.choices, ChunkStream(plan, edge.codec))


async def _answer_whole(request: web.Request, edge: Edge, plan: AnswerPlan) -> web.Response:
    tally = Tally(plan, edge.codec)
    collected = [Collected(pieces.opening()) for pieces in tally.choices]

    async def collect(index: int, engine_event: EngineEvent) -> None:
        for piece in tally.choices[index].pieces(engine_event):
            collected[index].add(piece)
        if isinstance(engine_event, GenerationFinished):
            tally.finished[index] = engine_event

    await run_choices(edge.engine, plan.choices, collect)
    with_ids = plan.shared.return_token_ids
    results = [
        parts.result(index, tally, plan.choices[index], with_ids=with_ids) for index, parts in enumerate(collected)
    ]
    note_finished(request, tally.finished.values())
    request[TIMINGS] = speculation_timings(tally.finished.values())
    body = response_body(plan.head, results, tally.usage_so_far(), metrics=tally.metrics())
    return web.Response(body=body, content_type="application/json")
