"""POST /tokenize and /detokenize, also under /v1: the target's own tokenizer, without generating anything."""

from __future__ import annotations

import orjson
from aiohttp import web

from gateway.errors import InvalidRequest
from gateway.http.body import read_json_body
from gateway.http.edge import EDGE, request_rules
from gateway.http.prompts import message_ids, text_prompt_ids
from gateway.openai.chat_request import parse_messages
from gateway.openai.fields import FieldReader, describe
from gateway.openai.requests import check_model

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/tokenize")
@routes.post("/v1/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of ``prompt`` or of ``messages``."""
    edge = request.app[EDGE]
    reader = FieldReader(await read_json_body(request, edge.config))
    rules = request_rules(request)
    check_model(reader, rules)
    prompt = reader.string("prompt")
    has_messages = reader.get("messages") is not None
    if (prompt is None) is not has_messages:
        raise InvalidRequest("Exactly one of prompt and messages is required.", param="prompt")
    if prompt is not None:
        is_special = reader.boolean("add_special_tokens", default=True)
        ids = await text_prompt_ids(edge.codec, prompt, add_special_tokens=is_special)
    else:
        ids = await message_ids(
            edge.codec,
            parse_messages(reader, max_messages=rules.config.max_messages),
            add_generation_prompt=reader.boolean("add_generation_prompt", default=True),
        )
    body = {"tokens": ids, "count": len(ids), "max_model_len": rules.card.context_len}
    return web.Response(body=orjson.dumps(body), content_type="application/json")


@routes.post("/detokenize")
@routes.post("/v1/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Text of ``tokens``."""
    edge = request.app[EDGE]
    reader = FieldReader(await read_json_body(request, edge.config))
    rules = request_rules(request)
    check_model(reader, rules)
    tokens = reader.require("tokens")
    vocab_size = rules.card.vocab_size
    if not isinstance(tokens, list):
        reader.fail("tokens", f"must be an array, not {describe(tokens)}", code="invalid_type")
    if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in tokens):
        reader.fail("tokens", f"must hold only token ids from 0 to {vocab_size - 1}")
    text = edge.codec.decode(tokens, skip_special_tokens=reader.boolean("skip_special_tokens"))
    return web.Response(body=orjson.dumps({"prompt": text}), content_type="application/json")
