"""A tiny server process for supervision tests: ``python wire_child.py ENDPOINT BEHAVIOUR``.

Behaviours: good; hang = stops answering status after the first; mismatch = refuses; broken = reports an error.
"""

from __future__ import annotations

import asyncio
import sys

from wire.codec import DRAFTER_CODEC
from wire.link import ServerLink, answer_hello
from wire.messages import Hello, Refused, Status, StatusRequest


async def main(endpoint: str, behaviour: str) -> None:
    link = ServerLink(endpoint, DRAFTER_CODEC)
    answered = 0
    while True:
        peer, message = await link.receive()
        if isinstance(message, Hello):
            refusal = Refused(reason="the child speaks protocol 99")
            link.send(peer, refusal if behaviour == "mismatch" else answer_hello(message, role="drafter"))
        elif isinstance(message, StatusRequest) and not (behaviour == "hang" and answered):
            answered += 1
            error = "the head is broken" if behaviour == "broken" else None
            link.send(
                peer,
                Status(
                    request_number=message.request_number,
                    phase="ready",
                    progress=1.0,
                    is_ready=error is None,
                    counters={"answered": answered},
                    error=error,
                ),
            )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
