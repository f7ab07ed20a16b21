"""Token ids, groups of tokens, and timing headers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine, Script
from tests.gateway.sse_reader import chunks, text_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
HELLO = list(b"Hello world")


def bodies(**fields: Any) -> list[tuple[str, dict[str, Any]]]:
    return [
        (CHAT, {"model": "toy", "messages": MESSAGES, **fields}),
        (TEXT, {"model": "toy", "prompt": "Hi", **fields}),
    ]


@pytest.mark.parametrize(("interval", "num_events"), [(1, 11), (5, 3), (100, 2)])
async def test_events_hold_the_tokens_asked_for(start_edge: StartEdge, interval: int, num_events: int) -> None:
    client = await start_edge(FakeEngine([Script(block_lens=(3, 1))]))
    for url, body in bodies(stream=True, stream_interval=interval, return_token_ids=True, logprobs=1):
        body = body if url == TEXT else {**body, "logprobs": True}
        found = chunks(await (await client.post(url, json=body)).read())
        ids = [chunk["choices"][0]["token_ids"] for chunk in found if "token_ids" in chunk["choices"][0]]
        assert len(ids) == num_events
        assert [token_id for group in ids for token_id in group] == HELLO
        assert len(ids[0]) == 1
        assert text_of(found) == "Hello world"
        assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in found if chunk["choices"][0]["logprobs"]) == 11


async def test_the_interval_of_the_configuration(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(block_lens=(11,))]), stream_interval=1)
    url, body = bodies(stream=True)[0]
    found = chunks(await (await client.post(url, json=body)).read())
    assert [chunk["choices"][0]["delta"].get("content") for chunk in found][1:-1] == list("Hello world")


async def test_token_ids_of_whole_answers(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    (_, chat), (_, text) = bodies(return_token_ids=True)
    answer = await (await client.post(CHAT, json=chat)).json()
    assert answer["choices"][0]["token_ids"] == HELLO
    assert bytes(answer["prompt_token_ids"][1:]) == b"user:Hi\nassistant:"
    choice = (await (await client.post(TEXT, json=text)).json())["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (HELLO, [256, *b"Hi"])
    first = chunks(await (await client.post(CHAT, json={**chat, "stream": True})).read())[0]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]


async def test_server_timing(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    url, body = bodies(n=2)[0]
    timing = (await client.post(url, json=body)).headers["Server-Timing"]
    assert "verify;dur=40.0, draft;dur=8.0" in timing
    assert 'spec;desc="rounds=8 plain=2 drafted=24 accepted=12"' in timing
    assert timing.startswith("head;dur=")
    assert "queue;dur=0.0, prefill;dur=0.0" in timing
