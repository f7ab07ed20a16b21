"""The body of POST /v1/chat/completions as a typed record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from gateway.openai.field_rules import CHAT_FIELDS, check_known_fields
from gateway.openai.fields import FieldReader, describe
from gateway.openai.requests import MAX_INTEGER, RequestRules, SharedFields, parse_shared_fields
from gateway.openai.tools import ToolUse, parse_tool_use
from gateway.ports import ChatMessage, ToolCall

__all__ = ["ChatRequest", "parse_chat_request", "parse_messages", "use_tools"]

# "developer" is OpenAI's newer name for "system"; chat templates only know the old one.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One chat request; ``messages`` is never empty. ``tool_use`` is None if no tool may be called."""

    shared: SharedFields
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool
    tool_use: ToolUse | None = None


def parse_chat_request(body: dict[str, Any], rules: RequestRules) -> ChatRequest:
    """Check and convert a whole chat body.

    Raises:
        InvalidRequest: names the field at fault.
        NotFound: the model is not served here.
    """
    reader = FieldReader(body)
    check_known_fields(reader, CHAT_FIELDS, is_strict=rules.config.is_strict)
    shared = parse_shared_fields(
        reader, rules, num_logprobs=_num_logprobs(reader, rules), max_tokens=_max_tokens(reader)
    )
    shared = replace(
        shared,
        separates_reasoning=reader.boolean("separate_reasoning", default=True),
        includes_reasoning=reader.boolean("include_reasoning", default=True),
    )
    tool_use = parse_tool_use(reader)
    return ChatRequest(
        shared=shared if tool_use is None else use_tools(reader, shared, tool_use),
        messages=parse_messages(reader, max_messages=rules.config.max_messages),
        add_generation_prompt=reader.boolean("add_generation_prompt", default=True),
        tool_use=tool_use,
    )


def use_tools(reader: FieldReader, shared: SharedFields, tool_use: ToolUse) -> SharedFields:
    """The shared fields of a request whose answer may hold tool calls, or must.

    Raises:
        InvalidRequest: the request also says what its text must look like.
    """
    if shared.sampling.grammar is not None:
        reader.fail("tools", "can't be combined with a format of the answer, unless tool_choice is none")
    grammar = tool_use.grammar()
    if grammar is not None and (shared.ignore_eos or shared.sampling.min_new_tokens):
        reader.fail("tool_choice", "can't force a call together with ignore_eos or min_tokens")
    return replace(shared, sampling=structs.replace(shared.sampling, grammar=grammar), parses_tools=True)


def parse_messages(reader: FieldReader, *, max_messages: int) -> tuple[ChatMessage, ...]:
    """The ``messages`` array.

    Raises:
        InvalidRequest: names the message and field at fault.
    """
    value = reader.require("messages")
    if not isinstance(value, list):
        reader.fail("messages", f"must be an array, not {describe(value)}", code="invalid_type")
    if not 1 <= len(value) <= max_messages:
        reader.fail("messages", f"must have 1 to {max_messages} messages, not {len(value)}")
    return tuple(_message(entry, f"messages[{index}]", reader) for index, entry in enumerate(value))


def _num_logprobs(reader: FieldReader, rules: RequestRules) -> int | None:
    top = reader.integer("top_logprobs", default=None, low=0, high=rules.config.max_logprobs)
    if reader.boolean("logprobs"):
        return top or 0
    if top:
        reader.fail("top_logprobs", "is only allowed when logprobs is true")
    return None


def _max_tokens(reader: FieldReader) -> tuple[str, int | None]:
    old = reader.integer("max_tokens", default=None, low=1, high=MAX_INTEGER)
    new = reader.integer("max_completion_tokens", default=None, low=1, high=MAX_INTEGER)
    return ("max_completion_tokens", new) if new is not None else ("max_tokens", old)


def _message(entry: Any, path: str, parent: FieldReader) -> ChatMessage:
    if not isinstance(entry, dict):
        parent.fail(path, f"must be an object, not {describe(entry)}", code="invalid_type")
    reader = FieldReader(entry, path)
    role = reader.require("role")
    if not isinstance(role, str) or role not in _ROLES:
        reader.fail("role", f"must be one of {', '.join(_ROLES)}")
    if reader.get("function_call") is not None:
        reader.fail("function_call", "is not supported; use tool_calls", code="unsupported_parameter")
    tool_calls = _tool_calls(reader)
    if tool_calls and role != "assistant":
        reader.fail("tool_calls", "is only allowed in assistant messages")
    # An assistant turn that only called tools has content null; so do empty answers some clients send back.
    content = "" if role == "assistant" and reader.get("content") is None else _content(reader)
    return ChatMessage(
        role=_ROLES[role],
        content=content,
        name=reader.string("name", max_chars=_MAX_NAME_CHARS),
        tool_calls=tool_calls,
        tool_call_id=reader.string("tool_call_id", max_chars=_MAX_NAME_CHARS),
        reasoning=_reasoning(reader) if role == "assistant" else None,
    )


def _reasoning(reader: FieldReader) -> str | None:
    # Two names of one field: clients send back what their server called it.
    given = reader.string("reasoning_content")
    return given if given is not None else reader.string("reasoning")


def _content(reader: FieldReader) -> str:
    value = reader.require("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        reader.fail("content", f"must be a string or an array, not {describe(value)}", code="invalid_type")
    if not value:
        reader.fail("content", "must not be an empty array")
    return "\n".join(_text_part(part, reader, index) for index, part in enumerate(value))


def _text_part(part: Any, message: FieldReader, index: int) -> str:
    if not isinstance(part, dict):
        message.fail(f"content[{index}]", f"must be an object, not {describe(part)}", code="invalid_type")
    reader = FieldReader(part, message.path_of(f"content[{index}]"))
    kind = reader.require("type")
    if kind not in ("text", "refusal"):
        shown = kind[:40] if isinstance(kind, str) else describe(kind)
        reader.fail("type", f"must be text: {shown!r} parts are not supported", code="unsupported_value")
    reader.require(kind)
    return reader.string(kind) or ""


def _tool_calls(reader: FieldReader) -> tuple[ToolCall, ...]:
    value = reader.get("tool_calls")
    if value is None:
        return ()
    if not isinstance(value, list):
        reader.fail("tool_calls", f"must be an array, not {describe(value)}", code="invalid_type")
    return tuple(_tool_call(entry, reader, index) for index, entry in enumerate(value))


def _tool_call(entry: Any, message: FieldReader, index: int) -> ToolCall:
    if not isinstance(entry, dict):
        message.fail(f"tool_calls[{index}]", f"must be an object, not {describe(entry)}", code="invalid_type")
    reader = FieldReader(entry, message.path_of(f"tool_calls[{index}]"))
    function = reader.child("function")
    if function is None:
        reader.fail("function", "is required", code="missing_required_parameter")
    function.require("name")
    return ToolCall(
        id=reader.string("id", max_chars=_MAX_NAME_CHARS) or "",
        name=function.string("name", max_chars=_MAX_NAME_CHARS) or "",
        arguments=function.string("arguments") or "",
    )
