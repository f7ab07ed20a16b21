"""One choice's engine events as endpoint-shaped pieces: text, tool calls, and the logprobs and ids of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.openai.reasoning import ReasoningUse
from gateway.openai.responses import AnswerFinishReason, Endpoint, Piece
from gateway.ports import (
    FinishReason,
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    PromptScored,
    TextCodec,
)
from gateway.text.reasoning import ReasoningPiece, ReasoningSplitter, ReasoningTokens
from gateway.text.token_groups import TokenGroups
from gateway.text.tool_calls import ToolCallParser, ToolDelta

__all__ = ["ChoicePieces", "PieceOptions", "join_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceOptions:
    """How an answer is cut: see the fields of the same names in ``SharedFields``."""

    stream_interval: int = 0
    parses_tools: bool = False
    returns_token_ids: bool = False
    reasoning: ReasoningUse | None = None


class ChoicePieces:
    """Formats the events of one choice, in order.

    Args:
        request: what the engine was asked.
        echo_text: completions with echo: the prompt's text, which comes first. "" otherwise.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        request: GenerationRequest,
        codec: TextCodec,
        *,
        echo_text: str = "",
        options: PieceOptions | None = None,
    ) -> None:
        options = options or PieceOptions()
        self._is_chat = endpoint == "chat"
        self._request = request
        self._codec = codec
        self._echo_text = echo_text
        self._offsets = self._new_offsets(start=len(echo_text))
        self._groups = TokenGroups(options.stream_interval, codec)
        self._tools = ToolCallParser() if options.parses_tools else None
        self._returns_token_ids = options.returns_token_ids
        self._shows_reasoning = options.reasoning is None or options.reasoning.is_shown
        self._splitter, self._reasoning_tokens = self._reasoning_parts(options.reasoning)
        self.num_tokens = 0

    def opening(self) -> Piece:
        """What comes before the first event: the echoed prompt, unless its logprobs come with it later."""
        return Piece(text="" if self._request.score_prompt else self._echo_text)

    def pieces(self, event: PromptScored | GenerationDelta | GenerationFinished) -> list[Piece]:
        """What a client gets for one event; nothing while text is held back. The finish releases the rest."""
        if isinstance(event, PromptScored):
            ids = self._request.prompt_ids
            scored = completion_logprobs(event.logprobs, ids, self._codec, self._new_offsets(start=0))
            return [Piece(text=self._echo_text, logprobs=scored)]
        if isinstance(event, GenerationDelta):
            pieces = [self._piece(delta) for delta in self._groups.push(event)]
        else:
            pieces = [self._piece(delta) for delta in self._groups.finish()]
            pieces += self._rest()
        return [piece for piece in pieces if not piece.is_empty]

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the model's thoughts, markers included, among ``num_tokens``."""
        return 0 if self._reasoning_tokens is None else self._reasoning_tokens.num_tokens

    @property
    def is_plain(self) -> bool:
        """Every delta is one piece of its own text: nothing is regrouped, split, or told beside the text."""
        return not (
            self._groups.size
            or self._tools is not None
            or self._splitter is not None
            or self._returns_token_ids
            or self._request.num_logprobs is not None
        )

    def plain_text(self, delta: GenerationDelta) -> str:
        """The short way of ``pieces`` for a choice that ``is_plain``."""
        self.num_tokens += len(delta.token_ids)
        return delta.text

    def finish_reason(self, reason: FinishReason) -> AnswerFinishReason:
        """The reason the client gets: an answer that called tools ended for that."""
        has_calls = self._tools is not None and self._tools.num_calls > 0
        return "tool_calls" if has_calls and reason == "stop" else reason

    def _piece(self, delta: GenerationDelta) -> Piece:
        self.num_tokens += len(delta.token_ids)
        split = ReasoningPiece(content=delta.text)
        if self._splitter is not None and self._reasoning_tokens is not None:
            self._reasoning_tokens.push(delta.token_ids)
            split = self._splitter.push(delta.text)
        text, tool_deltas = self._called(split.content)
        return Piece(
            text=text,
            reasoning=split.reasoning if self._shows_reasoning else "",
            logprobs=self._logprobs(delta),
            token_ids=delta.token_ids if self._returns_token_ids else (),
            tool_deltas=tool_deltas,
        )

    def _rest(self) -> list[Piece]:
        """What the parsers still hold when the answer ends."""
        rest = ReasoningPiece() if self._splitter is None else self._splitter.finish()
        text, tool_deltas = self._called(rest.content)
        pieces = [Piece(text=text, reasoning=rest.reasoning if self._shows_reasoning else "", tool_deltas=tool_deltas)]
        if self._tools is not None:
            last = self._tools.finish()
            pieces.append(Piece(text=last.text, tool_deltas=last.deltas))
        return pieces

    def _called(self, text: str) -> tuple[str, tuple[ToolDelta, ...]]:
        """Content without the tool calls in it, and these."""
        if self._tools is None:
            return text, ()
        released = self._tools.push(text)
        return released.text, released.deltas

    def _reasoning_parts(self, use: ReasoningUse | None) -> tuple[ReasoningSplitter | None, ReasoningTokens | None]:
        if use is None:
            return None, None
        skipped = self._codec.special_ids - use.marker_ids if self._request.skip_special_tokens else frozenset[int]()
        tokens = ReasoningTokens(use.markers, self._codec, is_open=use.is_open, skipped_ids=skipped)
        return ReasoningSplitter(use.markers, is_open=use.is_open), tokens

    def _logprobs(self, delta: GenerationDelta) -> dict[str, Any] | None:
        if self._request.num_logprobs is None or not delta.logprobs:
            return None
        if self._is_chat:
            return chat_logprobs(delta.logprobs, self._codec)
        return completion_logprobs(delta.logprobs, delta.token_ids, self._codec, self._offsets)

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
