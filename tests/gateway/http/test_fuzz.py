"""Any body gets an answer of the right kind: never a 500, never a hang, and room is always given back.

``python -m benchmarks.fuzz`` does the same with 10,000 bodies and looks at the memory too.
"""

from __future__ import annotations

import random

from benchmarks.fuzz import BODY_URLS, any_body, main, stored_request
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine, Script

NUM_BODIES = 600


async def test_any_body_gets_an_answer(start_edge: StartEdge) -> None:
    dice = random.Random(5)
    engine = FakeEngine([Script(text="ok")])
    client = await start_edge(engine, reasoning_markers=("<think>", "</think>"))
    statuses = set()
    for _ in range(NUM_BODIES):
        raw = any_body(dice)
        url = dice.choice(BODY_URLS)
        response = await client.post(url, data=raw, headers={"Content-Type": "application/json"})
        statuses.add(response.status)
        assert response.status in (200, 400, 404), (url, raw, await response.text())
        if response.status != 200:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        await response.read()
        if b'"background"' not in raw:  # whose room is given back a little later
            assert (engine.num_admitted, engine.num_running) == (0, 0), raw
    assert statuses >= {200, 400}


async def test_any_stored_response_too(start_edge: StartEdge) -> None:
    dice = random.Random(6)
    client = await start_edge(FakeEngine([Script(text="ok")]))
    body = {"model": "toy", "input": "Hi"}
    statuses = set()
    for _ in range(100):
        answer = await (await client.post("/v1/responses", json={**body, "background": dice.random() < 0.5})).json()
        method, path = stored_request(dice, [answer["id"]])
        response = await client.request(method, path)
        statuses.add(response.status)
        assert response.status in (200, 400, 404), (method, path, await response.text())
        await response.read()
    assert statuses == {200, 400, 404}


def test_the_long_run_works() -> None:
    main(["--bodies", "60"])
