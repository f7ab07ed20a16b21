"""The chat template: messages to prompt text, rendered by jinja2 the way the model's authors tested it.

The environment equals the one transformers renders in (trim_blocks, lstrip_blocks, loop controls, an immutable
sandbox, ``raise_exception``, ``strftime_now``, a ``tojson`` that does not escape HTML, a ``{% generation %}`` block
that only marks text), so a template gives the same prompt here and there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import InvalidRequest
from gateway.ports import ChatMessage
from gateway.text.tool_prompt import Tool

__all__ = ["ChatTemplate"]

_MAX_REASON_CHARS = 200


class ChatTemplate:
    """One compiled template with the model's special tokens as variables.

    Args:
        source: jinja2 source text.
        special_tokens: e.g. ``{"bos_token": "<s>"}``; visible to the template by these names.

    Attributes:
        writes_tools: the template writes tools into the prompt, in the format of Hermes and Qwen.

    Raises:
        ValueError: the source does not compile.
    """

    def __init__(self, source: str, *, special_tokens: dict[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        # A template that writes tools in the format tool_calls.py reads is better than our own text: it was trained on.
        self.writes_tools = "tools" in source and "<tool_call>" in source
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True, tools: Sequence[Tool] = ()
    ) -> str:
        """Prompt text for ``messages``, with ``tools`` if the template knows them.

        Raises:
            InvalidRequest: the template refuses them (wrong role order, say) or fails on them.
        """
        try:
            return self._template.render(
                messages=[_template_message(message) for message in messages],
                tools=[tool.signature() for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {reason}", code="invalid_messages", param="messages"
            ) from error


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: a training-time mark around assistant text; here just its text."""

    tags = {"generation"}  # noqa: RUF012 # the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inner_text"), [], [], body).set_lineno(line)

    def _inner_text(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as the templates expect


def _template_message(message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields
