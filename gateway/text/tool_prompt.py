"""Writes tools into a prompt for models whose chat template knows none: a system text in the format of Hermes.

The same text for every model, so that what a model sees is documented and testable (docs/api.md, Tools). Earlier calls
and their results become the text the model would have written and read itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from gateway.ports import ChatMessage

__all__ = ["Tool", "ToolRenderer", "with_tools"]

_INTRO = """# Tools

You may call one or more functions. Their signatures are given within <tools></tools> tags:
<tools>
{signatures}
</tools>

To call a function, write a JSON object with its name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call. ``parameters``: JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: dict[str, Any]

    def signature(self) -> dict[str, Any]:
        """The tool as OpenAI's API and chat templates write it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@runtime_checkable
class ToolRenderer(Protocol):
    """A text codec whose chat template may know tools by itself."""

    @property
    def writes_tools(self) -> bool:
        """The template writes tools, and the model answers in the format tool_calls.py reads."""
        ...

    def render_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Apply the chat template with tools and the generation prompt, then encode.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        ...


def with_tools(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> tuple[ChatMessage, ...]:
    """The conversation with the tools in its first system message, calls and results as plain text."""
    signatures = "\n".join(json.dumps(tool.signature(), ensure_ascii=False) for tool in tools)
    intro = _INTRO.format(signatures=signatures)
    plain = tuple(_plain(message) for message in messages)
    if plain and plain[0].role == "system":
        return replace(plain[0], content=f"{plain[0].content}\n\n{intro}"), *plain[1:]
    return ChatMessage(role="system", content=intro), *plain


def _plain(message: ChatMessage) -> ChatMessage:
    if message.role in ("tool", "function"):
        return ChatMessage(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    return ChatMessage(role=message.role, content="\n".join(filter(None, [message.content, *calls])))
