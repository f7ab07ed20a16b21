from __future__ import annotations

import pytest

from gateway.http.edge import EDGE
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine

BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_clients_request_id_comes_back(start_edge: StartEdge, is_stream: bool) -> None:
    client = await start_edge(FakeEngine())
    headers = {"x-request-id": "abc-1.2:3"}
    response = await client.post("/v1/chat/completions", json={**BODY, "stream": is_stream}, headers=headers)
    assert response.headers["x-request-id"] == "abc-1.2:3"
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert response.headers["Server-Timing"].startswith("head;dur=")


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "é"])
async def test_an_unsafe_request_id_is_replaced(start_edge: StartEdge, given: str) -> None:
    client = await start_edge(FakeEngine())
    response = await client.get("/nowhere", headers={"x-request-id": given})
    assert len(response.headers["x-request-id"]) == 32


async def test_responses_are_counted_by_route_not_by_url(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    for url in ("/v1/models/a", "/v1/models/b", "/x1", "/x2", "/health"):
        await client.get(url)
    assert client.app[EDGE].counters.responses == {"/v1/models/{model_id} 404": 2, "unknown 404": 2, "/health 200": 1}
