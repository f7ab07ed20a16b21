"""POST /v1/responses: one answer in OpenAI's newer format. Nothing is stored."""

from __future__ import annotations

import time
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.http.answer import admitted, client_deadline_s
from gateway.http.body import read_json_body
from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import EDGE, Edge, request_rules
from gateway.http.prompts import message_ids
from gateway.http.server_timing import TIMINGS, speculation_timings
from gateway.http.stream import answer_stream
from gateway.openai.generation import build_choices, resolve_max_new_tokens
from gateway.openai.responses_object import ResponseObject
from gateway.openai.responses_request import parse_responses_request
from gateway.openai.responses_stream import ResponsesStream
from gateway.ports import GenerationRequest

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/v1/responses")
async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer one input, as a stream of typed events or as one object."""
    edge = request.app[EDGE]
    body = await read_json_body(request, edge.config)
    rules = request_rules(request)
    parsed = parse_responses_request(body, rules)
    shared = parsed.shared
    response_id = f"resp_{uuid4().hex}"
    async with admitted(edge, 1):
        prompt_ids = await message_ids(
            edge.codec,
            parsed.messages,
            add_generation_prompt=True,
            tools=() if parsed.tool_use is None else parsed.tool_use.tools,
        )
        generations = build_choices(
            shared,
            prompt_ids,
            first_id=response_id,
            first_index=0,
            max_new_tokens=resolve_max_new_tokens(
                shared, len(prompt_ids), context_len=rules.card.context_len, default=None
            ),
            codec=edge.codec,
            deadline_s=client_deadline_s(request, shared),
        )
        response = ResponseObject(response_id=response_id, request=parsed, created_s=int(time.time()))
        form = ResponsesStream(response, generations[0], edge.codec, clock=time.time)
        if shared.stream is not None:
            return await answer_stream(request, edge, generations, form)
        return await _answer_whole(request, edge, generations, form)


async def _answer_whole(
    request: web.Request, edge: Edge, generations: list[GenerationRequest], form: ResponsesStream
) -> web.Response:
    async def collect(index: int, engine_event: EngineEvent) -> None:
        form.next_events(index, engine_event)

    await run_choices(edge.engine, generations, collect)
    finished = form.response.finished
    assert finished is not None, "run_choices ends with a finish or an error"
    request[TIMINGS] = speculation_timings([finished])
    return web.Response(body=orjson.dumps(form.response.fields()), content_type="application/json")
