"""A gateway on a real port for clients in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.http import create_app, start_server
from tests.clients.scripted_engine import PromptedEngine
from tests.gateway.fakes import ByteCodec

API_KEY = "client-key-1"
PATIENCE_S = 120


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    """Its base, with /v1."""
    config = GatewayConfig(port=0, api_keys=(API_KEY,))
    runner = await start_server(create_app(PromptedEngine(), ByteCodec(), config), config)
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/v1"
    await runner.cleanup()


async def run_client(command: Sequence[str], *, cwd: Path, base_url: str) -> dict[str, Any]:
    """Run a client script; it prints what it saw as one JSON object."""
    environ = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": API_KEY, "NO_PROXY": "127.0.0.1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out.decode().strip().splitlines()[-1])
