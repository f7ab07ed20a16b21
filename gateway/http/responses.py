"""POST /v1/responses: one answer in OpenAI's newer format, in the request or in the background."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.errors import InvalidRequest, NotFound
from gateway.http.answer import admitted, client_deadline_s
from gateway.http.auth import KEY_ID
from gateway.http.background_response import end_background, run_in_background
from gateway.http.body import read_json_body
from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import EDGE, Edge, request_rules
from gateway.http.event_log import EventLog
from gateway.http.event_reader import answer_from_log
from gateway.http.prompts import message_ids
from gateway.http.request_trace import note_answer, note_finished
from gateway.http.response_store import StoredResponse
from gateway.http.server_timing import TIMINGS, speculation_timings
from gateway.http.stream import answer_stream
from gateway.openai.generation import build_choices, resolve_max_new_tokens
from gateway.openai.reasoning import reasoning_use
from gateway.openai.responses_input import listed_input
from gateway.openai.responses_object import ResponseObject
from gateway.openai.responses_request import ResponsesRequest, parse_responses_request
from gateway.openai.responses_stream import ResponsesStream
from gateway.ports import ChatMessage, GenerationRequest

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/v1/responses")
async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer one input, as a stream of typed events or as one object."""
    edge = request.app[EDGE]
    body = await read_json_body(request, edge.config)
    parsed = parse_responses_request(body, request_rules(request))
    before = _conversation_before(edge, request[KEY_ID], parsed)
    with ExitStack() as held:
        held.enter_context(admitted(edge, 1))
        run = await _plan(request, edge, parsed, before)
        note_answer(request, parsed.shared, operation="chat", response_id=run.response.response_id)
        if parsed.is_background:
            edge.jobs.require_open()
        if parsed.is_stored:
            edge.responses.add(run.entry, time.monotonic())
        if parsed.is_background:
            edge.limits.hold(run.entry.owner)
            held.callback(edge.limits.leave, run.entry.owner)
            held.callback(end_background, edge, run.entry)
            work = run_in_background(edge, run.entry, run.generations, run.form)
            edge.jobs.start(run.response.response_id, work, on_end=held.pop_all().close)
            if run.entry.events is not None:
                return await answer_from_log(request, edge, run.entry.events, 0)
            return _whole(run.response)
        try:
            return await _answer(request, edge, run)
        finally:
            _settle(edge, run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One response about to be generated."""

    response: ResponseObject
    entry: StoredResponse
    generations: list[GenerationRequest]
    form: ResponsesStream


def _conversation_before(edge: Edge, owner: str, parsed: ResponsesRequest) -> tuple[ChatMessage, ...]:
    response_id = parsed.previous_response_id
    if response_id is None:
        return ()
    try:
        entry = edge.responses.get(response_id, owner, time.monotonic())
    except NotFound as error:
        raise InvalidRequest(error.message, code="previous_response_not_found", param="previous_response_id") from None
    if entry.response.is_running:
        raise InvalidRequest("The previous response has not ended yet.", param="previous_response_id")
    return entry.conversation()


async def _plan(request: web.Request, edge: Edge, parsed: ResponsesRequest, before: tuple[ChatMessage, ...]) -> _Run:
    shared = parsed.shared
    prompt_ids = await message_ids(
        edge.codec,
        parsed.conversation(before),
        add_generation_prompt=True,
        tools=() if parsed.tool_use is None else parsed.tool_use.tools,
    )
    context_len = request_rules(request).card.context_len
    reasoning = reasoning_use(edge.config, shared, prompt_ids, edge.codec)
    response = ResponseObject(
        response_id=f"resp_{uuid4().hex}",
        request=parsed,
        created_s=int(time.time()),
        status="queued" if parsed.is_background else "in_progress",
        is_stored=parsed.is_stored,
    )
    generations = build_choices(
        shared,
        prompt_ids,
        first_id=response.response_id,
        first_index=0,
        max_new_tokens=resolve_max_new_tokens(shared, len(prompt_ids), context_len=context_len, default=None),
        codec=edge.codec,
        deadline_s=None if parsed.is_background else client_deadline_s(request, shared),
        shown_ids=frozenset() if reasoning is None else reasoning.marker_ids,
    )
    entry = StoredResponse(
        response=response,
        owner=request[KEY_ID],
        input_items=listed_input(parsed.body["input"]),
        before=(*before, *parsed.messages),
        events=EventLog() if parsed.is_background and shared.stream is not None else None,
    )
    form = ResponsesStream(response, generations[0], edge.codec, clock=time.time, reasoning=reasoning)
    return _Run(response=response, entry=entry, generations=generations, form=form)


async def _answer(request: web.Request, edge: Edge, run: _Run) -> web.StreamResponse:
    if run.response.request.shared.stream is not None:
        return await answer_stream(request, edge, run.generations, run.form)

    async def collect(index: int, engine_event: EngineEvent) -> None:
        run.form.next_events(index, engine_event)

    await run_choices(edge.engine, run.generations, collect)
    finished = run.response.finished
    assert finished is not None, "run_choices ends with a finish or an error"
    note_finished(request, [finished])
    request[TIMINGS] = speculation_timings([finished])
    return _whole(run.response)


def _settle(edge: Edge, run: _Run) -> None:
    """Keep what has ended; nobody can ask for a response whose client left before it knew the end."""
    if run.response.is_running:
        edge.responses.remove(run.response.response_id)
    else:
        edge.responses.settle(run.entry, time.monotonic())


def _whole(response: ResponseObject) -> web.Response:
    return web.Response(body=orjson.dumps(response.fields()), content_type="application/json")
