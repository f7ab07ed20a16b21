"""One choice's engine events as endpoint-shaped pieces: text, with the logprobs of the tokens behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.openai.responses import Endpoint
from gateway.ports import GenerationDelta, GenerationRequest, PromptScored, TextCodec

__all__ = ["ChoicePieces", "Piece", "join_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text of a choice and, if asked for, the logprobs of its tokens in the endpoint's own shape."""

    text: str
    logprobs: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing a client could see."""
        return not self.text and self.logprobs is None


class ChoicePieces:
    """Formats the events of one choice, in order.

    Args:
        request: what the engine was asked.
        echo_text: completions with echo: the prompt's text, which comes first. "" otherwise.
    """

    def __init__(
        self, endpoint: Endpoint, request: GenerationRequest, codec: TextCodec, *, echo_text: str = ""
    ) -> None:
        self._is_chat = endpoint == "chat"
        self._request = request
        self._codec = codec
        self._echo_text = echo_text
        self._offsets = self._new_offsets(start=len(echo_text))
        self.num_tokens = 0

    def opening(self) -> Piece:
        """What comes before the first event: the echoed prompt, unless its logprobs come with it later."""
        return Piece(text="" if self._request.score_prompt else self._echo_text)

    def piece(self, event: PromptScored | GenerationDelta) -> Piece:
        """The piece of one event; may be empty while text is held back."""
        if isinstance(event, PromptScored):
            ids = self._request.prompt_ids
            scored = completion_logprobs(event.logprobs, ids, self._codec, self._new_offsets(start=0))
            return Piece(text=self._echo_text, logprobs=scored)
        self.num_tokens += len(event.token_ids)
        if self._request.num_logprobs is None or not event.logprobs:
            return Piece(text=event.text)
        if self._is_chat:
            return Piece(text=event.text, logprobs=chat_logprobs(event.logprobs, self._codec))
        return Piece(
            text=event.text,
            logprobs=completion_logprobs(event.logprobs, event.token_ids, self._codec, self._offsets),
        )

    def _new_offsets(self, *, start: int) -> TextOffsets:
        return TextOffsets(self._codec, skip_special_tokens=self._request.skip_special_tokens, start=start)


def join_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One logprobs object from those of consecutive pieces: the lists are joined, all else is equal in every part."""
    if not parts:
        return None
    joined: dict[str, Any] = {key: [] if isinstance(value, list) else value for key, value in parts[0].items()}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                joined[key] += value
    return joined
