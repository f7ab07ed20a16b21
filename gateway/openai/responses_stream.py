"""The typed events of a streamed response, numbered from 0. The whole answer is the same events without the bytes.

An item is announced, filled by deltas, and closed before the next begins; the last event repeats the whole response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import orjson

from gateway.errors import GatewayError
from gateway.openai.choice_pieces import ChoicePieces, PieceOptions
from gateway.openai.errors import error_fields
from gateway.openai.framing import DONE, named_event
from gateway.openai.responses import Piece
from gateway.openai.responses_object import FunctionCallItem, MessageItem, ResponseObject
from gateway.ports import GenerationDelta, GenerationFinished, GenerationRequest, PromptScored, TextCodec
from gateway.text.tool_calls import ToolDelta

__all__ = ["ResponsesStream"]


class ResponsesStream:
    """Turns engine events into bytes; see ``StreamFormat`` in gateway/http/stream.py.

    Args:
        response: filled as the events come; whole after the finish.
        clock: Unix seconds.
    """

    def __init__(
        self,
        response: ResponseObject,
        generation: GenerationRequest,
        codec: TextCodec,
        *,
        clock: Callable[[], float],
    ) -> None:
        shared = response.request.shared
        self.response = response
        self._pieces = ChoicePieces(
            "chat",
            generation,
            codec,
            options=PieceOptions(
                stream_interval=shared.stream_interval if shared.stream is not None else 0,
                parses_tools=shared.parses_tools,
            ),
        )
        self._clock = clock
        self._open: MessageItem | FunctionCallItem | None = None
        self._sequence_number = 0

    def opening(self) -> bytes:
        """The response exists and runs."""
        return self._whole("response.created") + self._whole("response.in_progress")

    def next_events(self, index: int, engine_event: PromptScored | GenerationDelta | GenerationFinished) -> bytes:
        """The events of one engine event; the finish closes the open item. A response has one choice, ``index`` 0."""
        assert index == 0
        written = [self._piece(piece) for piece in self._pieces.pieces(engine_event)]
        if isinstance(engine_event, GenerationFinished):
            if not self.response.items:
                written.append(self._open_message())  # an empty answer is still an answer
            written.append(self._close("incomplete" if engine_event.finish_reason == "length" else "completed"))
            self.response.finish(engine_event, now_s=int(self._clock()))
        return b"".join(written)

    def closing(self) -> bytes:
        """The whole response, and the end."""
        return self._whole(f"response.{self.response.status}") + DONE

    def failed(self, error: GatewayError) -> bytes:
        """An error event, the failed response, and the end."""
        self.response.status, self.response.error = "failed", error
        return self._event("error", error=error_fields(error)) + self._whole("response.failed") + DONE

    def _piece(self, piece: Piece) -> bytes:
        written = [self._text(piece.text)] if piece.text else []
        written += [self._tool(delta) for delta in piece.tool_deltas]
        return b"".join(written)

    def _text(self, text: str) -> bytes:
        written = b""
        if not isinstance(self._open, MessageItem):
            written = self._close("completed") + self._open_message()
        assert isinstance(self._open, MessageItem)
        self._open.text += text
        place = {"item_id": self._open.item_id, "output_index": self._output_index, "content_index": 0}
        return written + self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _tool(self, delta: ToolDelta) -> bytes:
        written = b""
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
        place = {"item_id": self._open.item_id, "output_index": self._output_index}
        return written + self._event("response.function_call_arguments.delta", **place, delta=delta.arguments)

    def _open_message(self) -> bytes:
        item = MessageItem(item_id=f"msg_{uuid4().hex}")
        self._open = item
        self.response.items.append(item)
        added = self._event("response.output_item.added", output_index=self._output_index, item=item.fields())
        place = {"item_id": item.item_id, "output_index": self._output_index, "content_index": 0}
        return added + self._event("response.content_part.added", **place, part=item.part())

    def _close(self, status: Any) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = status
        place = {"item_id": item.item_id, "output_index": self._output_index}
        if isinstance(item, MessageItem):
            written = self._event("response.output_text.done", **place, content_index=0, text=item.text, logprobs=[])
            written += self._event("response.content_part.done", **place, content_index=0, part=item.part())
        else:
            written = self._event(
                "response.function_call_arguments.done", **place, name=item.name, arguments=item.arguments
            )
        return written + self._event("response.output_item.done", output_index=self._output_index, item=item.fields())

    @property
    def _output_index(self) -> int:
        return len(self.response.items) - 1

    def _whole(self, name: str) -> bytes:
        return self._event(name, response=self.response.fields())

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(kind, orjson.dumps(payload))
