"""Prompt texts to token ids, off the event loop when they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from gateway.ports import ChatMessage, TextCodec
from gateway.text.tool_prompt import Tool, ToolRenderer, with_tools

__all__ = ["message_ids", "text_prompt_ids"]

_Result = TypeVar("_Result")

# Encoding runs at about 1 MB/s or more, so this many characters stay near the 1 ms a call may hold the loop.
_MAX_INLINE_CHARS = 1000


async def message_ids(
    codec: TextCodec,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Tool] = (),
) -> tuple[int, ...]:
    """Render and encode messages; tools by the template if it can, else by our own system text.

    Raises:
        InvalidRequest: the chat template refuses them.
    """
    if tools and not (isinstance(codec, ToolRenderer) and codec.writes_tools):
        messages, tools = with_tools(messages, tools), ()
    num_chars = sum(len(message.content) for message in messages) + 16 * len(messages)
    if tools and isinstance(codec, ToolRenderer):
        renderer = codec
        return tuple(await _run(lambda: renderer.render_tools(messages, tools), num_chars))
    ids = await _run(lambda: codec.render_chat(messages, add_generation_prompt=add_generation_prompt), num_chars)
    return tuple(ids)


async def text_prompt_ids(codec: TextCodec, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Encode one text."""
    return tuple(await _run(lambda: codec.encode(text, add_special_tokens=add_special_tokens), len(text)))


async def _run(work: Callable[[], _Result], num_chars: int) -> _Result:
    return work() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(work)
