"""The parts of SGLang's /generate reply that are read, as typed records. Text is never read, only ids."""

from __future__ import annotations

from typing import Any

import msgspec

from verifier.sglang.plugin.orders import Drawn

__all__ = ["Answer", "FinishReason", "Listed", "MetaInfo", "read_answers", "read_chunk"]

# [log-probability, token id, None]; the first input position has no log-probability.
Listed = tuple[float | None, int, Any]


class FinishReason(msgspec.Struct, frozen=True):
    """Why generation ended: "length", "stop", or "abort" with a message and maybe an HTTP status."""

    type: str
    message: str | None = None
    status_code: int | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    """The numbers beside the ids. Lists hold one entry per position; see ``indexing`` for which.

    breakeven: the plugin's word on each output token: 1 or a ``Drawn`` where it was drawn as ordered.
    """

    id: str = ""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    e2e_latency: float = 0.0
    input_token_logprobs: list[Listed] | None = None
    input_top_logprobs: list[list[Listed] | None] | None = None
    output_token_logprobs: list[Listed] | None = None
    output_top_logprobs: list[list[Listed] | None] | None = None
    hidden_states: msgspec.Raw = msgspec.Raw(b"")
    breakeven: list[Drawn | int | None] | None = None


class Answer(msgspec.Struct, frozen=True):
    """One request's reply, or one chunk of its stream."""

    meta_info: MetaInfo
    output_ids: list[int] = []


class _StreamError(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    meta_info: MetaInfo | None = None
    output_ids: list[int] = []
    error: _StreamError | None = None


_MANY = msgspec.json.Decoder(list[Answer])
_CHUNK = msgspec.json.Decoder(_Chunk)


def read_answers(body: bytes) -> list[Answer]:
    """The reply to a batch request.

    Raises:
        msgspec.MsgspecError: it is not what SGLang answers.
    """
    return _MANY.decode(body)


def read_chunk(data: bytes) -> Answer | tuple[int, str]:
    """One ``data:`` event of a stream: an answer so far, or (status, message) of an error.

    Raises:
        msgspec.MsgspecError: it is neither.
    """
    chunk = _CHUNK.decode(data)
    if chunk.error is not None:
        return chunk.error.code or 500, chunk.error.message
    if chunk.meta_info is None:
        raise msgspec.ValidationError("a chunk with neither meta_info nor error")
    return Answer(meta_info=chunk.meta_info, output_ids=chunk.output_ids)
