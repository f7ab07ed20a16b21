"""The official SDK against a collector of our own: what arrives over OTLP is the span, in the caller's trace.

Runs where the SDK is installed: it is optional, and in no lock file.
"""

from __future__ import annotations

import asyncio
import gzip

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.config import GatewayConfig
from gateway.http import create_app
from gateway.http.otel import open_exporter
from tests.gateway.fakes import ByteCodec
from tests.gateway.http.wide_engine import WideEngine

pytest.importorskip("opentelemetry.sdk")
service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_spans_arrive_at_a_collector() -> None:
    received = asyncio.Queue()

    async def collect(request: web.Request) -> web.Response:
        raw = await request.read()
        received.put_nowait(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        return web.Response(body=service.ExportTraceServiceResponse().SerializeToString())

    collector = web.Application()
    collector.router.add_post("/v1/traces", collect)
    server = TestServer(collector)
    await server.start_server()
    exporter = open_exporter(str(server.make_url("/v1/traces")), version="9.9")
    assert exporter is not None
    client = TestClient(TestServer(create_app(WideEngine(), ByteCodec(), GatewayConfig(), spans=exporter)))
    await client.start_server()
    body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "n": 2}
    for headers in ({"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}, {"traceparent": "broken"}):
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status == 200
    await client.close()
    await asyncio.to_thread(exporter.close)
    spans = []
    resource = {}
    while not received.empty():
        for part in service.ExportTraceServiceRequest.FromString(received.get_nowait()).resource_spans:
            resource = {entry.key: entry.value.string_value for entry in part.resource.attributes}
            spans += [span for scope in part.scope_spans for span in scope.spans]
    await server.close()
    assert (resource["service.name"], resource["service.version"]) == ("breakeven", "9.9")
    continued, fresh = spans
    assert (continued.trace_id.hex(), continued.parent_span_id.hex(), continued.trace_state) == (TRACE, SPAN, "a=1")
    assert (fresh.parent_span_id, fresh.trace_id.hex() != TRACE) == (b"", True)
    assert continued.name == "chat toy"
    assert continued.kind == continued.SPAN_KIND_SERVER
    found = {entry.key: entry.value for entry in continued.attributes}
    assert found["gen_ai.usage.output_tokens"].int_value == 22
    assert [value.string_value for value in found["gen_ai.response.finish_reasons"].array_value.values] == ["stop"] * 2
    assert found["http.response.status_code"].int_value == 200
    assert 0 < continued.end_time_unix_nano - continued.start_time_unix_nano < 60e9
