"""The gateway's end of the link to the drafter. Loads no torch.

``run`` receives; start it in the owner's TaskGroup before ``connect``. The process may die and come back at the same
endpoint: ``peer_lost`` fails what waits and drops what is queued for the dead one, ``connect`` starts again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Hashable
from typing import Generic, TypeVar

from wire.errors import CodecError, LinkOverflow, PeerLate, PeerLost, PeerRefused, ProtocolMismatch
from wire.link import ClientLink
from wire.messages import (
    PROTOCOL_VERSION,
    DraftClose,
    DraftExtend,
    DraftFailed,
    DraftProposal,
    DraftReplies,
    Hello,
    Refused,
    Status,
    StatusRequest,
    ToGateway,
    Welcome,
)

__all__ = ["DrafterClient"]

Answer = TypeVar("Answer")


class _Pending(Generic[Answer]):
    """Futures by what identifies their answer."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, asyncio.Future[Answer]] = {}

    def open(self, key: Hashable) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        earlier = self._futures.get(key)
        if earlier is not None and not earlier.done():
            earlier.set_exception(PeerLost("asked again while waiting"))
        self._futures[key] = future
        return future

    def forget(self, key: Hashable, future: asyncio.Future[Answer]) -> None:
        if self._futures.get(key) is future:
            del self._futures[key]

    def resolve(self, key: Hashable, answer: Answer) -> bool:
        """False if nobody waits for it."""
        future = self._futures.pop(key, None)
        if future is None or future.done():
            return False
        future.set_result(answer)
        return True

    def fail_all(self, reason: str) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerLost(reason))
        self._futures.clear()

    def __len__(self) -> int:
        return len(self._futures)


class DrafterClient:
    """Asks for drafts. All methods belong to one event loop.

    num_late_replies: replies that came after their caller had given up; dropped.
    last_draft_s, last_num_rows: of the newest DraftReplies.
    """

    def __init__(self, endpoint: str, *, role: str = "gateway") -> None:
        self.endpoint = endpoint
        self.num_late_replies = 0
        self.num_bad_messages = 0
        self.last_draft_s = 0.0
        self.last_num_rows = 0
        self._role = role
        self._link: ClientLink | None = None
        self._is_linked = asyncio.Event()
        self._is_welcome = False
        self._num_status_requests = 0
        self._hellos: _Pending[Welcome | Refused] = _Pending()
        self._drafts: _Pending[DraftProposal | DraftFailed] = _Pending()
        self._statuses: _Pending[Status] = _Pending()

    @property
    def is_connected(self) -> bool:
        """A process has said welcome and was not reported lost since."""
        return self._is_welcome

    async def run(self) -> None:
        """Receive until cancelled."""
        while True:
            link = self._link
            if link is None:
                self._is_linked.clear()
                await self._is_linked.wait()
                continue
            try:
                message = await link.receive()
            except CodecError:
                self.num_bad_messages += 1
            except asyncio.CancelledError:
                # Closing the socket under a waiting receive cancels that receive, not this task.
                task = asyncio.current_task()
                if link is self._link or (task is not None and task.cancelling()):
                    raise
            else:
                self._dispatch(message)

    async def connect(self, *, timeout_s: float) -> Welcome:
        """Open a fresh link and introduce ourselves; the process may still be loading.

        Raises:
            PeerLate: no answer within ``timeout_s``. ProtocolMismatch: it speaks another version.
        """
        self.peer_lost("reconnecting")
        self._link = ClientLink(self.endpoint)
        self._is_linked.set()
        self._link.send(Hello(protocol_version=PROTOCOL_VERSION, role=self._role, pid=os.getpid()))
        future = self._hellos.open(None)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise PeerLate(f"no answer to hello within {timeout_s:g} s") from None
        finally:
            self._hellos.forget(None, future)
        if isinstance(answer, Refused):
            raise ProtocolMismatch(answer.reason)
        self._is_welcome = True
        return answer

    async def extend(self, message: DraftExtend, *, timeout_s: float) -> DraftProposal:
        """Send and wait for the answer of this request and round.

        Raises:
            PeerLost: not connected, lost while waiting, or the queue is full.
            PeerLate: no answer within ``timeout_s``. PeerRefused: the drafter said why it can't; the code is one of
                those in DraftFailed.
        """
        key = (message.request_id, message.round_id)
        future = self._drafts.open(key)
        try:
            self._send(message)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except TimeoutError:
            raise PeerLate(f"no draft within {timeout_s:g} s") from None
        finally:
            self._drafts.forget(key, future)
        if isinstance(answer, DraftFailed):
            raise PeerRefused(answer.code, answer.message)
        return answer

    def close(self, request_id: str) -> None:
        """The request is over. Best effort: a drafter that can't be told has a bound of its own."""
        if self._link is None or not self._is_welcome:
            return
        try:
            self._link.send(DraftClose(request_id=request_id))
        except LinkOverflow:
            return

    async def status(self, *, timeout_s: float) -> Status:
        """The process's state; answered also while it loads.

        Raises:
            PeerLost: not connected, or lost while waiting. PeerLate: no answer within ``timeout_s``.
        """
        self._num_status_requests += 1
        number = self._num_status_requests
        future = self._statuses.open(number)
        try:
            self._send(StatusRequest(request_number=number))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise PeerLate(f"no status within {timeout_s:g} s") from None
        finally:
            self._statuses.forget(number, future)

    def peer_lost(self, reason: str = "the drafter process is gone") -> None:
        """Fail everything that waits, now, and forget what is queued for the old process."""
        link, self._link = self._link, None
        self._is_welcome = False
        if link is not None:
            link.close(linger_ms=0)
        self._hellos.fail_all(reason)
        self._drafts.fail_all(reason)
        self._statuses.fail_all(reason)

    def _send(self, message: DraftExtend | StatusRequest) -> None:
        if self._link is None or not self._is_welcome:
            raise PeerLost("not connected to a drafter")
        try:
            self._link.send(message)
        except LinkOverflow as error:
            raise PeerLost(str(error)) from None

    def _dispatch(self, message: ToGateway) -> None:
        match message:
            case DraftReplies():
                # One loop without awaits: all callers of a batch wake in the same turn of the event loop.
                for reply in message.replies:
                    if not self._drafts.resolve((reply.request_id, reply.round_id), reply):
                        self.num_late_replies += 1
                self.last_draft_s, self.last_num_rows = message.draft_s, message.num_rows
            case Status():
                self._statuses.resolve(message.request_number, message)
            case Welcome() | Refused():
                self._hellos.resolve(None, message)
            case _:
                self.num_bad_messages += 1
