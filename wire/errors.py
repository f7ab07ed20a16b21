"""Errors of links and the tensor ring.

WireError
├── CodecError          bytes that are no message of this protocol
├── LinkClosed          the peer is gone, or did not answer the hello in time
├── LinkOverflow        the bounded queue to the peer is full; the message was not sent
├── ProtocolMismatch    the peer speaks another protocol version
└── RingError
    ├── StaleTensor     the slot was written again since the reference was made
    └── TensorTooLarge  more bytes than a slot holds
"""

__all__ = [
    "CodecError",
    "LinkClosed",
    "LinkOverflow",
    "PeerError",
    "PeerLate",
    "PeerLost",
    "PeerRefused",
    "ProtocolMismatch",
    "RingError",
    "StaleTensor",
    "TensorTooLarge",
    "WireError",
]


class WireError(Exception):
    """Base of everything wire/ raises."""


class CodecError(WireError):
    """Bytes that are no message of this protocol."""


class LinkClosed(WireError):
    """The peer is gone, or did not answer the hello in time."""


class LinkOverflow(WireError):
    """The bounded queue to the peer is full; the message was not sent."""


class ProtocolMismatch(WireError):
    """The peer speaks another protocol version."""


class PeerError(WireError):
    """A call to another process has no result."""


class PeerLost(PeerError):
    """The process is not connected, or died."""


class PeerLate(PeerError):
    """No answer in time; the answer is dropped if it comes."""


class PeerRefused(PeerError):
    """The process answered that it can't serve this call; ``code`` is one of its message's codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class RingError(WireError):
    """The tensor ring can't serve this."""


class StaleTensor(RingError):
    """The slot was written again since the reference was made; its data is gone."""


class TensorTooLarge(RingError):
    """More bytes than a slot holds."""
