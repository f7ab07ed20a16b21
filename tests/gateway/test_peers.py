"""Supervision of a real child process: start, death, restart with back-off, hanging, another protocol version."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from drafter.client import DrafterClient
from gateway.peers import Backoff, Peer, PeerTimings
from wire.errors import PeerLost, ProtocolMismatch
from wire.messages import Status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("wire_child.py")


def test_pauses_double_up_to_the_limit_and_a_healthy_run_resets_them() -> None:
    backoff = Backoff(first_s=0.25, max_s=1.5, healthy_s=30.0)
    assert [backoff.pause_s(lived_s=1.0) for _ in range(5)] == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff.pause_s(lived_s=30.0) == 0.25
    assert backoff.pause_s(lived_s=29.9) == 0.5


class Watched:
    """A peer with what it told its owner."""

    def __init__(self, tmp_path: Path, *behaviours: str, spawns: bool = True, **timings: float) -> None:
        self.ups: list[Status] = []
        self.downs: list[str] = []
        self.changed = asyncio.Event()
        self.behaviours = list(behaviours)
        self.endpoint = f"ipc://{tmp_path}/child.sock"
        self.client = DrafterClient(self.endpoint)
        self.peer = Peer(
            "drafter",
            self.client,
            command=self._command if spawns else None,
            on_up=self._up,
            on_down=self._down,
            clock=time.monotonic,
            timings=PeerTimings(**{"poll_s": 0.01, "dead_s": 10.0, "hello_s": 10.0, "stop_s": 5.0, **timings}),
            backoff=Backoff(first_s=0.01, max_s=0.02),
        )

    def command(self) -> tuple[list[str], dict[str, str]]:
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        return [sys.executable, str(CHILD), self.endpoint, behaviour], {**os.environ, "PYTHONPATH": str(ROOT)}

    def _command(self) -> tuple[list[str], dict[str, str]]:
        return self.command()

    def _up(self, status: Status) -> None:
        self.ups.append(status)
        self.changed.set()

    def _down(self, reason: str) -> None:
        self.downs.append(reason)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while not condition():
                await self.changed.wait()
                self.changed.clear()


Watch = Callable[..., Awaitable[Watched]]


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[Watch]:
    tasks: list[asyncio.Task[None]] = []
    watched: list[Watched] = []

    async def start(*behaviours: str, **options: float) -> Watched:
        new = Watched(tmp_path, *behaviours, **options)
        watched.append(new)
        tasks.extend(asyncio.ensure_future(work) for work in (new.client.run(), new.peer.run()))
        return new

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in watched:
        each.client.peer_lost()


async def test_it_comes_up_with_its_pid_phase_and_counters(watch: Watch) -> None:
    watched = await watch("good")
    assert not watched.peer.is_up
    await watched.until(lambda: bool(watched.ups))
    stats = watched.peer.stats()
    assert watched.peer.is_up
    assert (stats.state, stats.phase, stats.restarts, stats.last_error) == ("up", "ready", 0, None)
    assert stats.counters["answered"] >= 1
    os.kill(stats.pid, 0)


async def test_a_killed_child_is_noticed_and_started_again(watch: Watch) -> None:
    watched = await watch("good")
    await watched.until(lambda: len(watched.ups) == 1)
    first = watched.peer.stats().pid
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: len(watched.downs) == 1)
    assert "-9" in watched.downs[0]
    with pytest.raises(PeerLost):
        await watched.client.status(timeout_s=5.0)
    await watched.until(lambda: len(watched.ups) == 2)
    stats = watched.peer.stats()
    assert (stats.restarts, stats.state) == (1, "up")
    assert stats.pid != first
    assert (await watched.client.status(timeout_s=5.0)).is_ready


async def test_a_child_that_hangs_is_killed_and_replaced(watch: Watch) -> None:
    watched = await watch("hang", "good", dead_s=0.3)
    await watched.until(lambda: len(watched.ups) == 1)
    hung = watched.peer.stats().pid
    await watched.until(lambda: len(watched.downs) == 1)
    assert "no status" in watched.downs[0]
    await watched.until(lambda: len(watched.ups) == 2)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


async def test_a_child_that_reports_an_error_never_comes_up_and_is_tried_again(watch: Watch) -> None:
    watched = await watch("broken", "good")
    await watched.until(lambda: bool(watched.ups))
    stats = watched.peer.stats()
    assert stats.restarts == 1
    assert stats.last_error == "the head is broken"
    assert watched.downs == []  # it was never up


async def test_another_protocol_version_ends_supervision(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "mismatch")
    receiving = asyncio.create_task(watched.client.run())
    with pytest.raises(ProtocolMismatch, match="99"):
        await asyncio.wait_for(watched.peer.run(), 40)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    watched.client.peer_lost()


async def test_cancelling_stops_the_child(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "good")
    tasks = [asyncio.create_task(watched.client.run()), asyncio.create_task(watched.peer.run())]
    await watched.until(lambda: bool(watched.ups))
    pid = watched.peer.stats().pid
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    watched.client.peer_lost()


async def test_a_process_that_runs_elsewhere_is_only_connected_to(watch: Watch, tmp_path: Path) -> None:
    elsewhere = Watched(tmp_path, "good")
    command, environ = elsewhere.command()
    process = await asyncio.create_subprocess_exec(*command, env=environ)
    try:
        watched = await watch("good", spawns=False)
        await watched.until(lambda: bool(watched.ups))
        assert watched.peer.stats().pid == process.pid
    finally:
        process.kill()
        await process.wait()


class _EndsUnnoticed:
    """A process that is gone when it is told to go, before its exit was noticed."""

    pid = 1

    def __init__(self, *, at: str) -> None:
        self.returncode: int | None = None
        self.told: list[str] = []
        self._at = at

    def terminate(self) -> None:
        self._tell("terminate")

    def kill(self) -> None:
        self._tell("kill")

    async def wait(self) -> int:
        if self.told[-1:] != [self._at]:
            await asyncio.sleep(60.0)  # does not hear SIGTERM
        self.returncode = 0
        return 0

    def _tell(self, what: str) -> None:
        self.told.append(what)
        if what == self._at:
            raise ProcessLookupError


@pytest.mark.parametrize(("at", "told"), [("terminate", ["terminate"]), ("kill", ["terminate", "kill"])])
async def test_a_child_that_ends_while_it_is_stopped_is_no_error(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, at: str, told: list[str]
) -> None:
    processes: list[_EndsUnnoticed] = []

    async def start(*_: object, **__: object) -> _EndsUnnoticed:
        processes.append(_EndsUnnoticed(at=at))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    watched = await watch("good", hello_s=0.05, stop_s=0.05)
    async with asyncio.timeout(20):
        while watched.peer.stats().restarts == 0:  # noqa: ASYNC110 - a peer that never came up tells nobody
            await asyncio.sleep(0.01)
    assert processes[0].told == told
