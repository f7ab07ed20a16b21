"""Rivals as child processes, and the memory that a system's processes hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.rivals.measure import Answer, Ask

__all__ = ["Transformers", "device_mib", "listening_pid", "resident_mib", "tightwad", "transformers"]


class Transformers:
    """transformers' generate() in a child, one request at a time. ``options``: what assists."""

    def __init__(self, process: asyncio.subprocess.Process, options: dict[str, Any]) -> None:
        self.pid = process.pid
        self._process = process
        self._options = options

    async def __call__(self, ask: Ask) -> Answer:
        """One answer.

        Raises:
            RuntimeError: the child ended.
        """
        assert self._process.stdin is not None
        request = {
            "prompt": ask.prompt,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "max_tokens": ask.max_tokens,
            "options": self._options,
        }
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pieces: list[tuple[float, str]] = []
        while "done" not in (event := await _event(self._process)):
            if event["text"]:
                pieces.append((event["at_s"], event["text"]))
        return Answer(pieces=tuple(pieces))


@asynccontextmanager
async def transformers(model_dir: Path, threads: int, device: str = "cpu") -> AsyncIterator[dict[str, Transformers]]:
    """One child with the model; yields a system per way to assist."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.rivals.assisted", str(model_dir), str(threads), device),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    try:
        await _event(process)
        yield {
            "transformers": Transformers(process, {}),
            "transformers, prompt lookup": Transformers(process, {"prompt_lookup_num_tokens": 3}),
            "transformers, early exit": Transformers(process, {"assistant_early_exit": 10}),
        }
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _event(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the transformers child ended")
    event: dict[str, Any] = json.loads(line)
    return event


@asynccontextmanager
async def tightwad(
    python: str, target_url: str, draft_url: str, port: int, num_draft_tokens: int
) -> AsyncIterator[tuple[str, int]]:
    """tightwad's proxy between a target and a draft server; yields its URL and process id."""
    environ = {
        **os.environ,
        "TIGHTWAD_TARGET_URL": target_url,
        "TIGHTWAD_DRAFT_URL": draft_url,
        "TIGHTWAD_TARGET_BACKEND": "llamacpp",
        "TIGHTWAD_DRAFT_BACKEND": "llamacpp",
        "TIGHTWAD_MAX_DRAFT_TOKENS": str(num_draft_tokens),
        "TIGHTWAD_HOST": "127.0.0.1",
        "TIGHTWAD_PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(
        *(str(Path(python).with_name("tightwad")), "proxy", "start"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=environ,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            while True:
                if process.returncode is not None:
                    raise RuntimeError("tightwad ended before it listened")
                try:
                    async with session.get(f"{url}/v1/models"):
                        break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.3)
        yield url, process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def resident_mib(pids: Sequence[int]) -> float:
    """Resident memory of processes and all below them. Shared pages count once per process."""
    total = 0
    for pid in _with_children(pids):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def device_mib(pids: Sequence[int]) -> float | None:
    """GPU memory of the same processes, as the driver counts it; None where it does not."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10.0).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    own = _with_children(pids)
    used = [line.split(",") for line in found.splitlines() if line.count(",") == 1]
    values = [float(mib) for pid, mib in used if int(pid) in own and mib.strip().isdecimal()]
    return sum(values) if values else None


def _with_children(pids: Sequence[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = [*pids]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += children.get(current, [])
    return found


def listening_pid(port: int) -> int | None:
    """The process that listens on a local TCP port, from /proc; None if it is not ours to see."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes & _open_files(entry):
            return int(entry.name)
    return None


def _open_files(process: Path) -> set[str]:
    found = set()
    # Descriptors close while they are listed, processes end, and those of others may not be read.
    with contextlib.suppress(FileNotFoundError, PermissionError, ProcessLookupError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.add(str(link.readlink()))
    return found
