"""OpenAI response objects and stream chunks as JSON bytes.

The same small set of builders serves both endpoints; each names the rule of the stream contract it keeps. Chunks are
built as plain dicts and written by orjson, because a stream makes one per event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.ports import FinishReason

__all__ = ["ChoiceResult", "ResponseHead", "StreamChunks", "response_body"]

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What is equal in every chunk of a response: its id, time (Unix seconds), model name and endpoint."""

    endpoint: Endpoint
    response_id: str
    created_s: int
    model: str

    def fields(self, *, is_chunk: bool) -> dict[str, Any]:
        """The leading fields of the object."""
        kind = "text_completion" if self.endpoint == "completions" else "chat.completion"
        if is_chunk and self.endpoint == "chat":
            kind = "chat.completion.chunk"
        return {"id": self.response_id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """One finished choice of a response that is not streamed. ``logprobs`` is in the endpoint's own shape."""

    index: int
    text: str
    finish_reason: FinishReason
    matched_stop: str | int | None
    logprobs: dict[str, Any] | None


class StreamChunks:
    """Builds the chunks of one stream, without the event framing.

    Args:
        head: equal in every chunk.
        has_usage: the stream ends with a usage chunk, so every other one carries ``usage: null``.
    """

    def __init__(self, head: ResponseHead, *, has_usage: bool) -> None:
        self._is_chat = head.endpoint == "chat"
        self._fields = head.fields(is_chunk=True)
        self._has_usage = has_usage

    def role(self, index: int) -> bytes:
        """Chat only: the first chunk of a choice, and the only one that carries the role."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None, None)

    def content(
        self, index: int, text: str, *, logprobs: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        """New text of a choice; ``usage`` only for continuous usage stats."""
        return self._chunk(index, {"content": text} if self._is_chat else text, logprobs, None, usage)

    def finish(
        self,
        index: int,
        finish_reason: FinishReason,
        matched_stop: str | int | None,
        *,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The last chunk of a choice, and the only one with a finish reason."""
        return self._chunk(index, {} if self._is_chat else "", None, finish_reason, usage, matched_stop)

    def usage(self, usage: dict[str, Any], *, metrics: dict[str, Any] | None = None) -> bytes:
        """The last JSON event of a stream with ``include_usage``: no choices."""
        extra = {} if metrics is None else {"metrics": metrics}
        return orjson.dumps({**self._fields, "choices": [], "usage": usage, **extra})

    def _chunk(
        self,
        index: int,
        payload: dict[str, Any] | str,
        logprobs: dict[str, Any] | None,
        finish_reason: FinishReason | None,
        usage: dict[str, Any] | None,
        matched_stop: str | int | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta" if self._is_chat else "text": payload,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = matched_stop
        fields = {**self._fields, "choices": [choice]}
        if self._has_usage:
            fields["usage"] = usage
        return orjson.dumps(fields)


def response_body(
    head: ResponseHead,
    choices: Sequence[ChoiceResult],
    usage: dict[str, Any],
    *,
    metrics: dict[str, Any] | None = None,
) -> bytes:
    """The whole object of a response that is not streamed."""
    is_chat = head.endpoint == "chat"
    fields = head.fields(is_chunk=False)
    fields["choices"] = [_choice(choice, is_chat=is_chat) for choice in choices]
    fields["usage"] = usage
    if metrics is not None:
        fields["metrics"] = metrics
    return orjson.dumps(fields)


def _choice(choice: ChoiceResult, *, is_chat: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": choice.index}
    if is_chat:
        fields["message"] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
    else:
        fields["text"] = choice.text
    fields["logprobs"] = choice.logprobs
    fields["finish_reason"] = choice.finish_reason
    fields["stop_reason"] = choice.matched_stop
    return fields
