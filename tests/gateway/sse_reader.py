"""Splits a recorded event stream the strict way: every event is ``data: `` + one line + a blank line."""

from __future__ import annotations

import json
from typing import Any


def events(raw: bytes) -> list[Any]:
    """All events in order; JSON decoded, "[DONE]" and comments as text."""
    blocks = raw.decode("utf-8").split("\n\n")
    assert blocks.pop() == "", "the stream must end with a blank line"
    return [_event(block) for block in blocks]


def chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON events; the stream must end with [DONE] and hold nothing else."""
    found = events(raw)
    assert found.pop() == "[DONE]"
    assert all(isinstance(chunk, dict) for chunk in found)
    return found


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    """The joined text of one choice."""
    texts = []
    for chunk in found:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                texts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(texts)


def _event(block: str) -> Any:
    if block.startswith(":"):
        return block
    assert block.startswith("data: "), block
    assert "\n" not in block
    data = block.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)
