"""The body of POST /v1/responses as a typed record: the same generation as a chat, in the Responses API's words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from gateway.openai.chat_request import use_tools
from gateway.openai.constraints import parse_text_format
from gateway.openai.field_rules import COMMON_FIELDS, RESPONSES_FIELDS, check_known_fields
from gateway.openai.fields import FieldReader, describe
from gateway.openai.requests import MAX_INTEGER, RequestRules, SharedFields, parse_shared_fields
from gateway.openai.tools import ToolUse, parse_tool_use
from gateway.ports import ChatMessage, ToolCall

__all__ = ["ResponsesRequest", "join_turns", "parse_responses_request"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_MAX_ID_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """One request.

    Fields:
        messages: its own input, never empty unless that holds reasoning only.
        previous_response_id: the response whose conversation comes before the input.
        is_stored: the client wants to ask for the response later, which is the default.
        is_background: it runs without its client.
        body: the request as it came, for the many fields the answer repeats.
    """

    shared: SharedFields
    instructions: str | None
    messages: tuple[ChatMessage, ...]
    tool_use: ToolUse | None
    body: dict[str, Any]
    previous_response_id: str | None = None
    is_stored: bool = True
    is_background: bool = False

    def conversation(self, before: tuple[ChatMessage, ...] = ()) -> tuple[ChatMessage, ...]:
        """All messages for the chat template: instructions (of this request only), what came before, the input."""
        first = (ChatMessage(role="system", content=self.instructions),) if self.instructions else ()
        return (*first, *join_turns((*before, *self.messages)))


def parse_responses_request(body: dict[str, Any], rules: RequestRules) -> ResponsesRequest:
    """Check and convert a whole body.

    Raises:
        InvalidRequest: names the field at fault.
        NotFound: the model is not served here.
    """
    reader = FieldReader(body)
    check_known_fields(reader, RESPONSES_FIELDS, is_strict=rules.config.is_strict)
    _check_small_fields(reader)
    known = RESPONSES_FIELDS & COMMON_FIELDS
    shared = parse_shared_fields(
        FieldReader({name: value for name, value in body.items() if name in known}),
        rules,
        num_logprobs=_num_logprobs(reader, rules),
        max_tokens=("max_output_tokens", reader.integer("max_output_tokens", default=None, low=1, high=MAX_INTEGER)),
    )
    grammar = parse_text_format(reader)
    if grammar is not None and (shared.ignore_eos or shared.sampling.min_new_tokens):
        reader.fail("text", "can't set a format together with ignore_eos or min_tokens")
    shared = replace(shared, sampling=structs.replace(shared.sampling, grammar=grammar))
    tool_use = parse_tool_use(reader, is_flat=True)
    return ResponsesRequest(
        shared=shared if tool_use is None else use_tools(reader, shared, tool_use),
        instructions=reader.string("instructions"),
        messages=_messages(reader, max_messages=rules.config.max_messages),
        tool_use=tool_use,
        body=body,
        previous_response_id=reader.string("previous_response_id", max_chars=_MAX_ID_CHARS),
        is_stored=_is_stored(reader, rules),
        is_background=reader.boolean("background"),
    )


def _check_small_fields(reader: FieldReader) -> None:
    reader.integer("n", default=None, low=1, high=1)
    reader.child("metadata")
    if reader.string("truncation") not in (None, "auto", "disabled"):
        reader.fail("truncation", "must be auto or disabled")


def _is_stored(reader: FieldReader, rules: RequestRules) -> bool:
    wanted = reader.boolean("store", default=True)
    can_store = rules.config.max_stored_responses > 0
    if reader.boolean("background") and not (wanted and can_store):
        problem = "needs store" if can_store else "is not supported: nothing is stored here"
        reader.fail("background", problem, code="unsupported_value")
    return wanted and can_store


def _num_logprobs(reader: FieldReader, rules: RequestRules) -> int | None:
    include = reader.get("include")
    if include is not None and not isinstance(include, list):
        reader.fail("include", f"must be an array, not {describe(include)}", code="invalid_type")
    top = reader.integer("top_logprobs", default=0, low=0, high=rules.config.max_logprobs)
    return top if top or "message.output_text.logprobs" in (include or []) else None


def _messages(reader: FieldReader, *, max_messages: int) -> tuple[ChatMessage, ...]:
    value = reader.require("input")
    if isinstance(value, str):
        return (ChatMessage(role="user", content=value),)
    if not isinstance(value, list):
        reader.fail("input", f"must be a string or an array, not {describe(value)}", code="invalid_type")
    if not 1 <= len(value) <= max_messages:
        reader.fail("input", f"must have 1 to {max_messages} items, not {len(value)}")
    items = [_item(entry, f"input[{index}]", reader) for index, entry in enumerate(value)]
    return join_turns([item for item in items if item is not None])


def _item(entry: Any, name: str, request: FieldReader) -> ChatMessage | None:
    if not isinstance(entry, dict):
        request.fail(name, f"must be an object, not {describe(entry)}", code="invalid_type")
    reader = FieldReader(entry, request.path_of(name))
    kind = reader.string("type") or "message"
    if kind == "message":
        return _message(reader)
    if kind == "function_call":
        reader.require("name")
        call = ToolCall(
            id=reader.string("call_id") or "",
            name=reader.string("name") or "",
            arguments=reader.string("arguments") or "",
        )
        return ChatMessage(role="assistant", content="", tool_calls=(call,))
    if kind == "function_call_output":
        return ChatMessage(role="tool", content=_text(reader, "output"), tool_call_id=reader.string("call_id"))
    if kind != "reasoning":
        reader.fail(
            "type", "must be message, reasoning, function_call or function_call_output", code="unsupported_value"
        )
    thoughts = _text(reader, "content") if reader.get("content") is not None else ""
    return ChatMessage(role="assistant", content="", reasoning=thoughts) if thoughts else None


def _message(reader: FieldReader) -> ChatMessage:
    role = reader.require("role")
    if not isinstance(role, str) or role not in _ROLES:
        reader.fail("role", f"must be one of {', '.join(_ROLES)}")
    return ChatMessage(role=_ROLES[role], content=_text(reader, "content"))


def _text(reader: FieldReader, name: str) -> str:
    value = reader.require(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        reader.fail(name, f"must be a string or an array, not {describe(value)}", code="invalid_type")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict):
            reader.fail(f"{name}[{index}]", f"must be an object, not {describe(part)}", code="invalid_type")
        child = FieldReader(part, reader.path_of(f"{name}[{index}]"))
        kind = child.require("type")
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            child.fail("type", "must be input_text or output_text: only text is supported", code="unsupported_value")
        texts.append(child.string(key) or "")
    return "\n".join(texts)


def join_turns(messages: Iterable[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Thoughts, text and calls of one turn come as items of their own; a chat template wants them in one message."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if last is not None and _is_thought(last):
            # Thoughts that nothing of the same turn follows are no part of the conversation.
            joined[-1] = replace(message, reasoning=last.reasoning) if message.role == "assistant" else message
        elif last is not None and last.role == "assistant" and message.tool_calls and not message.content:
            joined[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls)
        else:
            joined.append(message)
    return tuple(message for message in joined if not _is_thought(message))


def _is_thought(message: ChatMessage) -> bool:
    return message.reasoning is not None and not message.content and not message.tool_calls
