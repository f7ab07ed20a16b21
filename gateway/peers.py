"""Keeps another process connected: starts it, watches it load, notices its death, restarts it with back-off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from gateway.stats import PeerStats
from wire.errors import PeerError, ProtocolMismatch, WireError
from wire.messages import Status, Welcome

__all__ = ["Backoff", "Peer", "PeerClient", "PeerTimings"]

log = structlog.get_logger("gateway.peer")


class PeerClient(Protocol):
    """What supervision needs of a client."""

    async def connect(self, *, timeout_s: float) -> Welcome:
        """Open a fresh link; raises WireError."""
        ...

    async def status(self, *, timeout_s: float) -> Status:
        """Ask how it is; raises WireError."""
        ...

    def peer_lost(self, reason: str) -> None:
        """Fail everything that waits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimings:
    """Seconds.

    poll_s: pause between status requests. hello_s: longest wait for the first answer. stop_s: from SIGTERM to SIGKILL.
    dead_s: no status for so long means it hangs; a running pass keeps the engine busy, not the thread that answers.
    """

    poll_s: float = 0.5
    dead_s: float = 10.0
    hello_s: float = 20.0
    stop_s: float = 5.0


class Backoff:
    """Exponential pauses between restarts: doubling from ``first_s`` to ``max_s``, reset by a healthy run."""

    def __init__(self, *, first_s: float = 0.25, max_s: float = 30.0, healthy_s: float = 30.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._healthy_s = healthy_s
        self._next_s = first_s

    def pause_s(self, *, lived_s: float) -> float:
        """How long to wait now, given how long the last run was up."""
        if lived_s >= self._healthy_s:
            self._next_s = self._first_s
        pause, self._next_s = self._next_s, min(self._max_s, 2 * self._next_s)
        return pause


class Peer:
    """Supervision of one process.

    Args:
        name: "verifier" or "drafter", for logs.
        client: its link.
        command: how to start it, asked anew at each start; None means it runs elsewhere and is only connected to.
        on_up: called with its first ready Status, each time it comes up; on_down: with the reason.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        client: PeerClient,
        *,
        command: Callable[[], tuple[Sequence[str], dict[str, str]]] | None,
        on_up: Callable[[Status], None],
        on_down: Callable[[str], None],
        clock: Callable[[], float],
        timings: PeerTimings | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.name = name
        self._client = client
        self._command = command
        self._on_up = on_up
        self._on_down = on_down
        self._clock = clock
        self._timings = timings or PeerTimings()
        self._backoff = backoff or Backoff()
        self._state = "starting"
        self._phase = "waiting to start"
        self._progress: float | None = None
        self._pid: int | None = None
        self._starts = 0
        self._last_error: str | None = None
        self._counters: dict[str, int] = {}

    @property
    def is_up(self) -> bool:
        """It is connected and has loaded."""
        return self._state == "up"

    @property
    def progress(self) -> float | None:
        """Share of its current load phase that is done, if it says so."""
        return self._progress

    def stats(self) -> PeerStats:
        """For /stats."""
        return PeerStats(
            state=self._state,
            phase=self._phase,
            pid=self._pid,
            restarts=max(0, self._starts - 1),
            last_error=self._last_error,
            counters=self._counters,
        )

    async def run(self) -> None:
        """Keep it up until cancelled; a cancelled run stops the process it started.

        Raises:
            ProtocolMismatch: it speaks another protocol version; restarting can't help.
        """
        while True:
            begin_s = self._clock()
            self._starts += 1
            self._state, self._phase, self._progress = "starting", "starting", None
            reason = await self._one_life()
            was_up = self._state == "up"
            self._state, self._phase, self._pid, self._last_error = "down", "down", None, reason
            self._client.peer_lost(reason)
            if was_up:
                self._on_down(reason)
            pause_s = self._backoff.pause_s(lived_s=self._clock() - begin_s)
            log.warning("down", peer=self.name, reason=reason, restart_in_s=round(pause_s, 2))
            await asyncio.sleep(pause_s)

    async def _one_life(self) -> str:
        """From start to death; returns why it ended."""
        async with self._process() as process:
            exited = asyncio.create_task(process.wait()) if process is not None else None
            watch = asyncio.create_task(self._watch())
            try:
                await asyncio.wait([t for t in (exited, watch) if t], return_when=asyncio.FIRST_COMPLETED)
                if watch.done():
                    return watch.result()
                assert process is not None
                return f"exited with status {process.returncode}"
            finally:
                tasks = [task for task in (watch, exited) if task is not None]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[asyncio.subprocess.Process | None]:
        if self._command is None:
            yield None
            return
        command, environ = self._command()
        # A session of its own: Ctrl-C in the terminal reaches the gateway only, which then stops its children in order.
        process = await asyncio.create_subprocess_exec(*command, env=environ, start_new_session=True)
        self._pid = process.pid
        log.info("started", peer=self.name, pid=process.pid)
        try:
            yield process
        finally:
            await _stop(process, self._timings.stop_s)

    async def _watch(self) -> str:
        try:
            welcome = await self._client.connect(timeout_s=self._timings.hello_s)
            self._pid = welcome.pid
            while True:
                status = await self._client.status(timeout_s=self._timings.dead_s)
                self._phase, self._progress, self._counters = status.phase, status.progress, status.counters
                if status.error is not None:
                    return status.error
                if status.is_ready and self._state != "up":
                    self._state = "up"
                    log.info("up", peer=self.name, pid=self._pid)
                    self._on_up(status)
                await asyncio.sleep(self._timings.poll_s)
        except ProtocolMismatch:
            raise
        except (PeerError, WireError) as error:
            return str(error)


async def _stop(process: asyncio.subprocess.Process, patience_s: float) -> None:
    """SIGTERM, then SIGKILL; a process may end by itself before either and its exit be noticed only later."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), patience_s)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
