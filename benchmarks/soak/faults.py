"""Faults from outside: processes killed and stopped, as an operator's bad day would."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

__all__ = ["Fault", "MemorySample", "Pids", "inject", "pids", "sample_memory"]

# (what, who, how long stopped in s; None: killed), with the share of each. A stall longer than its reply's time limit
# counts as death: the gateway then answers with errors.
_KINDS = (
    ("kill", "drafter", None, 4),
    ("stall", "drafter", 3.0, 3),
    ("stall", "verifier", 2.0, 2),
    ("kill", "verifier", None, 2),
)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One injected fault; ``end_s``: when both processes were up again."""

    kind: str
    process: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Resident bytes of one process; pid tells incarnations apart."""

    at_s: float
    process: str
    pid: int
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pids:
    """Process ids; 0: not running."""

    gateway: int
    verifier: int
    drafter: int


async def pids(session: aiohttp.ClientSession, url: str) -> Pids:
    """Read them from /stats; the gateway is the verifier's parent."""
    stats = await (await session.get(f"{url}/stats")).json()
    verifier = stats["verifier"]["pid"] or 0
    return Pids(gateway=_parent(verifier) if verifier else 0, verifier=verifier, drafter=stats["drafter"]["pid"] or 0)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it died and /stats does not know yet


async def inject(session: aiohttp.ClientSession, url: str, rng: random.Random) -> Fault | None:
    """One fault, and wait until it is over; None if the process was not there to be hurt."""
    kind, process, stop_s, _ = rng.choices(_KINDS, weights=[entry[3] for entry in _KINDS])[0]
    begin = time.monotonic()
    pid = getattr(await pids(session, url), process)
    if not pid:
        return None
    try:
        if stop_s is None:
            os.kill(pid, signal.SIGKILL)
            await _wait_replaced(session, url, process, pid)
        else:
            async with _stopped(pid):
                await asyncio.sleep(stop_s)
    except ProcessLookupError:
        return None
    await _wait_up(session, url)
    return Fault(kind=kind, process=process, begin_s=begin, end_s=time.monotonic())


@asynccontextmanager
async def _stopped(pid: int) -> AsyncIterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _wait_replaced(
    session: aiohttp.ClientSession, url: str, process: str, pid: int, timeout_s: float = 120.0
) -> None:
    """Until the gateway shows another process: it may take a while to notice the death."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if getattr(await pids(session, url), process) not in (0, pid):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"the {process} was not replaced after {timeout_s:.0f} s")


async def _wait_up(session: aiohttp.ClientSession, url: str, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        stats = await (await session.get(f"{url}/stats")).json()
        if stats["verifier"]["state"] == stats["drafter"]["state"] == "up":
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"not up again after {timeout_s:.0f} s")


def sample_memory(found: Pids) -> list[MemorySample]:
    """Resident memory of each process that lives."""
    now = time.monotonic()
    samples = []
    for process in ("gateway", "verifier", "drafter"):
        pid = getattr(found, process)
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        samples.append(MemorySample(at_s=now, process=process, pid=pid, rss_bytes=pages * _PAGE_BYTES))
    return samples
