"""The events of a streamed chat or completions answer, in the order of the stream contract (docs/api.md, Streams)."""

from __future__ import annotations

from collections.abc import Collection

import orjson

from gateway.errors import GatewayError
from gateway.openai.answer_plan import AnswerPlan, Tally
from gateway.openai.errors import error_body
from gateway.openai.framing import DONE, event
from gateway.openai.responses import StreamChunks
from gateway.ports import GenerationDelta, GenerationFinished, PromptScored, TextCodec

__all__ = ["ChunkStream"]


class ChunkStream:
    """Turns engine events into bytes; see ``StreamFormat`` in gateway/http/stream.py."""

    def __init__(self, plan: AnswerPlan, codec: TextCodec) -> None:
        assert plan.shared.stream is not None
        self._plan = plan
        self._options = plan.shared.stream
        self._tally = Tally(plan, codec)
        self._chunks = StreamChunks(plan.head, has_usage=self._options.include_usage)
        self._is_continuous = self._options.include_usage and self._options.continuous_usage
        # Most streams are text alone, and all their chunks but for the text are equal: framed once, by the same code.
        is_plain = not self._is_continuous and all(choice.is_plain for choice in self._tally.choices)
        self._frames = [self._text_frame(index) for index in range(len(plan.choices))] if is_plain else None

    def opening(self) -> bytes:
        """Chat: the role chunks of all choices, in index order. Completions: echoed prompts without logprobs."""
        if self._plan.head.endpoint == "chat":
            return b"".join(event(self._role(index)) for index in range(len(self._plan.choices)))
        openings = [(index, pieces.opening()) for index, pieces in enumerate(self._tally.choices)]
        return b"".join(event(self._chunks.content(i, piece)) for i, piece in openings if piece.text)

    def next_events(self, index: int, engine_event: PromptScored | GenerationDelta | GenerationFinished) -> bytes:
        """What the client gets for one event of choice ``index``; b"" while text is held back."""
        if self._frames is not None and isinstance(engine_event, GenerationDelta):
            text = self._tally.choices[index].plain_text(engine_event)
            before, after = self._frames[index]
            return b"%b%b%b" % (before, orjson.dumps(text), after) if text else b""
        written = []
        for piece in self._tally.choices[index].pieces(engine_event):
            usage = self._tally.usage_so_far() if self._is_continuous else None
            written.append(event(self._chunks.content(index, piece, usage=usage)))
        if isinstance(engine_event, GenerationFinished):
            self._tally.finished[index] = engine_event
            reason = self._tally.choices[index].finish_reason(engine_event.finish_reason)
            usage = self._tally.usage_so_far() if self._is_continuous else None
            written.append(event(self._chunks.finish(index, reason, engine_event.matched_stop, usage=usage)))
        return b"".join(written)

    def closing(self) -> bytes:
        """The usage chunk, if asked for, and the end."""
        if not self._options.include_usage:
            return DONE
        return event(self._chunks.usage(self._tally.usage_so_far(), metrics=self._tally.metrics())) + DONE

    @property
    def finished(self) -> Collection[GenerationFinished]:
        """How the choices ended that have ended."""
        return self._tally.finished.values()

    def failed(self, error: GatewayError) -> bytes:
        """One nested error event, and the end."""
        return event(error_body(error)) + DONE

    def _text_frame(self, index: int) -> tuple[bytes, bytes]:
        before, after = self._chunks.text_frame(index)
        begin, end = event(b"|").split(b"|")
        return begin + before, after + end

    def _role(self, index: int) -> bytes:
        with_ids = self._plan.shared.return_token_ids and index == 0
        return self._chunks.role(index, prompt_ids=self._plan.choices[0].prompt_ids if with_ids else None)
