"""All choices of one chat or completions response, and the account of what they produced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gateway.openai.choice_pieces import ChoicePieces, PieceOptions, join_logprobs
from gateway.openai.reasoning import ReasoningUse
from gateway.openai.requests import SharedFields
from gateway.openai.responses import ChoiceResult, Piece, ResponseHead
from gateway.openai.usage import speculation_fields, usage_fields
from gateway.ports import GenerationFinished, GenerationRequest, TextCodec
from gateway.text.tool_calls import ToolDelta

__all__ = ["AnswerPlan", "Collected", "Tally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """All choices of one response.

    Fields:
        choices: prompt-major: the choices of prompt 0, then those of prompt 1, ...
        echo_texts: [len(choices)] the prompt's text for completions with echo, else "".
        reasoning: how the model's thoughts are told apart; None = not at all.
    """

    head: ResponseHead
    shared: SharedFields
    choices: tuple[GenerationRequest, ...]
    echo_texts: tuple[str, ...]
    reasoning: ReasoningUse | None = None


class Tally:
    """Formats the events of all choices and keeps what usage needs."""

    def __init__(self, plan: AnswerPlan, codec: TextCodec) -> None:
        self._plan = plan
        shared = plan.shared
        options = PieceOptions(
            stream_interval=shared.stream_interval if shared.stream is not None else 0,
            parses_tools=shared.parses_tools,
            returns_token_ids=shared.return_token_ids,
            reasoning=plan.reasoning,
        )
        self.choices = [
            ChoicePieces(plan.head.endpoint, choice, codec, echo_text=echo_text, options=options)
            for choice, echo_text in zip(plan.choices, plan.echo_texts, strict=True)
        ]
        self.finished: dict[int, GenerationFinished] = {}

    def usage_so_far(self) -> dict[str, Any]:
        """Usage from the tokens seen; exact once all choices have finished."""
        # A prompt's first choice stands for it; the others share its tokens.
        firsts = range(0, len(self._plan.choices), self._plan.shared.num_choices)
        counted = [
            self.finished[index].usage.completion_tokens if index in self.finished else pieces.num_tokens
            for index, pieces in enumerate(self.choices)
        ]
        return usage_fields(
            prompt_tokens=sum(len(self._plan.choices[index].prompt_ids) for index in firsts),
            completion_tokens=sum(counted),
            cached_tokens=sum(self.finished[i].usage.cached_tokens for i in firsts if i in self.finished),
            reasoning_tokens=self._num_reasoning_tokens(),
        )

    def _num_reasoning_tokens(self) -> int | None:
        if self._plan.reasoning is None:
            return None
        return sum(pieces.num_reasoning_tokens for pieces in self.choices)

    def metrics(self) -> dict[str, Any] | None:
        """Speculation numbers, if the client asked for them."""
        return speculation_fields(self.finished.values()) if self._plan.shared.return_spec_stats else None


class Collected:
    """The pieces of one choice, joined."""

    def __init__(self, opening: Piece) -> None:
        self._texts = [opening.text]
        self._thoughts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._calls: list[ToolDelta] = []

    def add(self, piece: Piece) -> None:
        """The next piece."""
        self._texts.append(piece.text)
        self._thoughts.append(piece.reasoning)
        self._token_ids += piece.token_ids
        if piece.logprobs is not None:
            self._logprobs.append(piece.logprobs)
        for delta in piece.tool_deltas:
            if delta.call_id:
                self._calls.append(delta)
            else:
                whole = self._calls[-1].arguments + delta.arguments
                self._calls[-1] = replace(self._calls[-1], arguments=whole)

    def result(self, index: int, tally: Tally, request: GenerationRequest, *, with_ids: bool) -> ChoiceResult:
        """The finished choice."""
        finished = tally.finished[index]
        return ChoiceResult(
            index=index,
            text="".join(self._texts),
            reasoning="".join(self._thoughts),
            finish_reason=tally.choices[index].finish_reason(finished.finish_reason),
            matched_stop=finished.matched_stop,
            logprobs=join_logprobs(self._logprobs),
            tool_calls=tuple(self._calls),
            token_ids=tuple(self._token_ids) if with_ids else None,
            prompt_ids=request.prompt_ids if with_ids else None,
        )
