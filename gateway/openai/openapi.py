"""The gateway's own OpenAPI 3.1 document: every route with its request fields, answers and error statuses.

Built from the same tables the request parser uses (field_rules.py, field_schemas.py) and the error table, so it can't
drift from the code without a test noticing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.openai.answer_schemas import ANSWER_SCHEMAS
from gateway.openai.field_rules import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from gateway.openai.field_schemas import FIELD_SCHEMAS, nullable

__all__ = ["OPERATIONS", "Operation", "openapi_document"]

Schema = dict[str, Any]

_REASONS = {
    400: "A field is missing, of the wrong type, out of range or not supported",
    401: "No API key, or a wrong one",
    404: "Unknown model, response or URL",
    405: "The URL exists, the method does not",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not JSON in UTF-8",
    429: "The queue is full or a limit of the API key is reached; see Retry-After",
    500: "A bug of the gateway",
    502: "The target failed",
    503: "Loading, draining, or the target is not reachable; see Retry-After",
    504: "The target, or the request's deadline",
}
_GET_ERRORS = (401, 405, 500)
_BODY_ERRORS = (400, 401, 404, 405, 408, 413, 415, 500, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 429, 502, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path.

    Fields:
        answer: component schema of the 200 body; None = not JSON, see ``media``.
        request: component schema of the body; None = no body.
        streams: the answer may also be an event stream.
        is_open: needs no API key.
        query: parameters of the query, name to schema; none is required.
    """

    method: str
    path: str
    operation_id: str
    summary: str
    answer: str | None
    request: str | None = None
    media: str = "application/json"
    streams: bool = False
    is_open: bool = False
    errors: tuple[int, ...] = _GET_ERRORS
    query: Mapping[str, Schema] = field(default_factory=dict)


def _get(path: str, operation_id: str, summary: str, answer: str | None, **more: Any) -> Operation:
    return Operation(method="get", path=path, operation_id=operation_id, summary=summary, answer=answer, **more)


def _post(path: str, operation_id: str, summary: str, answer: str, request: str, **more: Any) -> Operation:
    more.setdefault("errors", _BODY_ERRORS)
    return Operation(
        method="post", path=path, operation_id=operation_id, summary=summary, answer=answer, request=request, **more
    )


_GENERATES: dict[str, Any] = {"streams": True, "errors": _GENERATION_ERRORS}
_STORED: dict[str, Any] = {"errors": (*_GET_ERRORS, 404)}
_STORED_QUERY: dict[str, Any] = {"errors": (*_GET_ERRORS, 400, 404)}
_PAGE: dict[str, Any] = {"media": "text/html", "is_open": True}

_STREAM_QUERY: dict[str, Schema] = {
    "stream": {"enum": ["true", "false"]},
    "starting_after": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
}
_LIST_QUERY: dict[str, Schema] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string"},
}

# fmt: off
OPERATIONS: tuple[Operation, ...] = (
    _post("/v1/chat/completions", "createChatCompletion", "Answer a chat", "ChatCompletion", "ChatRequest",
          **_GENERATES),
    _post("/v1/completions", "createCompletion", "Complete prompts", "Completion", "CompletionRequest", **_GENERATES),
    _post("/v1/responses", "createResponse", "Answer an input", "Response", "ResponseRequest", **_GENERATES),
    _get("/v1/responses/{response_id}", "getResponse", "A stored response, or its stream again", "Response",
         streams=True, query=_STREAM_QUERY, **_STORED_QUERY),
    _get("/v1/responses/{response_id}/input_items", "listInputItems", "The input of a stored response", "ItemList",
         query=_LIST_QUERY, **_STORED_QUERY),
    Operation(method="post", path="/v1/responses/{response_id}/cancel", operation_id="cancelResponse",
              summary="Stop a response in the background", answer="Response", **_STORED_QUERY),
    Operation(method="delete", path="/v1/responses/{response_id}", operation_id="deleteResponse",
              summary="Forget a stored response", answer="Deleted", **_STORED),
    _get("/v1/models", "listModels", "The served model under each of its names", "ModelList"),
    _get("/v1/models/{model_id}", "getModel", "One model", "Model", errors=(*_GET_ERRORS, 404)),
    _post("/tokenize", "tokenize", "Token ids of a prompt or of messages", "Tokens", "TokenizeRequest"),
    _post("/v1/tokenize", "tokenizeV1", "Token ids of a prompt or of messages", "Tokens", "TokenizeRequest"),
    _post("/detokenize", "detokenize", "Text of token ids", "Text", "DetokenizeRequest"),
    _post("/v1/detokenize", "detokenizeV1", "Text of token ids", "Text", "DetokenizeRequest"),
    _get("/health", "health", "The process lives", "Health", is_open=True),
    _get("/ping", "ping", "The process lives", "Health", is_open=True),
    _get("/ready", "ready", "Requests are taken", "Readiness", is_open=True),
    _get("/stats", "stats", "Everything the gateway knows about itself", "Stats"),
    _get("/metrics", "metrics", "The same for Prometheus", None, media="text/plain"),
    _get("/server_info", "serverInfo", "What load tools ask for", "ServerInfo"),
    _get("/get_server_info", "getServerInfo", "What load tools ask for", "ServerInfo"),
    _get("/openapi.json", "openapi", "This document", "Stats"),
    _get("/", "dashboardRoot", "Live dashboard", None, **_PAGE),
    _get("/dashboard", "dashboard", "Live dashboard", None, **_PAGE),
)
# fmt: on


def openapi_document(*, version: str) -> Schema:
    """The whole document as plain JSON values."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "breakeven", "version": version, "license": {"name": "Apache-2.0"}},
        "security": [{"bearer": []}, {}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {**ANSWER_SCHEMAS, **_request_schemas()},
        },
    }


def _operation(operation: Operation) -> Schema:
    content: Schema = {operation.media: {"schema": _ref(operation.answer) if operation.answer else {"type": "string"}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    fields: Schema = {
        "operationId": operation.operation_id,
        "summary": operation.summary,
        "responses": {"200": {"description": "OK", "content": content}, **_errors(operation)},
    }
    if operation.is_open:
        fields["security"] = []
    if operation.request is not None:
        body = {"application/json": {"schema": _ref(operation.request)}}
        fields["requestBody"] = {"required": True, "content": body}
    parameters: list[Schema] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", operation.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        fields["parameters"] = parameters
    return fields


def _errors(operation: Operation) -> Schema:
    error = {"application/json": {"schema": _ref("Error")}}
    answers = {str(status): {"description": _REASONS[status], "content": error} for status in sorted(operation.errors)}
    if operation.path == "/ready":
        not_ready = {"application/json": {"schema": _ref("Readiness")}}
        answers["503"] = {"description": "Loading or draining", "content": not_ready}
    return answers


def _request_schemas() -> Schema:
    texts = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
            "content": texts,
            "name": nullable({"type": "string"}),
            "tool_calls": nullable({"type": "array", "items": {"type": "object"}}),
            "tool_call_id": nullable({"type": "string"}),
        },
        "required": ["role"],
    }
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return {
        "ChatMessage": message,
        "ChatRequest": _request(CHAT_FIELDS, ["model", "messages"]),
        "CompletionRequest": _request(COMPLETION_FIELDS, ["model", "prompt"]),
        "ResponseRequest": _request(RESPONSES_FIELDS, ["model", "input"]),
        "TokenizeRequest": {
            "type": "object",
            "description": "Exactly one of prompt and messages.",
            "properties": {
                "model": nullable({"type": "string"}),
                "prompt": nullable({"type": "string"}),
                "messages": nullable(FIELD_SCHEMAS["messages"]),
                "add_special_tokens": nullable({"type": "boolean"}),
                "add_generation_prompt": nullable({"type": "boolean"}),
            },
        },
        "DetokenizeRequest": {
            "type": "object",
            "properties": {
                "model": nullable({"type": "string"}),
                "tokens": tokens,
                "skip_special_tokens": nullable({"type": "boolean"}),
            },
            "required": ["tokens"],
        },
    }


def _request(names: Iterable[str], required: list[str]) -> Schema:
    properties = {
        name: FIELD_SCHEMAS[name] if name in required else nullable(FIELD_SCHEMAS[name]) for name in sorted(names)
    }
    return {"type": "object", "properties": properties, "required": required}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
