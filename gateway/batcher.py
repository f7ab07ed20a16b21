"""Gathers what waits for the verifier into one batch, sent as soon as the verifier is free.

Nothing waits on a timer: while one batch runs, the requests that finish drafting queue up and form the next. Prompts
are not part of this: they are sent at once, and the verifier computes them in chunks beside the decoding streams. Nor
are plain rounds where the target decodes by itself, which is quicker than any verify: they wait for nothing either.

Such a target's verify passes cost about the same for one request as for all, and each stops its decoding. So there a
batch waits, for up to half a pass, for the requests whose drafts are on their way: otherwise two halves of the requests
would take turns for ever, at twice the passes (docs/decisions/0002-no-draft-ahead.md).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from gateway.ports import VerifierPort
from wire.errors import PeerError, PeerLost, PeerRefused
from wire.messages import VerifyItem, VerifyReply, VerifyResult

__all__ = ["BatchObserved", "VerifyBatcher", "VerifyOutcome"]

log = structlog.get_logger("gateway.batcher")

# Of a verify pass: how long a batch waits for drafts. Waiting d instead of taking turns saves a pass less d.
_PATIENCE: Final = 0.5
_PASS_WEIGHT: Final = 0.1


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
    since_s: float


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
        self._drafting: set[str] = set()
        self._pass_s = self._free_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Decode items that wait for the verifier now; bounded by the number of admitted requests."""
        return len(self._waiting)

    def expect(self, request_id: str) -> None:
        """This request's drafts are on their way, and its verify item will be."""
        self._drafting.add(request_id)

    def forget(self, request_id: str) -> None:
        """Wait no longer for it."""
        if request_id in self._drafting:
            self._drafting.remove(request_id)
            self._has_waiting.set()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        patience_s: float | None = None
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self._has_waiting.wait()
                self._has_waiting.clear()
                batch = [waiting for waiting in self._waiting if not waiting.done.done()]
                self._waiting = []
                if not self._verifier.mixes_plain_rounds:
                    plain = [waiting for waiting in batch if not waiting.item.draft_ids]
                    if plain:
                        group.create_task(self._dispatch(plain))
                    batch = [waiting for waiting in batch if waiting.item.draft_ids]
                patience_s = self._patience_s(batch)
                if patience_s is not None or (self._running is not None and not self._running.done()):
                    self._waiting = batch
                elif batch:
                    self._running = group.create_task(self._dispatch(batch))
                    self._running.add_done_callback(lambda task: self._has_waiting.set())

    def _patience_s(self, batch: list[_Waiting]) -> float | None:
        """How much longer this batch waits for drafts on their way; None: not at all."""
        if not batch or not self._drafting or self._verifier.mixes_plain_rounds:
            return None
        could_go_s = max(self._free_s, batch[0].since_s)  # they stand in the order they came
        left_s = could_go_s + _PATIENCE * self._pass_s - self._clock()
        return left_s if left_s > 0.0 else None

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
        self._drafting.discard(item.request_id)
        waiting = _Waiting(item=item, done=asyncio.get_running_loop().create_future(), since_s=self._clock())
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
        if batch[0].item.draft_ids:
            self._free_s = self._clock()
            self._pass_s += (verify_s - self._pass_s) * (_PASS_WEIGHT if self._pass_s else 1.0)
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
