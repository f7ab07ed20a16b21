from __future__ import annotations

import asyncio

import pytest

from gateway.errors import QueueFull
from gateway.http.key_limits import KeyLimits, RateState
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine, Script

BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
KEYS = ("first-key", "second-key")
URL = "/v1/chat/completions"


def test_a_minute_may_be_used_at_once_and_comes_back_evenly() -> None:
    limits = KeyLimits(max_running=0, max_per_minute=6)
    states = [limits.enter("a", 0.0) for _ in range(6)]
    assert states[0] == RateState(limit=6, remaining=5, reset_s=10.0)
    assert states[-1] == RateState(limit=6, remaining=0, reset_s=60.0)
    with pytest.raises(QueueFull) as caught:
        limits.enter("a", 4.0)
    assert (caught.value.code, caught.value.retry_after_s) == ("rate_limit_exceeded", pytest.approx(6.0))
    limits.enter("a", 10.0)
    limits.enter("b", 10.0)
    assert limits.rate_state("a", 1000.0) == RateState(limit=6, remaining=6, reset_s=0.0)


def test_running_requests_of_one_key() -> None:
    limits = KeyLimits(max_running=2, max_per_minute=0)
    assert limits.enter("a", 0.0) is None
    limits.enter("a", 0.0)
    with pytest.raises(QueueFull) as caught:
        limits.enter("a", 0.0)
    assert caught.value.code == "concurrency_limit_exceeded"
    limits.leave("a")
    limits.enter("a", 0.0)


def test_no_limits() -> None:
    assert not KeyLimits(max_running=0, max_per_minute=0)


async def test_headers_and_the_refusal(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(), api_keys=KEYS, max_requests_per_minute=2)
    first, second = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    answer = await client.post(URL, json=BODY, headers=first)
    assert answer.headers["x-ratelimit-limit-requests"] == "2"
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert answer.headers["x-ratelimit-reset-requests"] == "30s"
    assert (await client.post(URL, json={}, headers=first)).status == 400  # counts as well
    refused = await client.post(URL, json=BODY, headers=first)
    assert refused.status == 429
    error = (await refused.json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 29_000 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert refused.headers["Retry-After"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert (await client.post(URL, json=BODY, headers=second)).status == 200
    assert (await client.get("/v1/models", headers=first)).status == 200


async def test_a_slow_stream_keeps_its_place(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(hold_after=2)])
    client = await start_edge(engine, max_running_per_key=1)
    stream = await client.post(URL, json={**BODY, "stream": True})
    refused = await client.post(URL, json=BODY)
    assert refused.status == 429
    assert (await refused.json())["error"]["code"] == "concurrency_limit_exceeded"
    assert "x-ratelimit-limit-requests" not in refused.headers
    engine.hold.set()
    await asyncio.wait_for(stream.read(), 5)
    assert (await client.post(URL, json=BODY)).status == 200
