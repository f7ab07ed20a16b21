"""A TextCodec that exists before the target's files are known, and refuses work until they are."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.errors import NotReady
from gateway.ports import ChatMessage, TextCodec
from gateway.text.tool_prompt import Tool, ToolRenderer

__all__ = ["LateCodec"]


class LateCodec:
    """Delegates to the codec it is given by ``set``; before that every call raises NotReady (503 with Retry-After)."""

    def __init__(self) -> None:
        self._codec: TextCodec | None = None

    def set(self, codec: TextCodec) -> None:
        """The target's tokenizer has been loaded."""
        self._codec = codec

    def _loaded(self) -> TextCodec:
        if self._codec is None:
            raise NotReady("the model is still loading", retry_after_s=2.0)
        return self._codec

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """See TextCodec.encode."""
        return self._loaded().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See TextCodec.decode."""
        return self._loaded().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """See TextCodec.token_bytes."""
        return self._loaded().token_bytes(token_id)

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """See TextCodec.render_chat."""
        return self._loaded().render_chat(messages, add_generation_prompt=add_generation_prompt)

    @property
    def writes_tools(self) -> bool:
        """See ToolRenderer."""
        codec = self._loaded()
        return isinstance(codec, ToolRenderer) and codec.writes_tools

    def render_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """See ToolRenderer."""
        codec = self._loaded()
        assert isinstance(codec, ToolRenderer)
        return codec.render_tools(messages, tools)

    @property
    def eos_ids(self) -> frozenset[int]:
        """See TextCodec.eos_ids."""
        return self._loaded().eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """See TextCodec.special_ids."""
        return self._loaded().special_ids
