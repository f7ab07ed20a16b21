"""One span a request, with what it asked for, what it got and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.config import GatewayConfig
from gateway.errors import TargetFailed
from gateway.http import create_app
from gateway.http.otel import open_exporter
from gateway.http.request_trace import RequestSpan
from tests.gateway.conftest import until
from tests.gateway.fakes import ByteCodec, Script
from tests.gateway.http.wide_engine import WideEngine

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "seed": 7, "max_tokens": 40}


@dataclass
class Kept:
    """Keeps spans."""

    spans: list[RequestSpan] = field(default_factory=list)

    def export(self, span: RequestSpan) -> None:
        self.spans.append(span)

    def close(self) -> None: ...


async def traced(engine: WideEngine, kept: Any, **settings: Any) -> TestClient:
    client = TestClient(TestServer(create_app(engine, ByteCodec(), GatewayConfig(**settings), spans=kept)))
    await client.start_server()
    return client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "body", "name"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}, "chat toy"),
        (
            "/v1/completions",
            {"model": "toy", "prompt": "Hi", "n": 2, "seed": 7, "max_tokens": 40},
            "text_completion toy",
        ),
        ("/v1/responses", {"model": "toy", "input": "Hi", "seed": 7, "max_output_tokens": 40}, "chat toy"),
    ],
)
async def test_a_good_request(url: str, body: dict[str, Any], name: str, stream: bool) -> None:
    kept = Kept()
    client = await traced(WideEngine(), kept)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
    response = await client.post(url, json={**body, "stream": stream}, headers=headers)
    text = await response.text()
    await client.get("/health")
    await client.close()
    (span,) = kept.spans
    assert (span.name, span.is_error) == (name, False)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:x}", span.parent.state) == (TRACE, "a=1")
    assert span.begin_ns <= span.end_ns
    found = dict(span.attributes)
    num_choices = body.get("n", 1)
    assert found["gen_ai.response.id"] in text
    assert ("gen_ai.response.time_to_first_chunk" in found) is stream
    expected = {
        "gen_ai.operation.name": name.split()[0], "gen_ai.provider.name": "breakeven", "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 40, "gen_ai.request.seed": 7, "gen_ai.request.temperature": 1.0,
        "gen_ai.request.stream": stream, "gen_ai.request.choice.count": num_choices,
        "gen_ai.response.finish_reasons": ["stop"] * num_choices,
        "gen_ai.usage.output_tokens": 11 * num_choices, "gen_ai.usage.cache_read.input_tokens": 2,
        "breakeven.spec.accepted_tokens": 6 * num_choices, "http.request.method": "POST", "http.route": url,
        "http.response.status_code": 200,
    }  # fmt: skip
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("engine", "body", "status", "code", "is_error"),
    [
        (WideEngine, {"model": "toy"}, 400, "missing_required_parameter", False),
        (WideEngine, {**CHAT, "model": "other"}, 404, "model_not_found", False),
        (lambda: WideEngine([Script(error=TargetFailed("lost"))]), CHAT, 502, "upstream_error", True),
        (lambda: WideEngine([Script(error=OSError())]), CHAT, 500, "internal_error", True),
        (lambda: WideEngine([Script(error=TargetFailed("lost"), error_after=2)]), {**CHAT, "stream": True}, 200,
         "upstream_error", True),
    ],
)  # fmt: skip
async def test_a_bad_request(engine: Any, body: dict[str, Any], status: int, code: str, is_error: bool) -> None:
    kept = Kept()
    client = await traced(engine(), kept)
    await (await client.post("/v1/chat/completions", json=body)).read()
    await client.close()
    (span,) = kept.spans
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (status, code)
    assert span.is_error is is_error
    assert span.parent is None


async def test_a_client_that_left() -> None:
    kept = Kept()
    engine = WideEngine([Script(hold_after=1)])
    client = await traced(engine, kept)
    post = asyncio.ensure_future(client.post("/v1/chat/completions", json=CHAT))
    await engine.held.wait()
    post.cancel()
    await until(lambda: bool(kept.spans))
    await client.close()
    assert kept.spans[0].attributes["http.response.status_code"] == 499
    assert not kept.spans[0].is_error


def test_no_endpoint_no_exporter() -> None:
    assert open_exporter("", version="1") is None


def test_a_missing_package_is_said_and_does_not_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    assert open_exporter("http://127.0.0.1:1/v1/traces", version="1") is None
    assert "pip install opentelemetry-sdk" in capsys.readouterr().out
