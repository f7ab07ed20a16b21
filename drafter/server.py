"""The drafter process: an I/O thread that always answers, an engine thread that drafts.

The event loop owns the link and the queue; the engine lives in one worker thread, loading included. As soon as the
engine is free everything that waits becomes its next batch, so requests that arrive during a batch share the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from drafter.engine import BatchOutcome, DraftEngine, Reply
from drafter.policy import DraftPlan, Waiting, drop_request, plan_batch
from wire.codec import DRAFTER_CODEC
from wire.errors import CodecError, LinkClosed, LinkOverflow
from wire.link import ServerLink, answer_hello
from wire.messages import (
    DraftClose,
    DrafterInfo,
    DraftExtend,
    DraftFailed,
    DraftReplies,
    Hello,
    Status,
    StatusRequest,
    ToDrafter,
)

__all__ = ["DrafterServer", "LoadProgress", "LoadedEngine"]

_log = logging.getLogger(__name__)
_ROLE = "drafter"
_PARENT_CHECK_S = 0.5
_MAX_BATCH_REQUESTS = 256


class LoadProgress:
    """Where loading stands; written by the engine thread, read by the I/O thread."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.progress = 0.0

    def report(self, phase: str, progress: float) -> None:
        """Enter a phase at ``progress`` 0..1 of the whole."""
        self.phase, self.progress = phase, progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """What loading yields."""

    engine: DraftEngine
    info: DrafterInfo


class DrafterServer:
    """Serves one endpoint until stopped, or until ``parent_pid`` is not its parent any more (None: whoever is)."""

    def __init__(
        self,
        endpoint: str,
        load: Callable[[LoadProgress], LoadedEngine],
        *,
        max_waiting: int,
        parent_pid: int | None,
    ) -> None:
        self._endpoint = endpoint
        self._load = load
        self._max_waiting = max_waiting
        self._parent_pid = parent_pid
        self._progress = LoadProgress()
        self._loaded: LoadedEngine | None = None
        self._error: str | None = None
        self._waiting: list[Waiting] = []
        self._closes: list[str] = []
        self._has_work = asyncio.Event()
        self._stop = asyncio.Event()
        self._counters: Counter[str] = Counter()

    async def run(self) -> None:
        """Bind, load, serve; returns after SIGTERM, SIGINT, ``stop`` or the parent's end.

        Raises:
            HeadError and others: whatever ``load`` raises, after it was reported for a moment to who asks.
        """
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        link = ServerLink(self._endpoint, DRAFTER_CODEC)
        _log.info("event=drafter_listening endpoint=%s pid=%d", link.endpoint, os.getpid())
        executor = ThreadPoolExecutor(1, thread_name_prefix="drafter-engine")
        try:
            await self._serve(link, executor)
        finally:
            # A forward in progress is short; its thread can't be interrupted.
            executor.shutdown(wait=True, cancel_futures=True)
            link.close()
            _log.info("event=drafter_stopped")

    def stop(self) -> None:
        """End ``run``; call it from the event loop's thread."""
        self._stop.set()

    async def _serve(self, link: ServerLink[ToDrafter], executor: ThreadPoolExecutor) -> None:
        async with asyncio.TaskGroup() as group:

            def start(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(coroutine)

            tasks = [start(self._receive(link)), start(self._run_engine(link, executor))]
            if self._parent_pid is not None:
                tasks.append(start(self._watch_parent(self._parent_pid)))
            await self._stop.wait()
            for task in tasks:
                task.cancel()

    async def _watch_parent(self, parent_pid: int) -> None:
        while os.getppid() == parent_pid:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(_PARENT_CHECK_S)
        _log.warning("event=parent_gone parent_pid=%d", parent_pid)
        self._stop.set()

    # ------------------------------------------------------------ I/O thread

    async def _receive(self, link: ServerLink[ToDrafter]) -> None:
        while True:
            try:
                peer, message = await link.receive()
            except CodecError as error:
                self._counters["bad_messages"] += 1
                _log.warning("event=bad_message error=%r", str(error))
                continue
            self._handle(link, peer, message)

    def _handle(self, link: ServerLink[ToDrafter], peer: bytes, message: ToDrafter) -> None:
        match message:
            case Hello():
                self._send(link, peer, answer_hello(message, role=_ROLE))
            case StatusRequest():
                self._send(link, peer, self._status(message.request_number))
            case DraftClose():
                self._waiting = drop_request(self._waiting, message.request_id)
                self._closes.append(message.request_id)
                self._has_work.set()
            case DraftExtend():
                self._enqueue(link, Waiting(peer=peer, message=message))

    def _enqueue(self, link: ServerLink[ToDrafter], waiting: Waiting) -> None:
        if self._loaded is None:
            self._refuse(link, waiting, f"not ready: {self._progress.phase}")
        elif len(self._waiting) >= self._max_waiting:
            self._refuse(link, waiting, f"{len(self._waiting)} messages wait already")
        else:
            self._waiting.append(waiting)
            self._has_work.set()

    def _refuse(self, link: ServerLink[ToDrafter], waiting: Waiting, reason: str) -> None:
        self._counters["failed_overloaded"] += 1
        message = waiting.message
        failed = DraftFailed(
            request_id=message.request_id,
            round_id=message.round_id,
            base_len=message.base_len,
            code="overloaded",
            message=reason,
        )
        self._send(link, waiting.peer, DraftReplies(replies=(failed,), draft_s=0.0, num_rows=0))

    def _status(self, request_number: int) -> Status:
        counters = self._counters.copy()
        if self._loaded is not None:
            counters.update(self._loaded.engine.counters.copy())
            counters["requests_held"] = self._loaded.engine.num_requests
        counters["waiting"] = len(self._waiting)
        return Status(
            request_number=request_number,
            phase=self._progress.phase,
            progress=self._progress.progress,
            is_ready=self._loaded is not None,
            counters=dict(counters),
            drafter=None if self._loaded is None else self._loaded.info,
            error=self._error,
        )

    def _send(self, link: ServerLink[ToDrafter], peer: bytes, message: msgspec.Struct) -> None:
        # A peer that is gone or doesn't read gets nothing; its requests are closed by LRU.
        try:
            link.send(peer, message)
        except (LinkClosed, LinkOverflow):
            self._counters["undelivered"] += 1

    # ------------------------------------------------------------ engine thread

    async def _run_engine(self, link: ServerLink[ToDrafter], executor: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        started_s = time.perf_counter()
        loaded = await loop.run_in_executor(executor, self._load, self._progress)
        self._loaded = loaded
        self._progress.report("ready", 1.0)
        _log.info(
            "event=drafter_ready load_s=%.2f format=%r draft_vocab_size=%d",
            time.perf_counter() - started_s,
            loaded.info.head_format,
            loaded.info.draft_vocab_size,
        )
        while True:
            await self._has_work.wait()
            plan = plan_batch(self._waiting, max_requests=_MAX_BATCH_REQUESTS)
            closes, self._closes, self._waiting = self._closes, [], list(plan.left)
            if not plan.left:
                self._has_work.clear()
            outcome, draft_s = await loop.run_in_executor(executor, _run_plan, loaded.engine, closes, plan)
            self._answer(link, outcome, draft_s)

    def _answer(self, link: ServerLink[ToDrafter], outcome: BatchOutcome, draft_s: float) -> None:
        by_peer: dict[bytes, list[Reply]] = {}
        for reply in outcome.replies:
            by_peer.setdefault(reply.peer, []).append(reply)
        for peer, replies in by_peer.items():
            messages = tuple(reply.message for reply in replies)
            self._send(link, peer, DraftReplies(replies=messages, draft_s=draft_s, num_rows=outcome.num_rows))


def _run_plan(engine: DraftEngine, closes: list[str], plan: DraftPlan) -> tuple[BatchOutcome, float]:
    """In the engine thread. Closes come first: a message that came after its request's close starts it anew."""
    started_s = time.perf_counter()
    for request_id in closes:
        engine.close(request_id)
    outcome = engine.run(plan.works) if plan.works else BatchOutcome(replies=(), num_rows=0)
    return outcome, time.perf_counter() - started_s
