"""Gathers what waits for the verifier into one batch, sent as soon as the verifier is free.

Nothing waits on a timer: while one batch runs, the requests that finish drafting queue up and form the next. Prompts
are not part of this: they are sent at once, and the verifier computes them in chunks beside the decoding streams. Nor
are plain rounds where the target decodes by itself, which is quicker than any verify: they wait for nothing either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from gateway.ports import VerifierPort
from wire.errors import PeerError, PeerLost, PeerRefused
from wire.messages import VerifyItem, VerifyReply, VerifyResult

__all__ = ["BatchObserved", "VerifyBatcher", "VerifyOutcome"]

log = structlog.get_logger("gateway.batcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchObserved:
    """One batch that came back, for statistics. num_draft_tokens: over all items."""

    batch_size: int
    num_draft_tokens: int
    verify_s: float
    forward_s: float
    is_clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """One item's result. verify_s: from dispatch to reply. is_clean: no prompt was computed in its pass."""

    result: VerifyResult
    verify_s: float
    is_clean: bool


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    item: VerifyItem
    done: asyncio.Future[VerifyOutcome]


class VerifyBatcher:
    """One per verifier.

    Args:
        verifier: where batches go.
        decode_timeout_s, prompt_timeout_s: how long a decode batch and a prompt may take.
        clock: monotonic seconds.
        on_batch: told about every decode batch that came back.
    """

    def __init__(
        self,
        verifier: VerifierPort,
        *,
        decode_timeout_s: float,
        prompt_timeout_s: float,
        clock: Callable[[], float],
        on_batch: Callable[[BatchObserved], None],
    ) -> None:
        self._verifier = verifier
        self._decode_timeout_s = decode_timeout_s
        self._prompt_timeout_s = prompt_timeout_s
        self._clock = clock
        self._on_batch = on_batch
        self._waiting: list[_Waiting] = []
        self._has_waiting = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Decode items that wait for the verifier now; bounded by the number of admitted requests."""
        return len(self._waiting)

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._has_waiting.wait()
                self._has_waiting.clear()
                batch = [waiting for waiting in self._waiting if not waiting.done.done()]
                self._waiting = []
                if not self._verifier.mixes_plain_rounds:
                    plain = [waiting for waiting in batch if not waiting.item.draft_ids]
                    if plain:
                        group.create_task(self._dispatch(plain))
                    batch = [waiting for waiting in batch if waiting.item.draft_ids]
                if self._running is not None and not self._running.done():
                    self._waiting = batch + self._waiting
                elif batch:
                    self._running = group.create_task(self._dispatch(batch))
                    self._running.add_done_callback(lambda task: self._has_waiting.set())

    async def verify_prompt(self, item: VerifyItem) -> VerifyOutcome:
        """Send a request's first item by itself.

        Raises:
            PeerError: as VerifierPort.verify; PeerRefused when the verifier failed the item.
        """
        begin_s = self._clock()
        reply = await self._verifier.verify((item,), timeout_s=self._prompt_timeout_s)
        return self._outcome(item, reply, self._clock() - begin_s)

    async def verify(self, item: VerifyItem) -> VerifyOutcome:
        """Queue a decode or verify item for the next batch.

        Raises:
            PeerError: as VerifierPort.verify; PeerRefused when the verifier failed the item.
        """
        waiting = _Waiting(item=item, done=asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._has_waiting.set()
        return await waiting.done

    async def _dispatch(self, batch: list[_Waiting]) -> None:
        begin_s = self._clock()
        try:
            reply = await self._verifier.verify([w.item for w in batch], timeout_s=self._decode_timeout_s)
        except PeerError as error:
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            return
        verify_s = self._clock() - begin_s
        self._on_batch(
            BatchObserved(
                batch_size=len(batch),
                num_draft_tokens=sum(len(w.item.draft_ids) for w in batch),
                verify_s=verify_s,
                forward_s=reply.forward_s,
                is_clean=reply.num_prefill_rows == 0,
            )
        )
        for waiting in batch:
            if waiting.done.done():  # its request was cancelled meanwhile
                continue
            try:
                waiting.done.set_result(self._outcome(waiting.item, reply, verify_s))
            except PeerError as error:
                waiting.done.set_exception(error)

    def _outcome(self, item: VerifyItem, reply: VerifyReply, verify_s: float) -> VerifyOutcome:
        for result in reply.results:
            if (result.request_id, result.round_id) == (item.request_id, item.round_id):
                if not isinstance(result, VerifyResult):
                    raise PeerRefused(result.code, result.message)
                return VerifyOutcome(result=result, verify_s=verify_s, is_clean=reply.num_prefill_rows == 0)
        raise PeerLost("the verifier did not answer this item")
