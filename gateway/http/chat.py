"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from uuid import uuid4

from aiohttp import web

from gateway.http.answer import admitted, answer, client_deadline_s
from gateway.http.body import read_json_body
from gateway.http.edge import EDGE, request_rules
from gateway.http.prompts import message_ids
from gateway.openai.answer_plan import AnswerPlan
from gateway.openai.chat_request import parse_chat_request
from gateway.openai.generation import build_choices, resolve_max_new_tokens
from gateway.openai.reasoning import reasoning_use
from gateway.openai.responses import ResponseHead

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer one chat, as a stream or as one object."""
    edge = request.app[EDGE]
    body = await read_json_body(request, edge.config)
    rules = request_rules(request)
    chat = parse_chat_request(body, rules)
    shared = chat.shared
    response_id = f"chatcmpl-{uuid4().hex}"
    with admitted(edge, shared.num_choices):
        prompt_ids = await message_ids(
            edge.codec,
            chat.messages,
            add_generation_prompt=chat.add_generation_prompt,
            tools=() if chat.tool_use is None else chat.tool_use.tools,
        )
        reasoning = reasoning_use(edge.config, shared, prompt_ids, edge.codec)
        choices = build_choices(
            shared,
            prompt_ids,
            first_id=response_id,
            first_index=0,
            max_new_tokens=resolve_max_new_tokens(
                shared, len(prompt_ids), context_len=rules.card.context_len, default=None
            ),
            codec=edge.codec,
            deadline_s=client_deadline_s(request, shared),
            shown_ids=frozenset() if reasoning is None else reasoning.marker_ids,
        )
        plan = AnswerPlan(
            head=ResponseHead(
                endpoint="chat",
                response_id=response_id,
                created_s=int(time.time()),
                model=shared.model,
                has_reasoning_alias=edge.config.reasoning_alias,
            ),
            shared=shared,
            choices=tuple(choices),
            echo_texts=("",) * len(choices),
            reasoning=reasoning,
        )
        return await answer(request, edge, plan)
