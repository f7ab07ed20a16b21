"""The input and output items of a response as the API lists them, and as messages of a later turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from gateway.openai.responses_object import FunctionCallItem, Item, MessageItem, ReasoningItem
from gateway.openai.responses_request import join_turns
from gateway.ports import ChatMessage, ToolCall

__all__ = ["listed_input", "output_messages"]

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def listed_input(value: str | list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The checked ``input`` of a request as items: all have a type, an id and a status."""
    if isinstance(value, str):
        return (_listed({"type": "message", "role": "user", "content": value}),)
    return tuple(_listed(item) for item in value)


def output_messages(items: Iterable[Item]) -> tuple[ChatMessage, ...]:
    """What the assistant did, for the next turn."""
    return join_turns(_message(item) for item in items)


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    given = item.get("id")
    listed = {
        **item,
        "type": kind,
        "id": given if isinstance(given, str) and given else f"{_ID_PREFIXES.get(kind, 'item')}_{uuid4().hex}",
        "status": item.get("status") or "completed",
    }
    if kind == "message":
        listed["content"] = _parts(item.get("content"), is_output=item.get("role") == "assistant")
    return listed


def _parts(content: Any, *, is_output: bool) -> Any:
    if not isinstance(content, str):
        return content
    return [
        {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        if is_output
        else {"type": "input_text", "text": content}
    ]


def _message(item: Item) -> ChatMessage:
    match item:
        case MessageItem():
            return ChatMessage(role="assistant", content=item.text)
        case ReasoningItem():
            return ChatMessage(role="assistant", content="", reasoning=item.text)
        case FunctionCallItem():
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            return ChatMessage(role="assistant", content="", tool_calls=(call,))
