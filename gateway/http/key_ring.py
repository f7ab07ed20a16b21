"""The accepted API keys, kept as digests only."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from gateway.errors import AuthenticationFailed

__all__ = ["KeyRing"]

_ID_CHARS = 12


class KeyRing:
    """Checks bearer tokens against all keys. Empty (false) means that no key is asked for."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these from now on, and no others. Requests that were let in go on."""
        self._digests = tuple(_digest(key) for key in dict.fromkeys(keys))

    def check(self, authorization: str | None) -> str:
        """The id of the key in an Authorization header, in a time that depends neither on the header nor on the keys.

        Returns:
            The start of the key's digest, safe to log and to count by.

        Raises:
            AuthenticationFailed: no token, or a wrong one.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise AuthenticationFailed("An API key is required: Authorization: Bearer <key>.", code="missing_api_key")
        # Equal lengths for compare_digest, and no early end at the first match.
        given = _digest(token.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise AuthenticationFailed("The API key is not valid here.")
        return given.hex()[:_ID_CHARS]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
