"""The store's bounds, by a clock that the test moves."""

from __future__ import annotations

import pytest

from gateway.config import GatewayConfig
from gateway.errors import NotFound, QueueFull
from gateway.http.event_log import EventLog
from gateway.http.response_store import ResponseStore, StoredResponse
from gateway.openai.requests import RequestRules
from gateway.openai.responses_input import listed_input
from gateway.openai.responses_object import MessageItem, ResponseObject
from gateway.openai.responses_request import parse_responses_request
from gateway.ports import ChatMessage
from tests.gateway.fakes import FakeEngine


def entry(name: str, *, owner: str = "", text: str = "answer") -> StoredResponse:
    rules = RequestRules(config=GatewayConfig(), card=FakeEngine().model_card())
    request = parse_responses_request({"model": "toy", "input": "Hi"}, rules)
    response = ResponseObject(
        response_id=name, request=request, created_s=1, items=[MessageItem(item_id="m", text=text)]
    )
    return StoredResponse(
        response=response, owner=owner, input_items=listed_input("Hi"), before=(ChatMessage(role="user", content="Hi"),)
    )


def store(**limits: float) -> ResponseStore:
    return ResponseStore(**{"max_responses": 3, "max_bytes": 1 << 20, "ttl_s": 60.0, **limits})


def kept(of: ResponseStore, now_s: float = 0.0) -> list[str]:
    found = []
    for name in "abcdef":
        try:
            found.append(of.get(name, "", now_s).response.response_id)
        except NotFound:
            continue
    return found


def put(into: ResponseStore, name: str, now_s: float = 0.0, **more: str) -> StoredResponse:
    new = entry(name, **more)
    into.add(new, now_s)
    into.settle(new, now_s)
    return new


def test_the_oldest_goes_first() -> None:
    full = store()
    for name in "abcde":
        put(full, name)
    assert kept(full) == ["c", "d", "e"]


def test_what_runs_stays_and_a_store_full_of_it_refuses() -> None:
    full = store()
    running = entry("a")
    full.add(running, 0.0)
    for name in "bcd":
        put(full, name)
    assert kept(full) == ["a", "c", "d"]
    full.add(entry("e"), 0.0)
    full.add(entry("f"), 0.0)
    with pytest.raises(QueueFull) as caught:
        full.add(entry("g"), 0.0)
    assert caught.value.code == "store_full"
    full.settle(running, 0.0)
    full.add(entry("g"), 0.0)
    assert kept(full) == ["e", "f"]


def test_time_runs_from_the_end() -> None:
    timed = store()
    late = entry("a")
    timed.add(late, 0.0)
    put(timed, "b", 50.0)
    timed.settle(late, 100.0)
    assert kept(timed, 110.0) == ["a", "b"]
    assert kept(timed, 111.0) == ["a"]
    assert kept(timed, 161.0) == []
    assert timed.num_bytes == 0


def test_bytes_are_bounded() -> None:
    small = store(max_bytes=6000)
    put(small, "a", text="x" * 3000)
    put(small, "b", text="x" * 3000)
    assert kept(small) == ["b"]
    put(small, "c", text="x" * 10_000)
    assert kept(small) == []
    assert (small.num_bytes, len(small)) == (0, 0)


def test_the_log_and_the_conversation_count() -> None:
    plain = entry("a")
    logged = entry("a")
    logged.events = EventLog()
    logged.events.append(b"data: x\n\n")
    logged.before = (ChatMessage(role="user", content="y" * 500),)
    assert logged.measure() == plain.measure() + 500 - 2 + 9


def test_another_key_finds_nothing() -> None:
    shared = store()
    put(shared, "a", owner="key-1")
    with pytest.raises(NotFound):
        shared.get("a", "key-2", 0.0)
    assert shared.get("a", "key-1", 0.0).owner == "key-1"


def test_settling_twice_or_after_removal_counts_once() -> None:
    one = store()
    first = put(one, "a")
    one.settle(first, 5.0)
    assert one.num_bytes == first.num_bytes
    one.remove("a")
    one.settle(first, 5.0)
    assert (one.num_bytes, len(one)) == (0, 0)
    one.remove("a")
