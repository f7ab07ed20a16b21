"""Turns conversations into token ids exactly as the target's own chat template would.

Pieces are encoded separately and concatenated: every piece begins or ends at a special token, where the tokenizer
splits anyway, so the ids equal those of the whole text. That lets a generated answer be kept as ids, never re-encoded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

__all__ = [
    "DEFAULT_SYSTEM",
    "IM_END",
    "IM_START",
    "ByteTokenizer",
    "FileTokenizer",
    "Tokenizer",
    "opening",
    "user_turn",
]


class Tokenizer(Protocol):
    """What the tools need of a tokenizer; ``end_id`` is the id of ``<|im_end|>``, which ends every answer."""

    end_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens in it become their single ids; nothing is added."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of every text, in parallel where the tokenizer can."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        ...


class FileTokenizer:
    """A ``tokenizer.json`` of the target."""

    def __init__(self, path: Path) -> None:
        # Lazy: smoke runs and the pure tests do without the tokenizers package.
        from tokenizers import Tokenizer as RustTokenizer

        self._tokenizer = RustTokenizer.from_file(str(path))
        end_id = self._tokenizer.token_to_id(IM_END)
        if end_id is None:
            raise ValueError(f"{path} has no {IM_END}")
        self.end_id: int = end_id

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


class ByteTokenizer:
    """Bytes shifted by three, for smoke runs and tests: 1 is ``<|im_start|>``, 2 is ``<|im_end|>``."""

    end_id = 2
    vocab_size = 259
    _specials: ClassVar[dict[str, int]] = {IM_START: 1, IM_END: 2}

    def encode(self, text: str) -> list[int]:
        """See ``Tokenizer``."""
        ids: list[int] = []
        for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
            ids += [self._specials[piece]] if piece in self._specials else [byte + 3 for byte in piece.encode()]
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """See ``Tokenizer``."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Tokenizer``."""
        return bytes(i - 3 for i in ids if 3 <= i < self.vocab_size).decode(errors="replace")


def opening(system: str | None) -> str:
    """The system block every conversation starts with; ``None`` gives the template's default."""
    return f"{IM_START}system\n{DEFAULT_SYSTEM if system is None else system}{IM_END}\n"


def user_turn(text: str) -> str:
    """A user message followed by the header that asks for the answer."""
    return f"{IM_START}user\n{text}{IM_END}\n{IM_START}assistant\n"
