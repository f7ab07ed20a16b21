from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import settings

from gateway.config import GatewayConfig
from gateway.http import create_app
from tests.gateway.fakes import ByteCodec, FakeEngine

# The same examples in every run, and no limit of wall time an example: the machine may be busy.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

StartEdge = Callable[..., Awaitable[TestClient]]


async def until(condition: Callable[[], bool], *, patience_s: float = 5.0) -> None:
    """Let the loop run until ``condition`` holds; for effects that no event announces."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110 # that is the point
            await asyncio.sleep(0)


@pytest.fixture
async def start_edge() -> AsyncIterator[StartEdge]:
    """Starts an edge in front of a fake engine: ``await start_edge(engine, keep_alive_s=0)``."""
    clients: list[TestClient] = []

    async def start(engine: FakeEngine, *, codec: ByteCodec | None = None, **settings: object) -> TestClient:
        config = GatewayConfig(**settings)
        config.validate()
        client = TestClient(TestServer(create_app(engine, codec or ByteCodec(), config)))
        await client.start_server()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()
