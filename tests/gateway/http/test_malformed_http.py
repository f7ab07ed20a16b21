"""What never becomes a request is answered with a JSON error as well: over a real socket, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from gateway.http.edge import EDGE
from tests.gateway.fakes import ByteCodec, FakeEngine

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BAD_REQUEST = (b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")
CASES = {
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 40 + b"\r\n\r\n", "invalid_http"),
    "words": (b"hello there\r\n\r\n", "invalid_http"),
    "version": (b"GET /health HTTP/x.y\r\nHost: x\r\n\r\n", "invalid_http"),
    "header": (HEAD + b"bad header\r\n\r\n", "invalid_http"),
    "nul in a header": (HEAD + b"a: b\x00c\r\n\r\n", "invalid_http"),
    "length": (HEAD + b"Content-Length: -5\r\n\r\n", "invalid_http"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", "invalid_http"),
    "length and chunks": (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "invalid_http"),
    "long line": (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", "head_too_large"),
    "long header": (HEAD + b"a: " + b"b" * 20_000 + b"\r\n\r\n", "head_too_large"),
}


@pytest.fixture
async def edge() -> AsyncIterator[tuple[int, FakeEngine, object]]:
    config, engine = GatewayConfig(port=0), FakeEngine()
    app = create_app(engine, ByteCodec(), config)
    runner = await start_server(app, config)
    yield runner.addresses[0][1], engine, app[EDGE].counters
    await runner.cleanup()


async def exchange(port: int, raw: bytes) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), 5)  # to the end: the connection is closed
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("name", CASES)
async def test_a_json_error(edge: tuple[int, FakeEngine, object], name: str, caplog: pytest.LogCaptureFixture) -> None:
    port, _, counters = edge
    raw, code = CASES[name]
    head, body = await exchange(port, raw)
    assert head.startswith(BAD_REQUEST)
    assert b"Content-Type: application/json" in head
    assert b"x-request-id: " in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert len(error["message"]) < 200
    assert error["message"].isprintable()
    assert counters.responses == {"malformed 400": 1}
    assert caplog.records == []  # no traceback for what anybody may send


async def test_a_good_request_before_it_was_answered(edge: tuple[int, FakeEngine, object]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", edge[0])
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 OK")
    writer.write(b"nonsense\r\n\r\n")
    assert b'"code":"invalid_http"' in await asyncio.wait_for(reader.read(), 5)
    writer.close()


async def test_broken_chunks_are_a_bad_body(edge: tuple[int, FakeEngine, object]) -> None:
    port, engine, _ = edge
    raw = HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    head, body = await exchange(port, raw)
    assert head.startswith(BAD_REQUEST)
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    assert (engine.num_admitted, engine.requests) == (0, [])
