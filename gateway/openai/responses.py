"""Objects and stream chunks of chat and completions as JSON bytes (the Responses API has files of its own).

The same small set of builders serves both endpoints; each names the rule of the stream contract it keeps. Chunks are
built as plain dicts and written by orjson, because a stream makes one per event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import orjson

from gateway.text.tool_calls import ToolDelta

__all__ = ["AnswerFinishReason", "ChoiceResult", "Endpoint", "Piece", "ResponseHead", "StreamChunks", "response_body"]

Endpoint = Literal["chat", "completions"]
AnswerFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What is equal in every chunk of a response: its id, time (Unix seconds), model name and endpoint.

    ``has_reasoning_alias``: thoughts are sent under both of their names.
    """

    endpoint: Endpoint
    response_id: str
    created_s: int
    model: str
    has_reasoning_alias: bool = False

    def fields(self, *, is_chunk: bool) -> dict[str, Any]:
        """The leading fields of the object."""
        kind = "text_completion" if self.endpoint == "completions" else "chat.completion"
        if is_chunk and self.endpoint == "chat":
            kind = "chat.completion.chunk"
        return {"id": self.response_id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a choice.

    Fields:
        reasoning: chat only: what the model thought, apart from the text.
        logprobs: of the part's tokens, in the endpoint's own shape, if asked for.
        token_ids: of the part, if the client asked for them.
        tool_deltas: chat only.
    """

    text: str
    reasoning: str = ""
    logprobs: dict[str, Any] | None = None
    token_ids: tuple[int, ...] = ()
    tool_deltas: tuple[ToolDelta, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing a client could see."""
        return not (self.text or self.reasoning or self.logprobs is not None or self.token_ids or self.tool_deltas)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """One finished choice of a response that is not streamed.

    Fields:
        logprobs: in the endpoint's own shape.
        tool_calls: whole calls, first to last.
        token_ids, prompt_ids: None unless the client asked for them.
    """

    index: int
    text: str
    finish_reason: AnswerFinishReason
    matched_stop: str | int | None
    logprobs: dict[str, Any] | None
    reasoning: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None


class StreamChunks:
    """Builds the chunks of one stream, without the event framing.

    Args:
        head: equal in every chunk.
        has_usage: the stream ends with a usage chunk, so every other one carries ``usage: null``.
    """

    def __init__(self, head: ResponseHead, *, has_usage: bool) -> None:
        self._is_chat = head.endpoint == "chat"
        self._fields = head.fields(is_chunk=True)
        self._has_reasoning_alias = head.has_reasoning_alias
        self._has_usage = has_usage

    def role(self, index: int, *, prompt_ids: tuple[int, ...] | None = None) -> bytes:
        """Chat only: the first chunk of a choice, and the only one that carries the role."""
        extra = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids}
        return self._chunk(self._choice(index, {"role": "assistant", "content": ""}), None, extra)

    def content(self, index: int, piece: Piece, *, usage: dict[str, Any] | None = None) -> bytes:
        """A new part of a choice; ``usage`` only for continuous usage stats."""
        choice = self._choice(index, self._delta(piece) if self._is_chat else piece.text)
        choice["logprobs"] = piece.logprobs
        if piece.token_ids:
            choice["token_ids"] = piece.token_ids
        return self._chunk(choice, usage)

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text, as a JSON string, in a chunk of text alone without usage."""
        mark = uuid4().hex
        before, after = self.content(index, Piece(text=mark)).split(orjson.dumps(mark))
        return before, after

    def finish(
        self,
        index: int,
        finish_reason: AnswerFinishReason,
        matched_stop: str | int | None,
        *,
        usage: dict[str, Any] | None = None,
    ) -> bytes:
        """The last chunk of a choice, and the only one with a finish reason."""
        choice = self._choice(index, {} if self._is_chat else "")
        choice["finish_reason"] = finish_reason
        choice["stop_reason"] = matched_stop
        return self._chunk(choice, usage)

    def usage(self, usage: dict[str, Any], *, metrics: dict[str, Any] | None = None) -> bytes:
        """The last JSON event of a stream with ``include_usage``: no choices."""
        extra = {} if metrics is None else {"metrics": metrics}
        return orjson.dumps({**self._fields, "choices": [], "usage": usage, **extra})

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if not piece.tool_deltas and not piece.reasoning:
            return {"content": piece.text}
        fields = _reasoning_fields(piece.reasoning, has_alias=self._has_reasoning_alias)
        if piece.text:
            fields["content"] = piece.text
        if piece.tool_deltas:
            fields["tool_calls"] = [_tool_fragment(delta) for delta in piece.tool_deltas]
        return fields

    def _choice(self, index: int, payload: dict[str, Any] | str) -> dict[str, Any]:
        key = "delta" if self._is_chat else "text"
        return {"index": index, key: payload, "logprobs": None, "finish_reason": None}

    def _chunk(
        self, choice: dict[str, Any], usage: dict[str, Any] | None, extra: dict[str, Any] | None = None
    ) -> bytes:
        fields = {**self._fields, "choices": [choice], **(extra or {})}
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
    fields["choices"] = [
        _choice(choice, is_chat=is_chat, has_reasoning_alias=head.has_reasoning_alias) for choice in choices
    ]
    fields["usage"] = usage
    if is_chat and choices and choices[0].prompt_ids is not None:
        fields["prompt_token_ids"] = choices[0].prompt_ids
    if metrics is not None:
        fields["metrics"] = metrics
    return orjson.dumps(fields)


def _reasoning_fields(reasoning: str, *, has_alias: bool) -> dict[str, Any]:
    # Absent, not null, where there are none: clients concatenate what they find (C-22).
    if not reasoning:
        return {}
    names = ("reasoning_content", "reasoning") if has_alias else ("reasoning_content",)
    return dict.fromkeys(names, reasoning)


def _tool_fragment(delta: ToolDelta) -> dict[str, Any]:
    # Id, type and name come once: official helpers concatenate strings, so a repeat would double them.
    if not delta.call_id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}


def _choice(choice: ChoiceResult, *, is_chat: bool, has_reasoning_alias: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": choice.index}
    if is_chat:
        content = None if choice.tool_calls and not choice.text else choice.text
        fields["message"] = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        fields["message"].update(_reasoning_fields(choice.reasoning, has_alias=has_reasoning_alias))
        if choice.tool_calls:
            fields["message"]["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
    else:
        fields["text"] = choice.text
    fields["logprobs"] = choice.logprobs
    fields["finish_reason"] = choice.finish_reason
    fields["stop_reason"] = choice.matched_stop
    if choice.token_ids is not None:
        fields["token_ids"] = choice.token_ids
        if not is_chat:
            fields["prompt_token_ids"] = choice.prompt_ids
    return fields
