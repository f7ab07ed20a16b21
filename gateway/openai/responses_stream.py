"""The typed events of a streamed response, numbered from 0. The whole answer is the same events without the bytes.

An item is announced, filled by deltas, and closed before the next begins; the last event repeats the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from uuid import uuid4

import orjson

from gateway.errors import GatewayError
from gateway.openai.choice_pieces import ChoicePieces, PieceOptions
from gateway.openai.errors import error_fields
from gateway.openai.framing import DONE, named_event
from gateway.openai.reasoning import ReasoningUse
from gateway.openai.responses import Piece
from gateway.openai.responses_object import FunctionCallItem, Item, MessageItem, ReasoningItem, ResponseObject, Status
from gateway.ports import GenerationDelta, GenerationFinished, GenerationRequest, PromptScored, TextCodec
from gateway.text.tool_calls import ToolDelta

__all__ = ["ResponsesStream"]


class ResponsesStream:
    """Turns engine events into bytes; see ``StreamFormat`` in gateway/http/stream.py.

    Args:
        response: filled as the events come; whole after the finish.
        clock: Unix seconds.
        reasoning: how the model's thoughts are told apart; None = not at all.
    """

    def __init__(
        self,
        response: ResponseObject,
        generation: GenerationRequest,
        codec: TextCodec,
        *,
        clock: Callable[[], float],
        reasoning: ReasoningUse | None = None,
    ) -> None:
        shared = response.request.shared
        self.response = response
        interval = shared.stream_interval if shared.stream is not None else 0
        if shared.num_logprobs is not None and shared.parses_tools:
            interval = 1  # so that every token, and its logprob, is text or part of a call
        self._pieces = ChoicePieces(
            "chat",
            generation,
            codec,
            options=PieceOptions(
                stream_interval=interval,
                parses_tools=shared.parses_tools,
                reasoning=reasoning,
            ),
        )
        self._clock = clock
        self._open: Item | None = None
        self._sequence_number = 0
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still held back
        self._num_logprobs = 0

    def opening(self) -> bytes:
        """The response exists and runs."""
        created = self._whole("response.created")
        self.response.status = "in_progress"
        return created + self._whole("response.in_progress")

    def next_events(self, index: int, engine_event: PromptScored | GenerationDelta | GenerationFinished) -> bytes:
        """The events of one engine event; the finish closes the open item. A response has one choice, ``index`` 0."""
        assert index == 0
        written = [self._piece(piece) for piece in self._pieces.pieces(engine_event)]
        if isinstance(engine_event, GenerationFinished):
            self.response.reasoning_tokens = self._pieces.num_reasoning_tokens
            if not self.response.items:
                written.append(self._open_message())  # an empty answer is still an answer
            written.append(self._close("incomplete" if engine_event.finish_reason == "length" else "completed"))
            self.response.finish(engine_event, now_s=int(self._clock()))
        return b"".join(written)

    def closing(self) -> bytes:
        """The whole response, and the end."""
        return self._whole(f"response.{self.response.status}") + DONE

    @property
    def finished(self) -> Collection[GenerationFinished]:
        """How the choice ended, if it has."""
        return () if self.response.finished is None else (self.response.finished,)

    def failed(self, error: GatewayError) -> bytes:
        """An error event, the failed response, and the end."""
        self.response.status, self.response.error = "failed", error
        return self._event("error", error=error_fields(error)) + self._whole("response.failed") + DONE

    def _piece(self, piece: Piece) -> bytes:
        self._note_logprobs(piece)
        written = [self._thought(piece.reasoning)] if piece.reasoning else []
        if piece.text:
            written.append(self._text(piece.text))
        written += [self._tool(delta) for delta in piece.tool_deltas]
        return b"".join(written)

    def _note_logprobs(self, piece: Piece) -> None:
        """Keep the logprobs of a piece until the text they belong to is released."""
        if piece.logprobs is not None:
            self._logprobs += piece.logprobs["content"]
            self._num_logprobs += len(piece.logprobs["content"])

    def _take_logprobs(self, message: MessageItem) -> list[dict[str, Any]]:
        first = self._num_logprobs - len(self._logprobs)  # index of the first kept token in the answer
        taken = self._logprobs[max(0, self._pieces.num_reasoning_tokens - first) :]  # those of thoughts belong nowhere
        self._logprobs = []
        message.logprobs += taken
        return _without_bytes(taken)

    def _thought(self, text: str) -> bytes:
        written = b""
        if not isinstance(self._open, ReasoningItem):
            written = self._close("completed") + self._open_item(ReasoningItem(item_id=f"rs_{uuid4().hex}"))
        assert isinstance(self._open, ReasoningItem)
        self._open.text += text
        return written + self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _text(self, text: str) -> bytes:
        written = b""
        if not isinstance(self._open, MessageItem):
            written = self._close("completed") + self._open_message()
        assert isinstance(self._open, MessageItem)
        self._open.text += text
        logprobs = self._take_logprobs(self._open)
        return written + self._event("response.output_text.delta", **self._place(), delta=text, logprobs=logprobs)

    def _tool(self, delta: ToolDelta) -> bytes:
        written = b""
        self._logprobs = []  # of the call's own tokens
        if delta.call_id:
            item = FunctionCallItem(item_id=f"fc_{uuid4().hex}", call_id=delta.call_id, name=delta.name)
            written = self._close("completed")
            self._open = item
            self.response.items.append(item)
            written += self._event("response.output_item.added", output_index=self._output_index, item=item.fields())
        assert isinstance(self._open, FunctionCallItem)
        if not delta.arguments:
            return written
        self._open.arguments += delta.arguments
        place = self._place()
        return written + self._event("response.function_call_arguments.delta", **place, delta=delta.arguments)

    def _open_message(self) -> bytes:
        return self._open_item(MessageItem(item_id=f"msg_{uuid4().hex}"))

    def _open_item(self, item: MessageItem | ReasoningItem) -> bytes:
        self._open = item
        self.response.items.append(item)
        added = self._event("response.output_item.added", output_index=self._output_index, item=item.fields())
        return added + self._event("response.content_part.added", **self._place(), part=item.part())

    def _close(self, status: Status) -> bytes:
        item, place = self._open, self._place()
        if item is None:
            return b""
        item.status = status
        match item:
            case MessageItem():
                self._take_logprobs(item)
                logprobs = _without_bytes(item.logprobs)
                written = self._event("response.output_text.done", **place, text=item.text, logprobs=logprobs)
                written += self._event("response.content_part.done", **place, part=item.part())
            case ReasoningItem():
                written = self._event("response.reasoning_text.done", **place, text=item.text)
                written += self._event("response.content_part.done", **place, part=item.part())
            case FunctionCallItem():
                written = self._event(
                    "response.function_call_arguments.done", **place, name=item.name, arguments=item.arguments
                )
        self._open = None
        return written + self._event("response.output_item.done", output_index=self._output_index, item=item.fields())

    def _place(self) -> dict[str, Any]:
        """Where the open item stands; a call has no parts."""
        if self._open is None:
            return {}
        place: dict[str, Any] = {"item_id": self._open.item_id, "output_index": self._output_index}
        return place if isinstance(self._open, FunctionCallItem) else {**place, "content_index": 0}

    @property
    def _output_index(self) -> int:
        return len(self.response.items) - 1

    def _whole(self, name: str) -> bytes:
        return self._event(name, response=self.response.fields())

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(kind, orjson.dumps(payload))


def _without_bytes(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # Events have no bytes; the finished part has them.
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in entries
    ]
