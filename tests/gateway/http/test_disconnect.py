from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.http.edge import EDGE
from gateway.ports import GenerationDelta, GenerationRequest
from tests.gateway.conftest import StartEdge, until
from tests.gateway.fakes import FakeEngine, Script

BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
PATIENCE_S = 5


@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize(
    ("is_stream", "hold_after"),
    [(True, 5), (True, 0), (False, 0), (False, 3)],
    ids=["stream", "silent", "json", "json mid"],
)
async def test_a_client_that_leaves_ends_its_generations_at_once(
    start_edge: StartEdge, is_stream: bool, hold_after: int, num_choices: int
) -> None:
    # B-4, C-24: also in silence before the first token, and for answers that are not streamed
    engine = FakeEngine([Script(text="x" * 50, hold_after=hold_after)])
    client = await start_edge(engine)
    fields: dict[str, Any] = {**BODY, "stream": is_stream, "n": num_choices}
    post = asyncio.ensure_future(client.post("/v1/chat/completions", json=fields))
    await asyncio.wait_for(engine.held.wait(), PATIENCE_S)
    if is_stream and hold_after:
        response = await post
        await response.content.readany()
        response.close()
    else:
        post.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while engine.num_closed_early < num_choices:
            await engine.closed.wait()
            engine.closed.clear()
        await until(lambda: engine.num_admitted == 0)
    assert engine.num_running == 0
    counters = client.app[EDGE].counters
    assert (counters.client_closed, counters.open_streams) == (1, 0)


async def test_the_session_goes_on_after_a_client_left(start_edge: StartEdge) -> None:
    # B-5
    engine = FakeEngine([Script(hold_after=2)])
    client = await start_edge(engine)
    response = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    await response.content.readany()
    response.close()
    await asyncio.wait_for(engine.closed.wait(), PATIENCE_S)
    engine.scripts = [Script()]
    again = await client.post("/v1/chat/completions", json=BODY)
    assert (await again.json())["choices"][0]["message"]["content"].startswith("Hello world")


async def test_leaving_at_done_is_no_disconnect(start_edge: StartEdge, caplog: pytest.LogCaptureFixture) -> None:
    client = await start_edge(FakeEngine())
    response = await client.post("/v1/chat/completions", json={**BODY, "stream": True})
    seen = b""
    while b"[DONE]" not in seen:
        seen += await response.content.readany()
    response.close()
    await client.get("/health")
    assert client.app[EDGE].counters.client_closed == 0
    assert caplog.records == []


class FloodEngine(FakeEngine):
    """Never stops writing."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta, None]:
        try:
            while True:
                yield GenerationDelta(text="x" * 500_000, token_ids=(120,))
        finally:
            self.closed.set()


async def test_a_client_that_stops_reading_counts_as_gone(start_edge: StartEdge) -> None:
    engine = FloodEngine()
    client = await start_edge(engine, write_timeout_s=0.1, keep_alive_s=0)
    _, writer = await asyncio.open_connection(client.host, client.port, limit=1024)
    body = b'{"model":"toy","messages":[{"role":"user","content":"Hi"}],"stream":true}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    try:
        await asyncio.wait_for(engine.closed.wait(), PATIENCE_S)
        await until(lambda: client.app[EDGE].counters.client_closed == 1)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)


async def test_many_streams_at_once(start_edge: StartEdge) -> None:
    # B-25
    engine = FakeEngine([Script(text="many streams", block_lens=(3,))])
    client = await start_edge(engine)

    async def one() -> bytes:
        response = await client.post("/v1/chat/completions", json={**BODY, "stream": True, "ignore_eos": False})
        return await response.read()

    raws = await asyncio.gather(*(one() for _ in range(200)))
    assert all(raw.endswith(b"data: [DONE]\n\n") for raw in raws)
    assert client.app[EDGE].counters.responses == {"/v1/chat/completions 200": 200}
    assert client.app[EDGE].counters.client_closed == 0
