"""Work that outlives the request that began it. Owned by the application: what still runs at its end is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

from aiohttp import web

from gateway.errors import Draining

__all__ = ["BackgroundJobs"]


class BackgroundJobs:
    """Named tasks of one task group; add ``context`` to the application's cleanup contexts."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def require_open(self) -> None:
        """Raises:
        Draining: the application is about to end.
        """
        if self._group is None:
            raise Draining("The server is shutting down.", retry_after_s=5.0)

    def start(self, job_id: str, work: Coroutine[None, None, None], *, on_end: Callable[[], None]) -> None:
        """Run ``work``, which must handle its own errors; call ``require_open`` before, without an await between.

        Args:
            on_end: called once, also if the work is cancelled before it has begun.
        """
        assert self._group is not None
        task = self._group.create_task(work)
        self._tasks[job_id] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[job_id]
            on_end()

        task.add_done_callback(ended)

    async def cancel(self, job_id: str) -> None:
        """Stop a job and wait until it has ended; nothing happens if it has already."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def context(self, _: web.Application) -> AsyncIterator[None]:
        """Runs the task group in a task of its own: an application may be started and ended in different ones."""
        opened = asyncio.Event()
        owner = asyncio.create_task(self._own(opened))
        await opened.wait()
        yield
        self._group = None
        owner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await owner

    async def _own(self, opened: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            opened.set()
            await asyncio.Event().wait()
