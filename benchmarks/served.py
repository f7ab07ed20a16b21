"""A gateway as its users start it, for as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp

__all__ = ["served"]

_POLL_S = 0.2
# Asks to die with the benchmark, however that ends, and becomes the gateway.
_DYING = (
    "import os, sys; from wire.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


@asynccontextmanager
async def served(
    profile: str, flags: Mapping[str, str], *, wait_for: Sequence[str] = ("verifier", "drafter")
) -> AsyncIterator[str]:
    """``breakeven serve`` of a profile on a free port, once the processes of ``wait_for`` are up; yields its URL.

    Raises:
        RuntimeError: it ended before it listened.
    """
    command = [sys.executable, "-c", _DYING, str(os.getpid())]
    command += ["-m", "breakeven", "serve", "--profile", profile, "--gateway.port", "0"]
    for key, value in flags.items():
        command += [f"--{key.replace('_', '-')}", value]
    environ = {**os.environ, "BREAKEVEN_ENGINE_LOG_FORMAT": "json"}
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environ)
    assert process.stdout is not None
    log_reader: asyncio.Task[bytes] | None = None  # a full pipe would block the server
    try:
        url = None
        while url is None:
            line = (await process.stdout.readline()).decode()
            if not line:
                raise RuntimeError("breakeven serve ended before it listened")
            if '"listening"' in line:
                url = json.loads(line)["url"]
        log_reader = asyncio.create_task(process.stdout.read())
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/stats") as response:
                    stats = await response.json()
                async with session.get(f"{url}/ready") as response:
                    is_ready = response.ok
                if is_ready and all(stats[peer]["state"] == "up" for peer in wait_for):
                    break
                await asyncio.sleep(_POLL_S)
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        if log_reader is not None:
            log_reader.cancel()
