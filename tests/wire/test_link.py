"""Links: hello, versions, bounded queues, peers that are gone. Real sockets on a private path, no sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from wire.codec import DRAFTER_CODEC, VERIFIER_CODEC
from wire.errors import CodecError, LinkClosed, LinkOverflow, ProtocolMismatch
from wire.link import ClientLink, ServerLink, answer_hello
from wire.messages import (
    PROTOCOL_VERSION,
    CloseRequest,
    Hello,
    Refused,
    StatusRequest,
    VerifyReply,
    Welcome,
)

pytestmark = pytest.mark.timeout(20)

StartServer = Callable[..., ServerLink[Any]]
StartClient = Callable[..., ClientLink]


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[tuple[StartServer, StartClient]]:
    opened: list[ServerLink[Any] | ClientLink] = []

    def server(endpoint: str | None = None, **options: Any) -> ServerLink[Any]:
        opened.append(ServerLink(endpoint or f"ipc://{tmp_path}/link.sock", VERIFIER_CODEC, **options))
        return opened[-1]

    def client(endpoint: str, **options: Any) -> ClientLink:
        opened.append(ClientLink(endpoint, **options))
        return opened[-1]

    yield server, client
    for link in opened:
        if isinstance(link, ClientLink):
            link.close(linger_ms=0)
        else:
            link.close()


def _reply(number: int) -> VerifyReply:
    return VerifyReply(results=(), forward_s=0.0, num_rows=number, num_prefill_rows=0, num_forwards=0)


async def test_hello_is_answered_with_welcome(links: tuple[StartServer, StartClient]) -> None:
    server, client = links[0](), None
    client = links[1](server.endpoint)

    async def serve() -> None:
        peer, hello = await server.receive()
        assert isinstance(hello, Hello)
        assert hello.role == "gateway"
        server.send(peer, answer_hello(hello, role="verifier", ring_path="/ring"))

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        welcome = await client.hello(role="gateway", timeout_s=5.0)
    assert (welcome.role, welcome.ring_path, welcome.protocol_version) == ("verifier", "/ring", PROTOCOL_VERSION)


async def test_another_protocol_version_is_refused_by_name(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    client = links[1](server.endpoint)

    async def serve() -> None:
        peer, hello = await server.receive()
        old = Hello(protocol_version=PROTOCOL_VERSION + 1, role=hello.role, pid=hello.pid)
        server.send(peer, answer_hello(old, role="verifier"))

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        with pytest.raises(ProtocolMismatch, match=rf"verifier speaks protocol {PROTOCOL_VERSION}, gateway 2"):
            await client.hello(role="gateway", timeout_s=5.0)


@pytest.mark.parametrize(
    ("version", "answer"),
    [(PROTOCOL_VERSION, Welcome), (PROTOCOL_VERSION - 1, Refused), (PROTOCOL_VERSION + 1, Refused)],
)
def test_answer_hello(version: int, answer: type) -> None:
    assert isinstance(answer_hello(Hello(protocol_version=version, role="x", pid=1), role="drafter"), answer)


async def test_hello_without_an_answer_is_an_error(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    with pytest.raises(LinkClosed, match=r"0\.01 s"):
        await links[1](server.endpoint).hello(role="gateway", timeout_s=0.01)


async def test_hello_to_nobody_is_an_error(links: tuple[StartServer, StartClient], tmp_path: Path) -> None:
    client = links[1](f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(LinkClosed):
        await client.hello(role="gateway", timeout_s=0.01)


async def test_other_messages_before_the_welcome_are_skipped(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    client = links[1](server.endpoint)

    async def serve() -> None:
        peer, hello = await server.receive()
        server.send(peer, _reply(1))
        server.send(peer, answer_hello(hello, role="verifier"))

    async with asyncio.TaskGroup() as group:
        group.create_task(serve())
        assert (await client.hello(role="gateway", timeout_s=5.0)).role == "verifier"


async def test_messages_keep_their_order_and_their_peer(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    first, second = links[1](server.endpoint), links[1](server.endpoint)
    for number in range(50):
        first.send(CloseRequest(request_id=f"a{number}"))
        second.send(CloseRequest(request_id=f"b{number}"))
    seen: dict[bytes, list[str]] = {}
    for _ in range(100):
        peer, message = await server.receive()
        seen.setdefault(peer, []).append(message.request_id)
    assert sorted(seen.values()) == [[f"{name}{i}" for i in range(50)] for name in "ab"]
    for peer, ids in seen.items():
        server.send(peer, _reply(ord(ids[0][0])))
    assert (await first.receive()).num_rows == ord("a")
    assert (await second.receive()).num_rows == ord("b")


async def test_garbage_is_an_error_and_the_server_link_stays_usable(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(server.endpoint)
    try:
        await raw.send(b"garbage")
        with pytest.raises(CodecError):
            await server.receive()
        await raw.send(VERIFIER_CODEC.encode(StatusRequest(request_number=4)))
        assert (await server.receive())[1] == StatusRequest(request_number=4)
    finally:
        raw.close(0)
        context.term()


@pytest.mark.parametrize("frames", [[b""], [b"a", b"b"], [b"", b"x"], [b"a", b"b", b"c"]])
async def test_any_number_of_frames_is_at_most_a_codec_error(
    links: tuple[StartServer, StartClient], frames: list[bytes]
) -> None:
    # Whoever can connect must not be able to end the process that receives.
    server = links[0]()
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(server.endpoint)
    try:
        await raw.send_multipart(frames)
        with pytest.raises(CodecError):
            await server.receive()
        await raw.send(VERIFIER_CODEC.encode(StatusRequest(request_number=4)))
        assert (await server.receive())[1] == StatusRequest(request_number=4)
    finally:
        raw.close(0)
        context.term()


async def test_a_message_for_another_receiver_is_an_error(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    client = links[1](server.endpoint)
    client.send(_reply(1))
    with pytest.raises(CodecError):
        await server.receive()


async def test_garbage_to_the_client_is_an_error_and_its_link_stays_usable(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.ROUTER)
    raw.bind(f"ipc://{tmp_path}/raw.sock")
    client = ClientLink(f"ipc://{tmp_path}/raw.sock")
    try:
        client.send(StatusRequest(request_number=1))
        peer, _ = await raw.recv_multipart()
        await raw.send_multipart([peer, b"\xc1"])
        with pytest.raises(CodecError):
            await client.receive()
        await raw.send_multipart([peer, DRAFTER_CODEC.encode(_reply(3))])
        assert (await client.receive()).num_rows == 3
    finally:
        client.close(linger_ms=0)
        raw.close(0)
        context.term()


async def test_a_full_queue_to_an_absent_peer_is_an_error_at_once(
    links: tuple[StartServer, StartClient], tmp_path: Path
) -> None:
    client = links[1](f"ipc://{tmp_path}/nobody.sock", queue_limit=3)
    for number in range(3):
        client.send(StatusRequest(request_number=number))
    with pytest.raises(LinkOverflow):
        client.send(StatusRequest(request_number=3))


async def test_a_client_that_does_not_read_overflows_the_server(links: tuple[StartServer, StartClient]) -> None:
    server = links[0](queue_limit=2)
    client = links[1](server.endpoint, queue_limit=2)
    client.send(StatusRequest(request_number=1))
    peer, _ = await server.receive()
    big = VerifyReply(results=(), forward_s=0.0, num_rows=0, num_prefill_rows=0, num_forwards=0)

    def flood() -> None:
        for _ in range(200_000):
            server.send(peer, big)

    with pytest.raises(LinkOverflow):
        flood()


async def test_an_unknown_peer_is_an_error(links: tuple[StartServer, StartClient]) -> None:
    with pytest.raises(LinkClosed):
        links[0]().send(b"nobody", _reply(1))


async def test_a_peer_that_left_is_an_error(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]()
    client = ClientLink(server.endpoint)
    client.send(StatusRequest(request_number=1))
    peer, _ = await server.receive()
    client.close(linger_ms=0)

    async def until_closed() -> None:
        while True:  # the I/O thread notices the hang-up a moment later
            server.send(peer, _reply(1))
            await asyncio.sleep(0)

    with pytest.raises(LinkClosed):
        await asyncio.wait_for(until_closed(), timeout=5.0)


async def test_tcp_works_too_and_the_endpoint_names_the_port(links: tuple[StartServer, StartClient]) -> None:
    server = links[0]("tcp://127.0.0.1:*")
    assert not server.endpoint.endswith("*")
    client = links[1](server.endpoint)
    client.send(StatusRequest(request_number=9))
    assert (await server.receive())[1].request_number == 9


async def test_the_directory_of_an_ipc_endpoint_is_made(tmp_path: Path) -> None:
    server = ServerLink(f"ipc://{tmp_path}/deep/er/link.sock", VERIFIER_CODEC)
    assert (tmp_path / "deep/er").is_dir()
    server.close()
