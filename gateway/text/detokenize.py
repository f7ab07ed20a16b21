"""Incremental detokenization: one token id in, the text that is safe to send out.

Works on bytes. A byte-level token may hold a part of a UTF-8 character, so each token's bytes go through an incremental
UTF-8 decoder that keeps an incomplete character (at most three bytes) until its rest arrives. The cost of a token is
its own length, whatever came before, and the deltas concatenate to the one-shot decode of all ids, because both replace
an invalid byte run by the same U+FFFD.
"""

from __future__ import annotations

import codecs

from gateway.ports import TextCodec

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Turns the token ids of one answer into text, one id at a time.

    Args:
        codec: gives the bytes of an id.
        skip_special_tokens: leave special tokens out of the text.
        shown_ids: but not these.
    """

    def __init__(
        self, codec: TextCodec, *, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        self._codec = codec
        self._skipped_ids = codec.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text completed by this id; empty while a character is incomplete or the id is a skipped special token."""
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._codec.token_bytes(token_id))

    def finish(self) -> str:
        """What is left: U+FFFD for an incomplete character, otherwise nothing."""
        return self._decoder.decode(b"", True)
