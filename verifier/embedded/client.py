"""The gateway's end of the embedded verifier. Loads neither torch nor numpy.

``run`` receives; start it in the owner's TaskGroup before ``connect``. The process may die and come back at the same
endpoint: ``peer_lost`` fails what waits, ``connect`` opens a fresh link, so nothing queued for the dead one is sent.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from wire.errors import CodecError, LinkOverflow, PeerLate, PeerLost, ProtocolMismatch
from wire.link import ClientLink
from wire.messages import (
    PROTOCOL_VERSION,
    CloseRequest,
    Hello,
    Refused,
    Status,
    StatusRequest,
    ToGateway,
    VerifyBatch,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
    Welcome,
)
from wire.sampling import SamplingParams

__all__ = ["EmbeddedVerifierClient"]

log = structlog.get_logger("gateway.verifier")


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    pending: set[tuple[str, int]]
    done: asyncio.Future[VerifyReply]
    results: list[VerifyResult | VerifyFailed] = field(default_factory=list)
    last: VerifyReply | None = None

    def finish_if_complete(self) -> None:
        if self.pending or self.done.done():
            return
        last = self.last
        self.done.set_result(
            VerifyReply(
                results=tuple(self.results),
                forward_s=last.forward_s if last else 0.0,
                num_rows=last.num_rows if last else 0,
                num_prefill_rows=last.num_prefill_rows if last else 0,
                num_forwards=last.num_forwards if last else 0,
            )
        )


class EmbeddedVerifierClient:
    """Sends verify batches, matches replies to them. All methods belong to one event loop.

    Every call is answered: by its results, or by a PeerError when the peer is declared lost or the time is up.
    num_stale_replies: results nobody waited for any more.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.num_stale_replies = 0
        self._link: ClientLink | None = None
        self._is_linked = asyncio.Event()
        self._batch_ids = itertools.count()
        self._status_numbers = itertools.count()
        self._calls: dict[tuple[str, int], _Call] = {}
        self._statuses: dict[int, asyncio.Future[Status]] = {}
        self._hello: asyncio.Future[Welcome | Refused] | None = None

    @property
    def mixes_plain_rounds(self) -> bool:
        """One pass takes both."""
        return True

    def can_verify(self, sampling: SamplingParams) -> str | None:
        """Always None: every sampling parameter is applied at every draft position."""
        return None

    async def run(self) -> None:
        """Receive replies until cancelled."""
        while True:
            link = self._link
            if link is None:
                self._is_linked.clear()
                await self._is_linked.wait()
                continue
            try:
                self._dispatch(await link.receive())
            except CodecError as error:
                log.warning("malformed reply dropped", error=str(error))
            except asyncio.CancelledError:
                # Closing the socket under a waiting receive cancels that receive, not this task.
                task = asyncio.current_task()
                if link is self._link or (task is not None and task.cancelling()):
                    raise

    async def connect(self, *, timeout_s: float) -> Welcome:
        """Open a fresh link and introduce ourselves; the process may still be loading.

        Raises:
            PeerLate: no answer within ``timeout_s``. ProtocolMismatch: it speaks another version.
        """
        self.peer_lost("reconnecting")
        self._link = ClientLink(self.endpoint)
        self._is_linked.set()
        hello: asyncio.Future[Welcome | Refused] = asyncio.get_running_loop().create_future()
        self._hello = hello
        self._link.send(Hello(protocol_version=PROTOCOL_VERSION, role="gateway", pid=os.getpid()))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await hello
        except TimeoutError:
            raise PeerLate(f"no answer to hello within {timeout_s:g} s") from None
        if isinstance(answer, Refused):
            raise ProtocolMismatch(answer.reason)
        return answer

    async def status(self, *, timeout_s: float) -> Status:
        """The verifier's phase, counters and, once loaded, what it serves.

        Raises:
            PeerLost, PeerLate: gone, or no answer in time.
        """
        number = next(self._status_numbers)
        waiting: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._statuses[number] = waiting
        try:
            self._send(StatusRequest(request_number=number))
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            raise PeerLate(f"no status within {timeout_s:g} s") from None
        finally:
            self._statuses.pop(number, None)

    async def verify(self, items: Sequence[VerifyItem], *, timeout_s: float) -> VerifyReply:
        """Verify items in one batch and wait until all are answered.

        Returns:
            One result per item, in no particular order, without items closed meanwhile; times and row counts are
            those of the last pass involved.

        Raises:
            PeerLost, PeerLate: the peer is gone, or too slow.
        """
        keys = {(item.request_id, item.round_id) for item in items}
        call = _Call(pending=keys.copy(), done=asyncio.get_running_loop().create_future())
        for key in keys:
            self._calls[key] = call
        try:
            self._send(VerifyBatch(batch_id=next(self._batch_ids), items=tuple(items)))
            async with asyncio.timeout(timeout_s):
                return await call.done
        except TimeoutError:
            raise PeerLate(f"no answer within {timeout_s:g} s") from None
        finally:
            for key in keys:
                self._calls.pop(key, None)

    def close_request(self, request_id: str) -> None:
        """Tell the verifier to forget a request; never waits. A call that still waits for it goes on without it."""
        for (owner, round_id), call in list(self._calls.items()):
            if owner == request_id:
                call.pending.discard((owner, round_id))
                call.finish_if_complete()
        try:
            self._send(CloseRequest(request_id=request_id))
        except PeerLost as error:
            log.debug("close not sent", error=str(error))

    def peer_lost(self, reason: str) -> None:
        """Fail everything that waits and drop the link: the process is known to be dead."""
        link, self._link = self._link, None
        for call in {id(call): call for call in self._calls.values()}.values():
            if not call.done.done():
                call.done.set_exception(PeerLost(reason))
        for waiting in self._statuses.values():
            if not waiting.done():
                waiting.set_exception(PeerLost(reason))
        if link is not None:
            link.close(linger_ms=0)  # what is queued for a dead process must not hold up the event loop

    def close(self) -> None:
        """Close the link for good."""
        self.peer_lost("closing")

    def _send(self, message: VerifyBatch | CloseRequest | StatusRequest) -> None:
        if self._link is None:
            raise PeerLost("the verifier is not connected")
        try:
            self._link.send(message)
        except LinkOverflow as error:
            raise PeerLost(str(error)) from None

    def _dispatch(self, message: ToGateway) -> None:
        match message:
            case VerifyReply():
                self._on_reply(message)
            case Status():
                waiting = self._statuses.get(message.request_number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            case Welcome() | Refused():
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(message)
            case _:
                log.warning("unexpected message", kind=type(message).__name__)

    def _on_reply(self, reply: VerifyReply) -> None:
        touched: list[_Call] = []
        for result in reply.results:
            key = (result.request_id, result.round_id)
            call = self._calls.get(key)
            if call is None or key not in call.pending:
                self.num_stale_replies += 1
                continue
            call.pending.discard(key)
            call.results.append(result)
            call.last = reply
            touched.append(call)
        for call in touched:
            call.finish_if_complete()
