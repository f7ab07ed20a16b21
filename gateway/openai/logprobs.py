"""Token logprobs in the two shapes OpenAI has: chat's ``content`` list and completions' four parallel lists."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from gateway.ports import TextCodec, TokenLogprob

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs"]

# JSON has no -inf. vLLM's floor, so that tools find what they know.
_LOWEST_LOGPROB = -9999.0


class TextOffsets:
    """Where each token starts in the text, in characters.

    Counts complete characters only, so all tokens of one split character start at that character.

    Args:
        start: characters of text that stand before the first token (an echoed prompt).
    """

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._codec = codec
        self._skipped_ids = codec.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = start

    def next_offset(self, token_id: int) -> int:
        """Start of this token; call once per token, in order."""
        offset = self._num_chars
        if token_id not in self._skipped_ids:
            self._num_chars += len(self._decoder.decode(self._codec.token_bytes(token_id)))
        return offset


def chat_logprobs(entries: Sequence[TokenLogprob], codec: TextCodec) -> dict[str, Any]:
    """``{"content": [...], "refusal": null}``; one entry per token, its bytes taken from the id, not from the text."""
    return {"content": [_chat_entry(entry, codec) for entry in entries], "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], token_ids: Sequence[int], codec: TextCodec, offsets: TextOffsets
) -> dict[str, Any]:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, all as long as ``token_ids``.

    An entry of None (the first prompt token) gives null. ``top_logprobs`` always holds the token itself, as in OpenAI's
    API, so it may have one entry more than asked for.
    """
    return {
        "tokens": [_token_text(token_id, codec) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top_by_text(entry, codec) for entry in entries],
        "text_offset": [offsets.next_offset(token_id) for token_id in token_ids],
    }


def _chat_entry(entry: TokenLogprob, codec: TextCodec) -> dict[str, Any]:
    fields = _token_fields(entry.token_id, entry.logprob, codec)
    fields["top_logprobs"] = [_token_fields(token_id, logprob, codec) for token_id, logprob in entry.top]
    return fields


def _token_fields(token_id: int, logprob: float, codec: TextCodec) -> dict[str, Any]:
    raw = codec.token_bytes(token_id)
    return {"token": raw.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _top_by_text(entry: TokenLogprob, codec: TextCodec) -> dict[str, float]:
    # Different ids may share a text (parts of a character); the most likely one keeps it.
    by_text: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        by_text.setdefault(_token_text(token_id, codec), _finite(logprob))
    return by_text


def _token_text(token_id: int, codec: TextCodec) -> str:
    return codec.token_bytes(token_id).decode("utf-8", errors="replace")


def _finite(logprob: float) -> float:
    # Written as a test on purpose: max(nan, x) is nan.
    return logprob if math.isfinite(logprob) and logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB
