"""The client against a scripted server on a real link: answers, refusals, lateness, loss and reconnection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drafter.client import DrafterClient
from wire.codec import DRAFTER_CODEC
from wire.errors import LinkClosed, LinkOverflow, PeerError, PeerLate, PeerLost, PeerRefused, ProtocolMismatch
from wire.link import ServerLink, answer_hello
from wire.messages import (
    DraftClose,
    DraftExtend,
    DraftFailed,
    DraftProposal,
    DraftReplies,
    Hello,
    Refused,
    Status,
    StatusRequest,
    ToDrafter,
    VerifyReply,
)

pytestmark = pytest.mark.timeout(20)


def extend(round_id: int, *, request_id: str = "a", num_draft_tokens: int = 1) -> DraftExtend:
    return DraftExtend(
        request_id=request_id,
        round_id=round_id,
        base_len=2,
        start=0,
        token_ids=(1, 2),
        spans=(),
        num_draft_tokens=num_draft_tokens,
    )


def proposal(message: DraftExtend) -> DraftProposal:
    return DraftProposal(request_id=message.request_id, round_id=message.round_id, base_len=2, draft_ids=(7,))


class ScriptedServer:
    """Answers hello and status; collects the rest for the test to answer."""

    def __init__(self, endpoint: str) -> None:
        self.link: ServerLink[ToDrafter] = ServerLink(endpoint, DRAFTER_CODEC)
        self.extends: asyncio.Queue[tuple[bytes, DraftExtend]] = asyncio.Queue()
        self.closed: asyncio.Queue[str] = asyncio.Queue()
        self.is_welcoming = True
        self.answers_status = True

    async def run(self) -> None:
        while True:
            peer, message = await self.link.receive()
            match message:
                case Hello():
                    answer = answer_hello(message, role="drafter") if self.is_welcoming else Refused(reason="too old")
                    self.send(peer, answer)
                case StatusRequest():
                    if self.answers_status:
                        number = message.request_number
                        self.send(
                            peer, Status(request_number=number, phase="x", progress=0, is_ready=False, counters={})
                        )
                case DraftExtend():
                    self.extends.put_nowait((peer, message))
                case DraftClose():
                    self.closed.put_nowait(message.request_id)

    def send(self, peer: bytes, message: msgspec.Struct) -> None:
        with contextlib.suppress(LinkClosed):
            self.link.send(peer, message)

    def reply(self, peer: bytes, *replies: DraftProposal | DraftFailed) -> None:
        self.send(peer, DraftReplies(replies=replies, draft_s=0.25, num_rows=3))


@contextlib.asynccontextmanager
async def running(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.run())
        try:
            yield server
        finally:
            task.cancel()
            server.link.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/drafter.sock"


@pytest.fixture
async def server(endpoint: str) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(endpoint)
    task = asyncio.create_task(server.run())
    yield server
    task.cancel()
    server.link.close()


@pytest.fixture
async def client(endpoint: str) -> AsyncIterator[DrafterClient]:
    client = DrafterClient(endpoint)
    task = asyncio.create_task(client.run())
    yield client
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    client.peer_lost()


async def test_hello_and_status(server: ScriptedServer, client: DrafterClient) -> None:
    assert not client.is_connected
    welcome = await client.connect(timeout_s=5)
    assert (welcome.role, client.is_connected) == ("drafter", True)
    assert (await client.status(timeout_s=5)).phase == "x"


async def test_all_replies_of_a_batch_wake_together(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    messages = [extend(1, request_id=name) for name in "abc"]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.extend(message, timeout_s=5)) for message in messages]
        asked = [await server.extends.get() for _ in messages]
        server.reply(asked[0][0], *(proposal(message) for _, message in reversed(asked)))
        await tasks[0]
        await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
    assert [task.result().request_id for task in tasks] == list("abc")
    assert (client.last_draft_s, client.last_num_rows) == (0.25, 3)


async def test_refusal_carries_its_code(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(_caught(client.extend(extend(1), timeout_s=5)))
        peer, _ = await server.extends.get()
        server.reply(peer, DraftFailed(request_id="a", round_id=1, base_len=2, code="feature_gap", message="m"))
    error = task.result()
    assert isinstance(error, PeerRefused)
    assert error.code == "feature_gap"


async def test_late_replies_are_dropped_and_counted(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    with pytest.raises(PeerLate):
        await client.extend(extend(1), timeout_s=0.05)
    peer, late = await server.extends.get()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.extend(extend(2), timeout_s=5))
        _, message = await server.extends.get()
        server.reply(peer, proposal(late))
        server.reply(peer, proposal(message))
    assert task.result().round_id == 2
    assert client.num_late_replies == 1


async def test_lost_peer_fails_everything_at_once(server: ScriptedServer, client: DrafterClient) -> None:
    server.answers_status = False
    await client.connect(timeout_s=5)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_caught(client.extend(extend(1), timeout_s=60))),
            group.create_task(_caught(client.status(timeout_s=60))),
        ]
        await server.extends.get()
        client.peer_lost()
    assert all(isinstance(task.result(), PeerLost) for task in tasks)
    with pytest.raises(PeerLost):
        await client.extend(extend(2), timeout_s=5)
    with pytest.raises(PeerLost):
        await client.status(timeout_s=5)
    client.close("a")  # nobody to tell, no error


async def test_reconnect_to_a_restarted_process(endpoint: str, client: DrafterClient) -> None:
    async with running(ScriptedServer(endpoint)):
        await client.connect(timeout_s=5)
    client.peer_lost()
    with pytest.raises(PeerLate, match="hello"):
        await client.connect(timeout_s=0.05)
    async with running(ScriptedServer(endpoint)) as server:
        await client.connect(timeout_s=5)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.extend(extend(5), timeout_s=5))
            peer, message = await server.extends.get()
            server.reply(peer, proposal(message))
        assert task.result().draft_ids == (7,)


async def test_connect_may_come_before_the_process(endpoint: str, client: DrafterClient) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.connect(timeout_s=10))
        await asyncio.sleep(0.05)
        async with running(ScriptedServer(endpoint)):
            await task
    assert client.is_connected


async def test_another_protocol_version_is_refused(server: ScriptedServer, client: DrafterClient) -> None:
    server.is_welcoming = False
    with pytest.raises(ProtocolMismatch, match="too old"):
        await client.connect(timeout_s=5)
    assert not client.is_connected


async def test_status_that_never_comes(server: ScriptedServer, client: DrafterClient) -> None:
    server.answers_status = False
    await client.connect(timeout_s=5)
    with pytest.raises(PeerLate, match="status"):
        await client.status(timeout_s=0.05)


async def test_close_is_sent(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    client.close("a")
    assert await server.closed.get() == "a"


async def test_asking_the_same_round_twice_fails_the_first(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_caught(client.extend(extend(1), timeout_s=5)))
        await server.extends.get()
        second = group.create_task(client.extend(extend(1), timeout_s=5))
        peer, message = await server.extends.get()
        server.reply(peer, proposal(message))
    assert isinstance(first.result(), PeerLost)
    assert second.result().draft_ids == (7,)


async def test_nonsense_is_counted(server: ScriptedServer, client: DrafterClient) -> None:
    await client.connect(timeout_s=5)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.extend(extend(1), timeout_s=5))
        peer, message = await server.extends.get()
        server.send(peer, VerifyReply(results=(), forward_s=0, num_rows=0, num_prefill_rows=0, num_forwards=0))
        server.send(peer, DraftClose(request_id="not for the gateway"))
        server.reply(peer, proposal(message))
        await task
    assert client.num_bad_messages == 2


async def test_a_full_queue_is_unavailable(
    server: ScriptedServer, client: DrafterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.connect(timeout_s=5)
    assert client._link is not None

    def overflow(_message: object) -> None:
        raise LinkOverflow("full")

    monkeypatch.setattr(client._link, "send", overflow)
    with pytest.raises(PeerLost, match="full"):
        await client.extend(extend(1), timeout_s=5)
    client.close("a")


async def _caught(answer: Coroutine[Any, Any, object]) -> PeerError | None:
    try:
        await answer
    except PeerError as error:
        return error
    return None
