"""Answers one generation request, as a stream or as one JSON object. Chat and completions share all of it.

The order of things is what makes errors honest: the request is parsed, then admitted (429 or 503 cost nothing), then
tokenized, and the 200 head of a stream is only sent with the engine's first event. After the head, an error can only be
one nested error event followed by ``[DONE]``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from gateway.errors import GatewayError, InternalError
from gateway.http.choices import EngineEvent, run_choices
from gateway.http.edge import Edge
from gateway.http.sse import ClientGone, SseWriter, event
from gateway.openai.choice_pieces import ChoicePieces, join_logprobs
from gateway.openai.errors import error_body
from gateway.openai.requests import SharedFields
from gateway.openai.responses import ChoiceResult, ResponseHead, StreamChunks, response_body
from gateway.openai.usage import speculation_fields, usage_fields
from gateway.ports import GenerationFinished, GenerationRequest

__all__ = ["AnswerPlan", "admitted", "answer", "client_deadline_s"]

_log = structlog.get_logger("gateway.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """All choices of one response.

    Fields:
        choices: prompt-major: the choices of prompt 0, then those of prompt 1, ...
        echo_texts: [len(choices)] the prompt's text for completions with echo, else "".
    """

    head: ResponseHead
    shared: SharedFields
    choices: tuple[GenerationRequest, ...]
    echo_texts: tuple[str, ...]


@asynccontextmanager
async def admitted(edge: Edge, num_choices: int) -> AsyncIterator[None]:
    """Holds the engine's room for ``num_choices`` generations.

    Raises:
        QueueFull, NotReady, Draining: there is none.
    """
    edge.engine.admit(num_choices)
    try:
        yield
    finally:
        edge.engine.release(num_choices)


def client_deadline_s(request: web.Request, shared: SharedFields) -> float | None:
    """How long the client itself will wait: official clients say so in a header. It is a limit between two reads, so it
    bounds the whole answer only if that is not streamed."""
    if shared.stream is not None:
        return None
    try:
        deadline_s = float(request.headers.get("x-stainless-read-timeout", ""))
    except ValueError:
        return None
    return deadline_s if 0 < deadline_s < 86_400 else None


async def answer(request: web.Request, edge: Edge, plan: AnswerPlan) -> web.StreamResponse:
    """Generate and send; call inside ``admitted``."""
    if plan.shared.stream is None:
        return await _answer_whole(edge, plan)
    return await _Stream(request, edge, plan).run()


class _Tally:
    """Formats the events of all choices and keeps what usage needs."""

    def __init__(self, edge: Edge, plan: AnswerPlan) -> None:
        self._plan = plan
        self.pieces = [
            ChoicePieces(plan.head.endpoint, choice, edge.codec, echo_text=echo_text)
            for choice, echo_text in zip(plan.choices, plan.echo_texts, strict=True)
        ]
        self.finished: dict[int, GenerationFinished] = {}

    def usage_so_far(self) -> dict[str, Any]:
        """Usage from the tokens seen; exact once all choices have finished."""
        # A prompt's first choice stands for it; the others share its tokens.
        firsts = range(0, len(self._plan.choices), self._plan.shared.num_choices)
        counted = [
            self.finished[index].usage.completion_tokens if index in self.finished else pieces.num_tokens
            for index, pieces in enumerate(self.pieces)
        ]
        return usage_fields(
            prompt_tokens=sum(len(self._plan.choices[index].prompt_ids) for index in firsts),
            completion_tokens=sum(counted),
            cached_tokens=sum(self.finished[i].usage.cached_tokens for i in firsts if i in self.finished),
        )

    def metrics(self) -> dict[str, Any] | None:
        """Speculation numbers, if the client asked for them."""
        return speculation_fields(self.finished.values()) if self._plan.shared.return_spec_stats else None


async def _answer_whole(edge: Edge, plan: AnswerPlan) -> web.Response:
    tally = _Tally(edge, plan)
    texts: list[list[str]] = [[pieces.opening().text] for pieces in tally.pieces]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in tally.pieces]

    async def collect(index: int, engine_event: EngineEvent) -> None:
        if isinstance(engine_event, GenerationFinished):
            tally.finished[index] = engine_event
            return
        piece = tally.pieces[index].piece(engine_event)
        texts[index].append(piece.text)
        if piece.logprobs is not None:
            logprobs[index].append(piece.logprobs)

    await run_choices(edge.engine, plan.choices, collect)
    results = [
        ChoiceResult(
            index=index,
            text="".join(texts[index]),
            finish_reason=tally.finished[index].finish_reason,
            matched_stop=tally.finished[index].matched_stop,
            logprobs=join_logprobs(logprobs[index]),
        )
        for index in range(len(plan.choices))
    ]
    body = response_body(plan.head, results, tally.usage_so_far(), metrics=tally.metrics())
    return web.Response(body=body, content_type="application/json")


class _Stream:
    """One streamed answer."""

    def __init__(self, request: web.Request, edge: Edge, plan: AnswerPlan) -> None:
        assert plan.shared.stream is not None
        self._edge = edge
        self._plan = plan
        self._options = plan.shared.stream
        self._tally = _Tally(edge, plan)
        self._chunks = StreamChunks(plan.head, has_usage=self._options.include_usage)
        self._writer = SseWriter(request, edge.counters, write_timeout_s=edge.config.write_timeout_s)
        self._opening: bytes | None = self._opening_events()

    async def run(self) -> web.StreamResponse:
        """Stream to the end.

        Raises:
            GatewayError: before the head was sent.
            ClientGone: the client left.
        """
        idle_s = self._edge.config.keep_alive_s
        beside = (lambda: self._writer.keep_alive(idle_s)) if idle_s > 0 else None
        self._edge.counters.open_streams += 1
        try:
            await run_choices(self._edge.engine, self._plan.choices, self._send, beside=beside)
            await self._writer.finish(self._closing_events())
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not self._writer.is_started:
                raise
            await self._fail_inside(error)
        finally:
            self._edge.counters.open_streams -= 1
        return self._writer.response

    async def _send(self, index: int, engine_event: EngineEvent) -> None:
        is_continuous = self._options.include_usage and self._options.continuous_usage
        if isinstance(engine_event, GenerationFinished):
            self._tally.finished[index] = engine_event
            usage = self._tally.usage_so_far() if is_continuous else None
            chunk = self._chunks.finish(index, engine_event.finish_reason, engine_event.matched_stop, usage=usage)
        else:
            piece = self._tally.pieces[index].piece(engine_event)
            if piece.is_empty:
                chunk = b""
            else:
                usage = self._tally.usage_so_far() if is_continuous else None
                chunk = self._chunks.content(index, piece.text, logprobs=piece.logprobs, usage=usage)
        # Taken before the first await, so that no other choice's chunk can overtake the opening.
        data = self._take_opening() + (event(chunk) if chunk else b"")
        if data:
            await self._writer.write(data)

    def _opening_events(self) -> bytes:
        """Chat: the role chunks of all choices, in index order. Completions: echoed prompts without logprobs."""
        if self._plan.head.endpoint == "chat":
            return b"".join(event(self._chunks.role(index)) for index in range(len(self._plan.choices)))
        openings = [(index, pieces.opening()) for index, pieces in enumerate(self._tally.pieces)]
        return b"".join(event(self._chunks.content(i, piece.text)) for i, piece in openings if piece.text)

    def _take_opening(self) -> bytes:
        opening, self._opening = self._opening, None
        return opening or b""

    def _closing_events(self) -> bytes:
        if not self._options.include_usage:
            return b""
        return event(self._chunks.usage(self._tally.usage_so_far(), metrics=self._tally.metrics()))

    async def _fail_inside(self, error: Exception) -> None:
        self._edge.counters.stream_errors += 1
        if not isinstance(error, GatewayError):
            _log.exception("stream_failed", response_id=self._plan.head.response_id, exc_info=error)
            error = InternalError("An internal error ended the stream.")
        await self._writer.finish(event(error_body(error)))
