"""One streaming /generate: the engine's own plain decode, read ahead of the gateway's rounds."""

from __future__ import annotations

import asyncio
from typing import Any

from verifier.sglang.answers import Answer, Listed
from verifier.sglang.errors import refusal_of_abort
from verifier.sglang.http import EngineHttp
from verifier.sglang.indexing import stream_payload
from verifier.sglang.plugin.announcement import new_rid
from verifier.sglang.plugin.orders import DrawOrder
from wire.errors import PeerError, PeerLost, PeerRefused
from wire.sampling import SamplingParams

__all__ = ["PlainStream"]


class PlainStream:
    """Ids the engine produced after ``start_ids``, kept until the rounds ask for them.

    Args:
        start_ids: the committed ids it starts from. num_top: length of the logprob lists, None = none wanted.
        max_new_tokens: most ids it may produce. cache_key: namespace of the prefix cache.
        features_from: first position whose features are wanted, None = the newest of ``start_ids``.
        order: the plugin draws; None = the engine's own sampler does.
    """

    def __init__(
        self,
        http: EngineHttp,
        start_ids: list[int],
        params: SamplingParams,
        *,
        num_top: int | None,
        max_new_tokens: int,
        cache_key: str = "",
        features_from: int | None = None,
        order: DrawOrder | None = None,
    ) -> None:
        self.rid = new_rid(len(start_ids) - 1 if features_from is None else features_from)
        self.start_len = len(start_ids)
        self.num_top = num_top
        self.cached_len = 0
        self.weight_version: str | None = None
        self.is_over = False
        self._has_all = False
        self.task: asyncio.Task[None] | None = None
        self._http = http
        self._is_ordered = order is not None
        self._payload = stream_payload(
            self.rid,
            list(start_ids),
            params,
            num_top=num_top,
            max_new_tokens=max_new_tokens,
            cache_key=cache_key,
            order=order,
        )
        self._ids: list[int] = []
        self._logprobs: list[tuple[Listed, list[Listed] | None]] = []
        self._error: PeerError | None = None
        self._more = asyncio.Event()
        self._num_checked = 0

    def continues(self, ids: list[int]) -> bool:
        """True if the committed ids beyond the start are those this stream produced, and it has or will have the next.

        Each id is compared once.
        """
        needed = len(ids) - self.start_len
        if self._has_all and needed >= len(self._ids):
            return False
        if needed < self._num_checked or needed > len(self._ids):
            return False
        if ids[self.start_len + self._num_checked :] != self._ids[self._num_checked : needed]:
            return False
        self._num_checked = needed
        return True

    async def read(self) -> None:
        """Read until the engine ends it; run as a task, cancelled when the stream is dropped."""
        try:
            async for chunk in self._http.stream(self._payload):
                self._take(chunk)
        except PeerError as error:
            self._error = error
        finally:
            self.is_over = True
            self._more.set()

    def stop(self) -> None:
        """End reading; whoever waits for an id gets an error."""
        if self._error is None:
            self._error = PeerLost("the stream was stopped")
        if self.task is not None:
            self.task.cancel()

    async def id_at(self, position: int) -> tuple[int, Listed | None, list[Listed]]:
        """The id at ``position``, its logprob and the most likely ids there, as soon as they have come.

        Raises:
            PeerError: the stream broke or ended before.
        """
        index = position - self.start_len
        while index >= len(self._ids):
            if self.is_over:
                raise self._error or PeerRefused("target_error", "the engine ended the stream early")
            self._more.clear()
            await self._more.wait()
        if self.num_top is None:
            return self._ids[index], None, []
        own, top = self._logprobs[index]
        return self._ids[index], own, top or []

    def _take(self, chunk: Answer) -> None:
        meta = chunk.meta_info
        self.cached_len, self.weight_version = meta.cached_tokens, meta.weight_version
        # Chunks hold all ids so far, or only new ones, by a setting of the engine; their end is the newest either way.
        num_new = meta.completion_tokens - len(self._ids)
        if num_new > 0:
            if len(chunk.output_ids) < num_new:
                raise PeerRefused("target_error", "the stream skipped ids")
            if self._is_ordered and not _are_drawn(meta.breakeven or [], num_new):
                raise PeerRefused("target_error", "the plugin in the engine did not draw as ordered")
            self._ids.extend(chunk.output_ids[-num_new:])
            if self.num_top is not None:
                self._take_logprobs(meta.output_token_logprobs or [], meta.output_top_logprobs, num_new)
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            raise refusal_of_abort(reason.status_code, reason.message or "")
        self._has_all = reason is not None
        self._more.set()

    def _take_logprobs(self, own: list[Listed], tops: list[list[Listed] | None] | None, num_new: int) -> None:
        if len(own) < num_new:
            raise PeerRefused("target_error", "the stream skipped logprobs")
        lists: list[list[Listed] | None] = tops[-num_new:] if tops else [None] * num_new
        self._logprobs.extend(zip(own[-num_new:], lists, strict=True))


def _are_drawn(entries: list[Any], num_new: int) -> bool:
    newest = entries[-num_new:]
    return len(newest) == num_new and all(entry is not None for entry in newest)
