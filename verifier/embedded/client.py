"""The gateway's end of the embedded verifier. Loads neither torch nor numpy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from wire.errors import CodecError, LinkClosed, LinkOverflow
from wire.link import ClientLink
from wire.messages import (
    CloseRequest,
    Status,
    StatusRequest,
    VerifyBatch,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
)

__all__ = ["EmbeddedVerifierClient", "VerifierLost"]

log = structlog.get_logger("gateway.verifier")


class VerifierLost(Exception):
    """The verifier is gone, or did not answer in time; ``is_timeout`` tells which."""

    def __init__(self, message: str, *, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    pending: set[tuple[str, int]]
    done: asyncio.Future[VerifyReply]
    results: list[VerifyResult | VerifyFailed] = field(default_factory=list)


class EmbeddedVerifierClient:
    """Sends verify batches, matches replies to them.

    Every call is answered: by its results, or by VerifierLost when the peer is declared lost or the time is up.
    """

    def __init__(self, endpoint: str) -> None:
        self._link = ClientLink(endpoint)
        self._batch_ids = itertools.count()
        self._status_numbers = itertools.count()
        self._calls: dict[tuple[str, int], _Call] = {}
        self._statuses: dict[int, asyncio.Future[Status]] = {}
        self.num_stale_replies = 0

    async def run(self) -> None:
        """Receive replies until cancelled."""
        while True:
            try:
                message = await self._link.receive()
            except CodecError as error:
                log.warning("malformed reply dropped", error=str(error))
                continue
            match message:
                case VerifyReply():
                    self._on_reply(message)
                case Status():
                    waiting = self._statuses.pop(message.request_number, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                case _:
                    log.warning("unexpected message", kind=type(message).__name__)

    async def status(self, *, timeout_s: float) -> Status:
        """The verifier's phase, counters and, once loaded, what it serves.

        Raises:
            VerifierLost: no answer in time.
        """
        number = next(self._status_numbers)
        waiting: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._statuses[number] = waiting
        try:
            self._link.send(StatusRequest(request_number=number))
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            raise VerifierLost(f"no status within {timeout_s:g} s", is_timeout=True) from None
        except (LinkClosed, LinkOverflow) as error:
            raise VerifierLost(str(error)) from None
        finally:
            self._statuses.pop(number, None)

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """Verify items in one batch and wait until all are answered.

        Returns:
            One result per item, in no particular order; times and row counts of the last pass involved.

        Raises:
            VerifierLost: the peer is gone or too slow.
        """
        keys = {(item.request_id, item.round_id) for item in items}
        call = _Call(pending=keys.copy(), done=asyncio.get_running_loop().create_future())
        for key in keys:
            self._calls[key] = call
        try:
            self._link.send(VerifyBatch(batch_id=next(self._batch_ids), items=tuple(items)))
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            raise VerifierLost(f"no answer within {timeout_s:g} s", is_timeout=True) from None
        except LinkOverflow as error:
            raise VerifierLost(str(error)) from None
        finally:
            for key in keys:
                self._calls.pop(key, None)

    def close_request(self, request_id: str) -> None:
        """Tell the verifier to forget a request; never waits, and losing the message only costs memory there."""
        try:
            self._link.send(CloseRequest(request_id=request_id))
        except LinkOverflow as error:
            log.warning("close not sent", error=str(error))

    def peer_lost(self, reason: str) -> None:
        """Fail everything that waits: the process is known to be dead."""
        for call in {id(call): call for call in self._calls.values()}.values():
            if not call.done.done():
                call.done.set_exception(VerifierLost(reason))
        for waiting in self._statuses.values():
            if not waiting.done():
                waiting.set_exception(VerifierLost(reason))

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _on_reply(self, reply: VerifyReply) -> None:
        for result in reply.results:
            call = self._calls.get((result.request_id, result.round_id))
            key = (result.request_id, result.round_id)
            if call is None or key not in call.pending:
                self.num_stale_replies += 1
                continue
            call.pending.discard(key)
            call.results.append(result)
            if not call.pending and not call.done.done():
                call.done.set_result(
                    VerifyReply(
                        results=tuple(call.results),
                        forward_s=reply.forward_s,
                        num_rows=reply.num_rows,
                        num_prefill_rows=reply.num_prefill_rows,
                        num_forwards=reply.num_forwards,
                    )
                )
