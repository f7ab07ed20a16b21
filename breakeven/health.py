"""``breakeven health``: is a process ready? For container healthchecks; exit status 0 or 1."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

from wire.errors import WireError
from wire.link import ClientLink
from wire.messages import Status, StatusRequest

__all__ = ["gateway_is_ready", "peer_phase", "sglang_is_healthy"]


def gateway_is_ready(host: str, port: int, *, timeout_s: float) -> bool:
    """True if /ready answers 200."""
    address = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104 - the wildcard is not an address to ask
    return _answers(f"http://{address}:{port}/ready", timeout_s)


def sglang_is_healthy(url: str, *, timeout_s: float) -> bool:
    """True if SGLang's /health answers 200: its model is loaded."""
    return _answers(f"{url.rstrip('/')}/health", timeout_s)


def _answers(url: str, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 - from our own settings
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def peer_phase(endpoint: str, *, timeout_s: float) -> tuple[bool, str]:
    """Ask a verifier or drafter: (is it ready, its load phase or why it did not answer)."""
    link = ClientLink(endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            await link.hello(role="health", timeout_s=timeout_s)
            link.send(StatusRequest(request_number=0))
            while True:
                message = await link.receive()
                if isinstance(message, Status):
                    return message.is_ready, message.error or message.phase
    except (WireError, TimeoutError) as error:
        return False, str(error) or "no answer"
    finally:
        link.close(linger_ms=0)
