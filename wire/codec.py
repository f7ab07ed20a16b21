"""Messages to bytes and back: MessagePack, with a decoder per receiver that knows exactly the messages it may get."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from wire.errors import CodecError
from wire.messages import ToDrafter, ToGateway, ToVerifier

__all__ = ["DRAFTER_CODEC", "GATEWAY_CODEC", "VERIFIER_CODEC", "Codec"]

Received = TypeVar("Received")


class Codec(Generic[Received]):
    """Encodes any message, decodes only those of one receiver."""

    def __init__(self, received: object) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    def encode(self, message: msgspec.Struct) -> bytes:
        """Bytes of one message."""
        return self._encoder.encode(message)

    def decode(self, data: bytes | memoryview) -> Received:
        """One message.

        Raises:
            CodecError: not MessagePack, an unknown tag, a missing field or a wrong type.
        """
        try:
            return self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise CodecError(str(error)) from None


VERIFIER_CODEC: Codec[ToVerifier] = Codec(ToVerifier)
DRAFTER_CODEC: Codec[ToDrafter] = Codec(ToDrafter)
GATEWAY_CODEC: Codec[ToGateway] = Codec(ToGateway)
