"""The client side of a server process that may die and come back at the same endpoint.

What both the drafter's and the verifier's client need: the receive loop, hello, status, and the rule that a lost peer
fails everything that waits and that nothing queued for a dead process is ever sent to the next one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from wire.errors import CodecError, LinkOverflow, PeerLate, PeerLost, ProtocolMismatch
from wire.link import ClientLink
from wire.messages import PROTOCOL_VERSION, Hello, Refused, Status, StatusRequest, ToGateway, Welcome

__all__ = ["Pending", "ReconnectingClient"]

Answer = TypeVar("Answer")


class Pending(Generic[Answer]):
    """Futures by what identifies their answer."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, asyncio.Future[Answer]] = {}

    def open(self, key: Hashable) -> asyncio.Future[Answer]:
        """A future for ``key``; one that waits under the same key is told PeerLost."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        earlier = self._futures.get(key)
        if earlier is not None and not earlier.done():
            earlier.set_exception(PeerLost("asked again while waiting"))
        self._futures[key] = future
        return future

    def forget(self, key: Hashable, future: asyncio.Future[Answer]) -> None:
        """Stop waiting; leaves a newer future under the same key alone."""
        if self._futures.get(key) is future:
            del self._futures[key]

    def resolve(self, key: Hashable, answer: Answer) -> bool:
        """Hand over the answer; False if nobody waits for it."""
        future = self._futures.pop(key, None)
        if future is None or future.done():
            return False
        future.set_result(answer)
        return True

    def fail_all(self, reason: str) -> None:
        """Tell everybody PeerLost."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(PeerLost(reason))
        self._futures.clear()

    def __len__(self) -> int:
        return len(self._futures)


class ReconnectingClient:
    """Base of clients; all methods belong to one event loop. Start ``run`` before ``connect``.

    Args:
        peer: what the other process is called in errors.
        role: what we are called in Hello.
        needs_welcome: calls before the peer's welcome are PeerLost at once; otherwise they are sent and wait.
    """

    def __init__(self, endpoint: str, *, peer: str, role: str, needs_welcome: bool) -> None:
        self.endpoint = endpoint
        self.num_bad_messages = 0
        self._peer = peer
        self._role = role
        self._needs_welcome = needs_welcome
        self._link: ClientLink | None = None
        self._is_linked = asyncio.Event()
        self._is_welcome = False
        self._num_status_requests = 0
        self._hellos: Pending[Welcome | Refused] = Pending()
        self._statuses: Pending[Status] = Pending()

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
            except CodecError as error:
                self._on_bad_message(str(error))
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

    def peer_lost(self, reason: str = "the process is gone") -> None:
        """Fail everything that waits, now, and forget what is queued for the old process."""
        link, self._link = self._link, None
        self._is_welcome = False
        if link is not None:
            link.close(linger_ms=0)  # what is queued for a dead process must not hold up the event loop
        self._hellos.fail_all(reason)
        self._statuses.fail_all(reason)
        self._fail_waiting(reason)

    def _send(self, message: msgspec.Struct) -> None:
        """Send, or raise PeerLost."""
        if self._link is None or (self._needs_welcome and not self._is_welcome):
            raise PeerLost(f"not connected to a {self._peer}")
        try:
            self._link.send(message)
        except LinkOverflow as error:
            raise PeerLost(str(error)) from None

    def _dispatch(self, message: ToGateway) -> None:
        match message:
            case Status():
                self._statuses.resolve(message.request_number, message)
            case Welcome() | Refused():
                self._hellos.resolve(None, message)
            case _:
                self._on_message(message)

    # ------------------------------------------------------------ what each client adds

    def _on_message(self, message: ToGateway) -> None:
        """Anything but hello and status."""
        raise NotImplementedError

    def _fail_waiting(self, reason: str) -> None:
        """Fail the client's own calls that wait, with PeerLost."""
        raise NotImplementedError

    def _on_bad_message(self, reason: str) -> None:
        """The peer sent what is no message for us."""
        self.num_bad_messages += 1
