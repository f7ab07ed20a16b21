"""ZeroMQ links with bounded queues: a server (ROUTER) and a client (DEALER), both on asyncio.

A full queue is an error for the sender at once (LinkOverflow), never a wait: the sender knows what to do about it,
the link doesn't.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from wire.codec import GATEWAY_CODEC, Codec
from wire.errors import CodecError, LinkClosed, LinkOverflow, ProtocolMismatch
from wire.messages import PROTOCOL_VERSION, Hello, Refused, ToGateway, Welcome

__all__ = ["ClientLink", "ServerLink", "answer_hello"]

Received = TypeVar("Received")
_QUEUE_LIMIT = 4096


def _send_now(socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    # With NOBLOCK the future is done when it comes back; going through it keeps the socket's own event bookkeeping
    # right, which a direct synchronous send would not.
    done = socket.send_multipart(frames, flags=zmq.NOBLOCK)
    assert isinstance(done, asyncio.Future)
    assert done.done()
    done.result()


class ServerLink(Generic[Received]):
    """Bound end. Peers are known by the identity ZeroMQ gives them."""

    def __init__(self, endpoint: str, codec: Codec[Received], *, queue_limit: int = _QUEUE_LIMIT) -> None:
        self._codec = codec
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, queue_limit)
        self._socket.setsockopt(zmq.RCVHWM, queue_limit)
        # A message to a peer that is gone or whose queue is full is an error, not a silent drop.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).parent.mkdir(parents=True, exist_ok=True)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def receive(self) -> tuple[bytes, Received]:
        """The next (peer, message).

        Raises:
            CodecError: the peer sent something else; the link stays usable.
        """
        peer, *frames = await self._socket.recv_multipart()
        if len(frames) != 1:
            raise CodecError(f"a message is one frame, not {len(frames)}")
        return peer, self._codec.decode(frames[0])

    def send(self, peer: bytes, message: msgspec.Struct) -> None:
        """Queue a message.

        Raises:
            LinkOverflow: the peer's queue is full. LinkClosed: there is no such peer any more.
        """
        try:
            _send_now(self._socket, [peer, self._codec.encode(message)])
        except zmq.Again:
            raise LinkOverflow("the peer's queue is full") from None
        except zmq.ZMQError as error:
            raise LinkClosed(f"the peer is gone: {error}") from None

    def close(self) -> None:
        """Close the socket; queued messages get 200 ms."""
        self._socket.close()
        self._context.term()


def answer_hello(hello: Hello, *, role: str, ring_path: str | None = None) -> Welcome | Refused:
    """Welcome a client of the same protocol version, refuse any other."""
    if hello.protocol_version != PROTOCOL_VERSION:
        return Refused(reason=f"{role} speaks protocol {PROTOCOL_VERSION}, {hello.role} {hello.protocol_version}")
    return Welcome(protocol_version=PROTOCOL_VERSION, role=role, pid=os.getpid(), ring_path=ring_path)


class ClientLink:
    """Connected end, as the gateway holds it to each of its servers."""

    def __init__(self, endpoint: str, *, queue_limit: int = _QUEUE_LIMIT) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, queue_limit)
        self._socket.setsockopt(zmq.RCVHWM, queue_limit)
        self._socket.connect(endpoint)

    async def hello(self, *, role: str, timeout_s: float) -> Welcome:
        """Introduce ourselves and wait for the answer.

        Raises:
            ProtocolMismatch: the peer speaks another version. LinkClosed: no answer within ``timeout_s``.
        """
        self.send(Hello(protocol_version=PROTOCOL_VERSION, role=role, pid=os.getpid()))
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if isinstance(message, Welcome):
                        return message
                    if isinstance(message, Refused):
                        raise ProtocolMismatch(message.reason)
        except TimeoutError:
            raise LinkClosed(f"no answer to hello within {timeout_s:g} s") from None

    async def receive(self) -> ToGateway:
        """The next message.

        Raises:
            CodecError: the peer sent something else; the link stays usable.
        """
        return GATEWAY_CODEC.decode(await self._socket.recv())

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message.

        Raises:
            LinkOverflow: the queue is full, e.g. because the peer is gone.
        """
        try:
            _send_now(self._socket, [GATEWAY_CODEC.encode(message)])
        except zmq.Again:
            raise LinkOverflow("the queue to the peer is full") from None

    def close(self, *, linger_ms: int = 200) -> None:
        """Close the socket; queued messages get ``linger_ms``, 0 when the peer is known to be dead."""
        self._socket.close(linger_ms)
        self._context.term()
