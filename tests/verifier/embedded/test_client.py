"""The gateway's end: every call is answered, by its results or by an error, whatever the peer sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from verifier.embedded.client import EmbeddedVerifierClient
from wire.codec import VERIFIER_CODEC
from wire.errors import PeerLate, PeerLost, ProtocolMismatch
from wire.link import ServerLink, answer_hello
from wire.messages import (
    CloseRequest,
    DraftReplies,
    Hello,
    Refused,
    Status,
    StatusRequest,
    VerifyBatch,
    VerifyItem,
    VerifyReply,
    VerifyResult,
)

pytestmark = pytest.mark.timeout(30)


class FakeServer:
    """Answers hello; the rest is what the test makes of ``got``."""

    def __init__(self, endpoint: str, *, refuses: bool = False, is_silent: bool = False) -> None:
        self.link = ServerLink(endpoint, VERIFIER_CODEC)
        self.refuses, self.is_silent = refuses, is_silent
        self.got: asyncio.Queue[Any] = asyncio.Queue()
        self.peer = b""

    async def run(self) -> None:
        while True:
            self.peer, message = await self.link.receive()
            if self.is_silent:
                continue
            if isinstance(message, Hello):
                answer = answer_hello(message, role="verifier", ring_path="/ring")
                self.link.send(self.peer, Refused(reason="no") if self.refuses else answer)
            else:
                await self.got.put(message)

    def reply(self, *results: Any, num_forwards: int = 1) -> None:
        self.link.send(
            self.peer,
            VerifyReply(results=results, forward_s=0.5, num_rows=3, num_prefill_rows=1, num_forwards=num_forwards),
        )


class Both:
    """A client and a server, running."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.endpoint = f"ipc://{path}/v.sock"
        self.server = FakeServer(self.endpoint, **options)
        self.client = EmbeddedVerifierClient(self.endpoint)


@pytest.fixture
async def both(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Both]:
    pair = Both(tmp_path, **getattr(request, "param", {}))
    tasks = [asyncio.create_task(pair.client.run()), asyncio.create_task(pair.server.run())]
    yield pair
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pair.client.close()
    pair.server.link.close()


def item(name: str, round_id: int = 1) -> VerifyItem:
    return VerifyItem(request_id=name, round_id=round_id, base_len=1, start=0, token_ids=(1,))


def result(name: str, round_id: int = 1) -> VerifyResult:
    return VerifyResult(request_id=name, round_id=round_id, base_len=1, target_ids=(2,))


async def test_connect_gets_the_welcome(both: Both) -> None:
    assert (await both.client.connect(timeout_s=5.0)).ring_path == "/ring"


@pytest.mark.parametrize("both", [{"refuses": True}], indirect=True)
async def test_another_version_is_an_error(both: Both) -> None:
    with pytest.raises(ProtocolMismatch):
        await both.client.connect(timeout_s=5.0)


@pytest.mark.parametrize("both", [{"is_silent": True}], indirect=True)
async def test_no_answer_is_late(both: Both) -> None:
    with pytest.raises(PeerLate):
        await both.client.connect(timeout_s=0.01)
    with pytest.raises(PeerLate):
        await both.client.status(timeout_s=0.01)
    with pytest.raises(PeerLate):
        await both.client.verify([item("a")], timeout_s=0.01)


async def test_before_connecting_every_call_is_lost(both: Both) -> None:
    with pytest.raises(PeerLost):
        await both.client.verify([item("a")], timeout_s=1.0)
    with pytest.raises(PeerLost):
        await both.client.status(timeout_s=1.0)
    both.client.close_request("a")


async def test_a_batch_is_complete_when_all_its_items_are(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    call = asyncio.create_task(both.client.verify([item("a"), item("b"), item("c")], timeout_s=5.0))
    batch = await both.server.got.get()
    assert isinstance(batch, VerifyBatch)
    assert [i.request_id for i in batch.items] == ["a", "b", "c"]
    both.server.reply(result("c"), result("a"))
    both.server.reply(result("b"), num_forwards=2)
    reply = await call
    assert sorted(r.request_id for r in reply.results) == ["a", "b", "c"]
    assert (reply.num_forwards, reply.num_rows, reply.forward_s) == (2, 3, 0.5)


async def test_one_reply_may_serve_several_calls(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    calls = [asyncio.create_task(both.client.verify([item(n)], timeout_s=5.0)) for n in "ab"]
    for _ in calls:
        await both.server.got.get()
    both.server.reply(result("b"), result("a"))
    assert [(await call).results[0].request_id for call in calls] == ["a", "b"]


async def test_stale_and_doubled_results_are_dropped_and_counted(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    call = asyncio.create_task(both.client.verify([item("a", 2), item("b", 2)], timeout_s=5.0))
    await both.server.got.get()
    both.server.reply(result("a", 1), result("a", 2), result("a", 2), result("stranger"))
    both.server.reply(result("b", 2))
    assert len((await call).results) == 2
    assert both.client.num_stale_replies == 3


async def test_a_late_result_does_not_answer_the_next_round(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    with pytest.raises(PeerLate):
        await both.client.verify([item("a", 1)], timeout_s=0.01)
    call = asyncio.create_task(both.client.verify([item("a", 2)], timeout_s=5.0))
    await both.server.got.get()
    await both.server.got.get()
    both.server.reply(result("a", 1))
    both.server.reply(result("a", 2))
    assert (await call).results == (result("a", 2),)


async def test_closing_a_request_lets_the_rest_of_its_batch_go_on(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    call = asyncio.create_task(both.client.verify([item("a"), item("b")], timeout_s=5.0))
    await both.server.got.get()
    both.client.close_request("a")
    assert await both.server.got.get() == CloseRequest(request_id="a")
    both.server.reply(result("b"))
    assert [r.request_id for r in (await call).results] == ["b"]


async def test_closing_the_only_request_ends_its_call(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    call = asyncio.create_task(both.client.verify([item("a")], timeout_s=5.0))
    await both.server.got.get()
    both.client.close_request("a")
    assert (await call).results == ()


async def test_a_lost_peer_fails_everything_that_waits(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    calls = [
        asyncio.create_task(both.client.verify([item("a"), item("b")], timeout_s=5.0)),
        asyncio.create_task(both.client.status(timeout_s=5.0)),
    ]
    for _ in calls:
        await both.server.got.get()
    both.client.peer_lost("it died")
    for call in calls:
        with pytest.raises(PeerLost, match="it died"):
            await call
    await both.client.connect(timeout_s=5.0)
    again = asyncio.create_task(both.client.verify([item("a")], timeout_s=5.0))
    await both.server.got.get()
    both.server.reply(result("a"))
    assert len((await again).results) == 1


async def test_status_is_matched_by_its_number(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    calls = [asyncio.create_task(both.client.status(timeout_s=5.0)) for _ in range(2)]
    numbers = [(await both.server.got.get()).request_number for _ in calls]
    for number in (99, *reversed(numbers)):
        both.server.link.send(
            both.server.peer,
            Status(request_number=number, phase=str(number), progress=1.0, is_ready=True, counters={}),
        )
    assert [(await call).phase for call in calls] == [str(number) for number in numbers]


async def test_garbage_and_strange_messages_are_dropped(both: Both) -> None:
    await both.client.connect(timeout_s=5.0)
    call = asyncio.create_task(both.client.verify([item("a")], timeout_s=5.0))
    await both.server.got.get()
    both.server.link.send(both.server.peer, StatusRequest(request_number=1))  # nothing for a gateway
    both.server.link.send(both.server.peer, DraftReplies(replies=(), draft_s=0.0, num_rows=0))
    both.server.reply(result("a"))
    assert len((await call).results) == 1
