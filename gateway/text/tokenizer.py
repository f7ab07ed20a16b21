"""The target's tokenizer: text to token ids and back, with the exact bytes of every id.

Loads ``tokenizer.json`` of a Hugging Face model directory through the `tokenizers` library, so neither transformers
nor torch is needed. Two vocabularies are understood, told apart by the decoder in the file: byte-level BPE (GPT-2,
Llama 3, Qwen, SmolLM2), where every character of a token stands for one byte, and SentencePiece with byte fallback
(Llama 2, Mistral), where ``▁`` is a space and ``<0x0A>`` is one byte.

Decoding is always "join the bytes, then decode UTF-8 with replacement"; that is what makes the incremental and the
one-shot text equal by construction. It differs from the library in two corners: a leading SentencePiece space is kept,
and an invalid byte run gives one U+FFFD per maximal subpart (Unicode's recommendation) also with byte fallback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from gateway.ports import ChatMessage
from gateway.text.chat_template import ChatTemplate
from gateway.text.tool_prompt import Tool
from wire.model_files import eos_ids, read_json, special_tokens

__all__ = ["ModelTextCodec", "load_text_codec"]

VocabKind = Literal["byte_level", "byte_fallback"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelTextCodec:
    """A ``TextCodec`` over one tokenizer and one chat template.

    Args:
        tokenizer: the loaded tokenizer; encoding takes no lock and may run in any thread.
        template: the chat template, or None for a base model (``render_chat`` then uses a plain "role: text" layout).
        eos_ids: all ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, *, template: ChatTemplate | None, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._eos_ids = frozenset(eos_ids)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        kind = _vocab_kind(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes_by_id = _bytes_table(tokenizer, kind, literal={i: token.content for i, token in added.items()})

    @property
    def eos_ids(self) -> frozenset[int]:
        """All ids that end an answer."""
        return self._eos_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are left out of the text unless the client asks for them."""
        return self._special_ids

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included; the model's own vocabulary may be padded wider."""
        return len(self._bytes_by_id)

    @property
    def has_template(self) -> bool:
        """False for a base model."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens written in it are recognised."""
        # The batch call is the one that releases the GIL: for a prompt of 2 MB, encode() stopped the event loop for
        # 2.0 s from its worker thread and took 2.0 s, this one for 9 ms and took 0.7 s (tokenizers 0.23, 2 cores).
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of all ids at once."""
        skipped = self._special_ids if skip_special_tokens else frozenset[int]()
        joined = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this id stands for; empty for an id of the padded part of the vocabulary."""
        if 0 <= token_id < len(self._bytes_by_id):
            return self._bytes_by_id[token_id]
        return b""

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Apply the chat template, then encode. The template writes its own BOS, so none is added.

        Raises:
            InvalidRequest: the template refuses the messages.
        """
        if self._template is None:
            lines = [f"{message.role}: {message.content}\n" for message in messages]
            text = "".join(lines) + ("assistant:" if add_generation_prompt else "")
            return self.encode(text, add_special_tokens=True)
        return self.encode(self._template.render(messages, add_generation_prompt=add_generation_prompt))

    @property
    def writes_tools(self) -> bool:
        """See ToolRenderer."""
        return self._template is not None and self._template.writes_tools

    def render_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """See ToolRenderer; only for a codec that ``writes_tools``."""
        assert self._template is not None
        return self.encode(self._template.render(messages, tools=tools))


def load_text_codec(model_dir: Path) -> ModelTextCodec:
    """Read tokenizer, chat template and EOS ids of a Hugging Face model directory.

    Raises:
        FileNotFoundError: there is no tokenizer.json.
        ValueError: the tokenizer's decoder is of a kind whose bytes are not known exactly, or the template is broken.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; a fast tokenizer is needed")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    source = _template_source(model_dir)
    template = None if source is None else ChatTemplate(source, special_tokens=special_tokens(model_dir))
    return ModelTextCodec(tokenizer, template=template, eos_ids=eos_ids(model_dir, tokenizer.token_to_id))


def _template_source(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = read_json(model_dir / "tokenizer_config.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _vocab_kind(decoder: dict[str, Any] | None) -> VocabKind:
    names = _decoder_types(decoder)
    if "ByteLevel" in names:
        return "byte_level"
    if "ByteFallback" in names or "Metaspace" in names:
        return "byte_fallback"
    raise ValueError(f"the tokenizer's decoder {sorted(names)} is neither byte-level nor byte-fallback")


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    nested = [_decoder_types(inner) for inner in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*nested)


def _bytes_table(tokenizer: Tokenizer, kind: VocabKind, literal: dict[int, str]) -> list[bytes]:
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    byte_by_char = _byte_by_char()
    for token, token_id in vocab.items():
        if token_id in literal:
            table[token_id] = literal[token_id].encode("utf-8")
        elif kind == "byte_level":
            table[token_id] = _byte_level_bytes(token, byte_by_char)
        else:
            table[token_id] = _byte_fallback_bytes(token)
    return table


def _byte_level_bytes(token: str, byte_by_char: dict[str, int]) -> bytes:
    values = [byte_by_char.get(char) for char in token]
    # A token with a character outside the byte alphabet is text as it stands (what the library's decoder does too).
    return token.encode("utf-8") if None in values else bytes(value for value in values if value is not None)


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode("utf-8")


def _byte_by_char() -> dict[str, int]:
    # GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = [value for value in range(256) if value not in set(printable)]
    table.update({chr(0x100 + offset): value for offset, value in enumerate(others)})
    return table
