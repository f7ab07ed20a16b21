"""The document describes the routes there are, and real answers fit its schemas."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gateway.config import GatewayConfig
from gateway.errors import HTTP_ERRORS
from gateway.http import create_app
from gateway.openai.field_rules import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from gateway.openai.field_schemas import FIELD_SCHEMAS
from gateway.openai.openapi import OPERATIONS, openapi_document
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import ByteCodec, FakeEngine
from tests.gateway.http.wide_engine import WideEngine

HI = [{"role": "user", "content": "Hi"}]
DOCUMENT = openapi_document(version="1")


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]})


def test_every_route_is_described_and_no_other() -> None:
    app = create_app(FakeEngine(), ByteCodec(), GatewayConfig())
    served = {
        (route.method.lower(), re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served


def test_every_honoured_field_has_a_schema_and_no_other() -> None:
    assert FIELD_SCHEMAS.keys() == CHAT_FIELDS | COMPLETION_FIELDS | RESPONSES_FIELDS


def test_all_schemas_are_valid_and_all_references_exist() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)):
        assert name in schemas


def test_operation_ids_are_unique_and_statuses_come_from_the_error_table() -> None:
    ids = [operation.operation_id for operation in OPERATIONS]
    assert len(set(ids)) == len(ids)
    statuses = {status for operation in OPERATIONS for status in operation.errors}
    assert statuses == {status for status, _ in HTTP_ERRORS.values()}


async def test_the_document_is_served(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    document = await (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert document["info"]["version"] == "0.1.0"
    assert document["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANSWERS: list[tuple[str, dict[str, Any] | None, str]] = [
    ("/v1/chat/completions", {"model": "toy", "messages": HI, "logprobs": True, "top_logprobs": 1}, "ChatCompletion"),
    ("/v1/chat/completions", {"model": "toy", "messages": HI, "return_token_ids": True, "n": 2}, "ChatCompletion"),
    ("/v1/chat/completions", {"model": "toy", "messages": HI, "tools": TOOLS}, "ChatCompletion"),
    ("/v1/completions", {"model": "toy", "prompt": "ab", "echo": True, "logprobs": 1}, "Completion"),
    ("/v1/completions", {"model": "toy", "prompt": "ab", "return_token_ids": True}, "Completion"),
    ("/v1/responses", {"model": "toy", "input": "Hi"}, "Response"),
    ("/tokenize", {"prompt": "ab"}, "Tokens"),
    ("/detokenize", {"tokens": [97]}, "Text"),
    ("/v1/chat/completions", {"model": "toy"}, "Error"),
    ("/v1/models", None, "ModelList"),
    ("/v1/models/toy", None, "Model"),
    ("/v1/models/other", None, "Error"),
    ("/health", None, "Health"),
    ("/ready", None, "Readiness"),
    ("/server_info", None, "ServerInfo"),
    ("/stats", None, "Stats"),
]


@pytest.mark.parametrize(("url", "body", "schema"), ANSWERS)
async def test_a_real_answer_fits_its_schema(
    start_edge: StartEdge, url: str, body: dict[str, Any] | None, schema: str
) -> None:
    client = await start_edge(WideEngine())
    response = await (client.get(url) if body is None else client.post(url, json=body))
    validator(schema).validate(await response.json())


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ("ChatRequest", {"model": "toy", "messages": HI, "temperature": None, "stop": ["a"], "tools": TOOLS}),
        ("CompletionRequest", {"model": "toy", "prompt": [[1, 2], [3]], "logprobs": 0}),
        ("ResponseRequest", {"model": "toy", "input": [{"role": "user", "content": "x"}]}),
    ],
)
def test_good_bodies_fit_the_request_schemas(schema: str, body: dict[str, Any]) -> None:
    validator(schema).validate(body)
    del body["model"]
    assert not validator(schema).is_valid(body)
