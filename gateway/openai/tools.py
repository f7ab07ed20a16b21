"""``tools`` and ``tool_choice``: which functions the model may call, and whether it has to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.openai.constraints import MAX_GRAMMAR_CHARS
from gateway.openai.fields import FieldReader, describe
from gateway.text.tool_prompt import Tool
from wire.sampling import Grammar

__all__ = ["TOOL_FIELDS", "ToolUse", "parse_tool_use"]

TOOL_FIELDS = frozenset({"parallel_tool_calls", "tool_choice", "tools"})

_MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request.

    Fields:
        tools: all of them; the prompt shows all, also when one is named.
        forced: names of which one must be called; empty = the model decides.
        is_parallel: a forced answer may hold several calls.
    """

    tools: tuple[Tool, ...]
    forced: tuple[str, ...] = ()
    is_parallel: bool = False

    def grammar(self) -> Grammar | None:
        """What an answer with a forced call looks like; None if nothing is forced."""
        if not self.forced:
            return None
        called = [tool for tool in self.tools if tool.name in self.forced]
        rules = [f"call_{index}: %json {_call_schema(tool)}" for index, tool in enumerate(called)]
        names = " | ".join(f"call_{index}" for index in range(len(called)))
        repeat = r' ("\n" call)*' if self.is_parallel else ""
        lines = [f"start: call{repeat}", f'call: "<tool_call>\\n" ({names}) "\\n</tool_call>"', *rules]
        return Grammar(kind="lark", text="\n".join(lines))


def parse_tool_use(reader: FieldReader, *, is_flat: bool = False) -> ToolUse | None:
    """The tools of a request; None if it has none, or forbids their use.

    Args:
        is_flat: the Responses API's spelling, where a function's fields stand beside its type.

    Raises:
        InvalidRequest: names the field at fault.
    """
    value = reader.get("tools")
    choice = reader.get("tool_choice")
    is_parallel = reader.boolean("parallel_tool_calls")
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            reader.fail("tool_choice", "needs tools")
        return None
    if not isinstance(value, list):
        reader.fail("tools", f"must be an array, not {describe(value)}", code="invalid_type")
    if len(value) > _MAX_TOOLS:
        reader.fail("tools", f"must have at most {_MAX_TOOLS} tools, not {len(value)}")
    tools = tuple(_tool(entry, reader, f"tools[{index}]", is_flat=is_flat) for index, entry in enumerate(value))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        reader.fail("tools", "has two functions of the same name")
    forced = _forced(reader, choice, names, is_flat=is_flat)
    if choice == "none":
        return None
    use = ToolUse(tools=tools, forced=forced, is_parallel=is_parallel)
    grammar = use.grammar()
    if grammar is not None and len(grammar.text) > MAX_GRAMMAR_CHARS:
        reader.fail("tools", f"must have schemas of at most {MAX_GRAMMAR_CHARS} characters if a call is forced")
    return use


def _tool(entry: Any, request: FieldReader, name: str, *, is_flat: bool) -> Tool:
    if not isinstance(entry, dict):
        request.fail(name, f"must be an object, not {describe(entry)}", code="invalid_type")
    reader = FieldReader(entry, request.path_of(name))
    if reader.require("type") != "function":
        reader.fail("type", "must be function: other kinds of tools are not supported", code="unsupported_value")
    function = reader if is_flat else reader.child("function")
    if function is None:
        reader.fail("function", "is required", code="missing_required_parameter")
    function.require("name")
    function_name = function.string("name") or ""
    if not _NAME.fullmatch(function_name):
        function.fail("name", "must be 1 to 64 letters, digits, dots, dashes and underscores")
    parameters = function.child("parameters")
    function.boolean("strict")  # checked, then ignored: a forced call always follows its schema
    return Tool(
        name=function_name,
        description=function.string("description") or "",
        parameters=_ANY_ARGUMENTS if parameters is None else dict(parameters.values),
    )


def _forced(reader: FieldReader, choice: Any, names: list[str], *, is_flat: bool) -> tuple[str, ...]:
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        return tuple(names)
    child = reader.child("tool_choice") if isinstance(choice, dict) else None
    if child is None or child.get("type") != "function":
        reader.fail("tool_choice", "must be none, auto, required or one function")
    function = child if is_flat else child.child("function")
    name = None if function is None else function.string("name")
    if name not in names:
        reader.fail("tool_choice", "must name one of the tools")
    assert name is not None
    return (name,)


def _call_schema(tool: Tool) -> str:
    arguments = tool.parameters or _ANY_ARGUMENTS
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if "$defs" in arguments:  # references inside the arguments start at the document's root
        schema["$defs"] = arguments["$defs"]
    return orjson.dumps(schema).decode("utf-8")
