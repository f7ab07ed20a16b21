"""``breakeven health`` against processes that are ready, loading, silent or gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import unused_port

from breakeven.health import gateway_is_ready, peer_phase
from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from gateway.ports import LoadPhase
from tests.gateway.fakes import ByteCodec, FakeEngine
from wire.codec import VERIFIER_CODEC
from wire.link import ServerLink, answer_hello
from wire.messages import Hello, Status, StatusRequest


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ""])
@pytest.mark.parametrize(
    ("phase", "is_ready"),
    [
        (LoadPhase(is_ready=True, is_draining=False, phase="ready"), True),
        (LoadPhase(is_ready=False, is_draining=False, phase="loading target"), False),
        (LoadPhase(is_ready=True, is_draining=True, phase="draining"), False),
    ],
)
async def test_the_gateway(host: str, phase: LoadPhase, is_ready: bool) -> None:
    config = GatewayConfig(port=0)
    runner = await start_server(create_app(FakeEngine(phase=phase), ByteCodec(), config), config)
    port = runner.addresses[0][1]
    try:
        assert await asyncio.to_thread(gateway_is_ready, host, port, timeout_s=5.0) is is_ready
    finally:
        await runner.cleanup()


async def test_a_gateway_that_is_not_there_or_silent() -> None:
    assert not await asyncio.to_thread(gateway_is_ready, "127.0.0.1", unused_port(), timeout_s=0.2)
    with socket.socket() as silent:  # takes connections, says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        assert not await asyncio.to_thread(gateway_is_ready, "127.0.0.1", port, timeout_s=0.1)


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[tuple[str, list[Status]]]:
    """A verifier's talking side; it answers with the status in the list, or not at all if that is empty."""
    endpoint, statuses = f"ipc://{tmp_path}/v.sock", []
    link = ServerLink(endpoint, VERIFIER_CODEC)

    async def talk() -> None:
        while True:
            sender, message = await link.receive()
            if isinstance(message, Hello):
                link.send(sender, answer_hello(message, role="verifier", ring_path=""))
            elif isinstance(message, StatusRequest) and statuses:
                link.send(sender, statuses[0])

    task = asyncio.create_task(talk())
    yield endpoint, statuses
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    link.close()


def status(phase: str, *, is_ready: bool, error: str | None = None) -> Status:
    return Status(
        request_number=0, phase=phase, progress=0.5, is_ready=is_ready, counters={}, ring_path="", error=error
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (status("ready", is_ready=True), (True, "ready")),
        (status("loading target", is_ready=False), (False, "loading target")),
        (status("failed", is_ready=False, error="no such model"), (False, "no such model")),
    ],
)
async def test_a_peer(peer: tuple[str, list[Status]], given: Status, expected: tuple[bool, str]) -> None:
    endpoint, statuses = peer
    statuses.append(given)
    assert await peer_phase(endpoint, timeout_s=5.0) == expected


async def test_a_peer_that_is_silent_or_not_there(peer: tuple[str, list[Status]], tmp_path: Path) -> None:
    endpoint, _ = peer
    for place in (endpoint, f"ipc://{tmp_path}/nobody.sock"):
        is_ready, reason = await peer_phase(place, timeout_s=0.15)
        assert (is_ready, bool(reason)) == (False, True)
