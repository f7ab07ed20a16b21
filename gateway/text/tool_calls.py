"""Finds tool calls in the text of an answer, as it streams.

The format is the one of Hermes, Qwen and our own tool prompt: ``<tool_call>`` + one JSON object with "name" and
"arguments" + ``</tool_call>``. Text outside is content. The start tag is held back like a stop string, so no part of it
ever reaches a client; arguments go out as they come, once the name before them is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from gateway.text.held_text import held_len

__all__ = ["ToolCallParser", "ToolDelta", "ToolPiece"]

_BEGIN, _END = "<tool_call>", "</tool_call>"
# A call whose name comes first, up to its arguments: the only part of the body that has to be complete to start.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """A part of one call. ``call_id`` and ``name`` are set in its first part only; arguments concatenate to JSON."""

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPiece:
    """What one push released."""

    text: str = ""
    deltas: tuple[ToolDelta, ...] = ()


class ToolCallParser:
    """Splits one answer into content and calls; push its text in order, then ``finish``."""

    def __init__(self) -> None:
        self._buffer = ""  # not released yet: content, or the body of the open call
        self._is_inside = False
        self._values: _ValueScanner | None = None  # set once the open call has begun
        self._is_after_call = False
        self.num_calls = 0

    def push(self, text: str) -> ToolPiece:
        """Feed text; get what may be sent."""
        self._buffer += text
        content: list[str] = []
        deltas: list[ToolDelta] = []
        while self._step(content, deltas):
            pass
        return ToolPiece(text="".join(content), deltas=tuple(deltas))

    def finish(self) -> ToolPiece:
        """The answer ends here. A call that never began is content after all; a cut one keeps what was sent."""
        rest, self._buffer = self._buffer, ""
        if not self._is_inside:
            return ToolPiece(text="" if self._is_after_call and not rest.strip() else rest)
        if self._values is not None:
            return ToolPiece()
        return self._whole_call(rest) or ToolPiece(text=_BEGIN + rest)

    def _step(self, content: list[str], deltas: list[ToolDelta]) -> bool:
        """Consume what can be consumed; True if another step may find more."""
        if not self._is_inside:
            return self._outside(content)
        if self._values is None and not self._begin(content, deltas):
            return False
        if self._values is not None:
            self._arguments(deltas)
        return self._close()

    def _outside(self, content: list[str]) -> bool:
        begin = self._buffer.find(_BEGIN)
        num_held = held_len(self._buffer, _BEGIN)
        end = begin if begin >= 0 else len(self._buffer) - num_held
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._is_after_call:
            # The line breaks between two calls, and after the last, are layout.
            stripped = text.lstrip()
            if not stripped and begin < 0:
                self._buffer = text + self._buffer
                return False
            self._is_after_call = not stripped
            text = stripped and text
        if text:
            content.append(text)
        if begin < 0:
            return False
        self._buffer = self._buffer[len(_BEGIN) :]
        self._is_inside = True
        return True

    def _begin(self, content: list[str], deltas: list[ToolDelta]) -> bool:
        head = _HEAD.match(self._buffer)
        end = self._buffer.find(_END)
        if head is not None and (end < 0 or head.end() <= end):
            name = json.loads(head[1], strict=False)
            self._buffer = self._buffer[head.end() :]
            self._values = _ValueScanner()
            deltas.append(self._first_delta(name, ""))
            return True
        if end < 0:
            return False
        body, self._buffer = self._buffer[:end], self._buffer[end:]
        piece = self._whole_call(body) or ToolPiece(text=f"{_BEGIN}{body}{_END}")
        content.append(piece.text)
        deltas.extend(piece.deltas)
        return True

    def _whole_call(self, body: str) -> ToolPiece | None:
        """A call whose fields come in another order; None if it is no call."""
        try:
            call: Any = json.loads(body, strict=False)
        except ValueError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return ToolPiece(deltas=(self._first_delta(call["name"], text),))

    def _first_delta(self, name: str, arguments: str) -> ToolDelta:
        self.num_calls += 1
        return ToolDelta(index=self.num_calls - 1, call_id=f"call_{uuid4().hex[:24]}", name=name, arguments=arguments)

    def _arguments(self, deltas: list[ToolDelta]) -> None:
        assert self._values is not None
        num_taken = self._values.take(self._buffer)
        if num_taken:
            deltas.append(ToolDelta(index=self.num_calls - 1, arguments=self._buffer[:num_taken]))
            self._buffer = self._buffer[num_taken:]

    def _close(self) -> bool:
        end = self._buffer.find(_END)
        if end < 0:
            return False
        self._buffer = self._buffer[end + len(_END) :]
        self._is_inside, self._values, self._is_after_call = False, None, True
        return True


class _ValueScanner:
    """Finds the end of one JSON value without keeping it."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_done = False

    def take(self, text: str) -> int:
        """How many characters of ``text`` still belong to the value."""
        for offset, char in enumerate(text):
            if self._is_done:
                return offset
            if self._is_string:
                self._in_string(char)
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth < 0:  # the end of the call: the value was a bare word or number
                    self._is_done = True
                    return offset
                self._is_done = self._depth == 0
        return len(text)

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
            self._is_done = self._depth == 0
