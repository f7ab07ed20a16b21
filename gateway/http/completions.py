"""POST /v1/completions."""

from __future__ import annotations

import time
from uuid import uuid4

from aiohttp import web

from gateway.errors import InvalidRequest
from gateway.http.answer import admitted, answer, client_deadline_s
from gateway.http.body import read_json_body
from gateway.http.edge import EDGE, Edge, request_rules
from gateway.http.prompts import text_prompt_ids
from gateway.openai.answer_plan import AnswerPlan
from gateway.openai.completion_request import CompletionRequest, parse_completion_request
from gateway.openai.generation import build_choices, resolve_max_new_tokens
from gateway.openai.responses import ResponseHead
from gateway.ports import GenerationRequest

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/v1/completions")
async def create_completion(request: web.Request) -> web.StreamResponse:
    """Complete one or more prompts, as a stream or as one object."""
    edge = request.app[EDGE]
    body = await read_json_body(request, edge.config)
    rules = request_rules(request)
    completion = parse_completion_request(body, rules)
    num_choices = len(completion.prompts) * completion.shared.num_choices
    with admitted(edge, num_choices):
        return await answer(request, edge, await _plan(request, edge, completion, rules.card.context_len))


async def _plan(request: web.Request, edge: Edge, completion: CompletionRequest, context_len: int) -> AnswerPlan:
    shared = completion.shared
    response_id = f"cmpl-{uuid4().hex}"
    choices: list[GenerationRequest] = []
    echo_texts: list[str] = []
    for prompt in completion.prompts:
        prompt_ids = await _prompt_ids(edge, prompt, add_special_tokens=completion.add_special_tokens)
        choices += build_choices(
            shared,
            prompt_ids,
            first_id=response_id,
            first_index=len(choices),
            max_new_tokens=resolve_max_new_tokens(
                shared,
                len(prompt_ids),
                context_len=context_len,
                default=edge.config.default_max_tokens,
            ),
            codec=edge.codec,
            score_prompt=completion.echo and shared.num_logprobs is not None,
            deadline_s=client_deadline_s(request, shared),
        )
        echo_text = _echo_text(edge, completion, prompt_ids) if completion.echo else ""
        echo_texts += [echo_text] * shared.num_choices
    return AnswerPlan(
        head=ResponseHead(
            endpoint="completions", response_id=response_id, created_s=int(time.time()), model=shared.model
        ),
        shared=shared,
        choices=tuple(choices),
        echo_texts=tuple(echo_texts),
    )


async def _prompt_ids(edge: Edge, prompt: str | tuple[int, ...], *, add_special_tokens: bool) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return prompt
    ids = await text_prompt_ids(edge.codec, prompt, add_special_tokens=add_special_tokens)
    if not ids:
        raise InvalidRequest("prompt has no tokens.", param="prompt")
    return ids


def _echo_text(edge: Edge, completion: CompletionRequest, prompt_ids: tuple[int, ...]) -> str:
    # Decoded from the ids rather than copied, so that text_offset fits the text whatever the tokenizer normalised.
    return edge.codec.decode(prompt_ids, skip_special_tokens=completion.shared.skip_special_tokens)
