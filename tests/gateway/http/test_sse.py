from __future__ import annotations

import asyncio
import json

import pytest

from gateway.errors import TargetFailed
from gateway.http.edge import EDGE
from gateway.openai.framing import event
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine, Script
from tests.gateway.sse_reader import chunks, events, text_of

BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
KEEP_ALIVE = ": keep-alive"


def test_an_event_is_one_data_line() -> None:
    # C-2
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'


async def test_a_silent_start_gets_keep_alives_then_everything(start_edge: StartEdge) -> None:
    # C-13
    engine = FakeEngine([Script(hold_after=0)])
    client = await start_edge(engine, keep_alive_s=0.02)
    response = await asyncio.wait_for(client.post("/v1/chat/completions", json=BODY), 5)
    assert response.status == 200
    assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
    assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
    engine.hold.set()
    found = events(await response.read())
    assert found[-1] == "[DONE]"
    assert next(item for item in found if item != KEEP_ALIVE)["choices"][0]["delta"]["role"] == "assistant"
    assert client.app[EDGE].counters.keep_alives >= 2


async def test_an_error_after_a_keep_alive_is_told_inside_the_stream(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(hold_after=0, error=TargetFailed("lost"))])
    client = await start_edge(engine, keep_alive_s=0.02)
    response = await client.post("/v1/chat/completions", json=BODY)
    engine.hold.set()
    found = [item for item in events(await response.read()) if item != KEEP_ALIVE]
    assert found[0]["error"]["message"] == "lost"
    assert found[1:] == ["[DONE]"]


async def test_a_busy_stream_has_no_comments(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(text="x" * 100)]), keep_alive_s=15)
    response = await client.post("/v1/chat/completions", json=BODY)
    assert b"keep-alive" not in await response.read()


async def test_zero_sends_no_comments_at_all(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(hold_after=1)])
    client = await start_edge(engine, keep_alive_s=0)
    response = await client.post("/v1/chat/completions", json=BODY)
    await asyncio.sleep(0.05)
    engine.hold.set()
    assert KEEP_ALIVE not in events(await response.read())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_frames_of_the_body_are_right_on_the_wire(start_edge: StartEdge, version: str) -> None:
    # try_write frames chunks by itself, and HTTP/1.0 has none.
    client = await start_edge(FakeEngine([Script(text="many small events of one stream", block_lens=(2,))]))
    reader, writer = await asyncio.open_connection(client.host, client.port)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer, _, raw = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    writer.close()
    assert (b"Transfer-Encoding: chunked" in answer) is (version == "1.1")
    if version == "1.1":
        parts, rest = [], raw
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            parts.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        assert parts[-1] == b""
        raw = b"".join(parts)
    assert text_of(chunks(raw)) == "many small events of one stream"
