"""The body of POST /v1/responses as a typed record: the same generation as a chat, in the Responses API's words."""

from __future__ import annotations

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

__all__ = ["ResponsesRequest", "parse_responses_request"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest:
    """One request; ``messages`` is never empty.

    Fields:
        body: the request as it came, for the many fields the answer repeats.
    """

    shared: SharedFields
    messages: tuple[ChatMessage, ...]
    tool_use: ToolUse | None
    body: dict[str, Any]


def parse_responses_request(body: dict[str, Any], rules: RequestRules) -> ResponsesRequest:
    """Check and convert a whole body.

    Raises:
        InvalidRequest: names the field at fault.
        NotFound: the model is not served here.
    """
    reader = FieldReader(body)
    check_known_fields(reader, RESPONSES_FIELDS, is_strict=rules.config.is_strict)
    _refuse_state(reader)
    known = RESPONSES_FIELDS & COMMON_FIELDS
    shared = parse_shared_fields(
        FieldReader({name: value for name, value in body.items() if name in known}),
        rules,
        num_logprobs=None,
        max_tokens=("max_output_tokens", reader.integer("max_output_tokens", default=None, low=1, high=MAX_INTEGER)),
    )
    grammar = parse_text_format(reader)
    if grammar is not None and (shared.ignore_eos or shared.sampling.min_new_tokens):
        reader.fail("text", "can't set a format together with ignore_eos or min_tokens")
    shared = replace(shared, sampling=structs.replace(shared.sampling, grammar=grammar))
    tool_use = parse_tool_use(reader, is_flat=True)
    return ResponsesRequest(
        shared=shared if tool_use is None else use_tools(reader, shared, tool_use),
        messages=_messages(reader, max_messages=rules.config.max_messages),
        tool_use=tool_use,
        body=body,
    )


def _refuse_state(reader: FieldReader) -> None:
    """Nothing is stored, so nothing can be continued, and nothing runs without its client."""
    if reader.get("previous_response_id") is not None:
        reader.fail("previous_response_id", "is not supported: responses are not stored", code="unsupported_parameter")
    if reader.boolean("background"):
        reader.fail("background", "is not supported: responses are not stored", code="unsupported_parameter")
    reader.integer("n", default=None, low=1, high=1)
    reader.child("metadata")
    if reader.string("truncation") not in (None, "auto", "disabled"):
        reader.fail("truncation", "must be auto or disabled")
    include = reader.get("include")
    if include is not None and not isinstance(include, list):
        reader.fail("include", f"must be an array, not {describe(include)}", code="invalid_type")
    wants_logprobs = "message.output_text.logprobs" in (include or [])
    if wants_logprobs or reader.integer("top_logprobs", default=0, low=0, high=20):
        name = "include" if wants_logprobs else "top_logprobs"
        reader.fail(name, "is not supported here: logprobs come with chat completions", code="unsupported_value")


def _messages(reader: FieldReader, *, max_messages: int) -> tuple[ChatMessage, ...]:
    instructions = reader.string("instructions")
    first = [ChatMessage(role="system", content=instructions)] if instructions else []
    value = reader.require("input")
    if isinstance(value, str):
        return *first, ChatMessage(role="user", content=value)
    if not isinstance(value, list):
        reader.fail("input", f"must be a string or an array, not {describe(value)}", code="invalid_type")
    if not 1 <= len(value) <= max_messages:
        reader.fail("input", f"must have 1 to {max_messages} items, not {len(value)}")
    items = [_item(entry, f"input[{index}]", reader) for index, entry in enumerate(value)]
    return *first, *_joined([item for item in items if item is not None])


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
        reader.fail("type", "must be message, function_call or function_call_output", code="unsupported_value")
    return None  # what another model thought is no part of the conversation


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


def _joined(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls of one turn come as items of their own; a chat template wants them in one message."""
    joined: list[ChatMessage] = []
    for message in messages:
        last = joined[-1] if joined else None
        if message.tool_calls and last is not None and last.role == "assistant":
            joined[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls)
        else:
            joined.append(message)
    return joined
