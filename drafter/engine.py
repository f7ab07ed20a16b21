"""Runs one batch: applies each request's messages, drafts for all of them together, answers every message.

Rows per batch: all pending slots of all requests in one forward, then one forward of one row per request for each
further draft token; requests that want fewer drop out.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from drafter.errors import DeviceLost, DraftRejected, OutOfDeviceMemory
from drafter.policy import DraftWork, Waiting, choose_evictions
from drafter.ports import DraftRunner, DraftWish, FeatureSource, Stretch
from drafter.state import GREEDY, RequestState
from wire.errors import RingError, StaleTensor
from wire.messages import DraftExtend, DraftFailed, DraftProposal
from wire.sampling import SamplingParams

__all__ = ["BatchOutcome", "DraftEngine", "EngineLimits", "Reply"]

_log = logging.getLogger(__name__)
# Bounds the memory of one forward: a long prompt is read in pieces.
_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Longest chain, longest prompt + output, and number of requests whose state is kept."""

    max_draft_tokens: int
    max_context_len: int
    max_requests: int
    shared_noise: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer and who gets it."""

    peer: bytes
    message: DraftProposal | DraftFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """One reply for each message of the batch; ``num_rows``: input rows of all its forwards."""

    replies: tuple[Reply, ...]
    num_rows: int


@dataclass(slots=True, kw_only=True)
class _Ask:
    """A request that wants a draft in this batch."""

    waiting: Waiting
    state: RequestState
    num_draft_tokens: int
    draft_ids: list[int] = field(default_factory=list)

    @property
    def num_slots(self) -> int:
        """Slots that the draft rests on: all that the committed ids allow."""
        return self.waiting.message.base_len - 1

    def stretch(self, num_slots: int) -> Stretch:
        """The next ``num_slots`` slots."""
        begin = self.state.cache.length
        return Stretch(
            cache=self.state.cache,
            features=self.state.features.rows(begin, begin + num_slots),
            token_ids=self.state.ids[begin + 1 : begin + 1 + num_slots],
        )


class DraftEngine:
    """Owns the head's runner and all requests' states. Not thread-safe: one engine thread runs it."""

    def __init__(self, runner: DraftRunner, features: FeatureSource, limits: EngineLimits) -> None:
        needed = limits.max_context_len + limits.max_draft_tokens
        assert runner.num_positions >= needed
        self._runner = runner
        self._features = features
        self._limits = limits
        self._states: OrderedDict[str, RequestState] = OrderedDict()
        self.counters: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """Requests whose state is held."""
        return len(self._states)

    def run(self, works: Sequence[DraftWork]) -> BatchOutcome:
        """Run one batch. Never raises for a request's sake: what goes wrong becomes its DraftFailed.

        Raises:
            DeviceLost: nothing can be computed in this process any more.
        """
        with torch.inference_mode():
            replies: list[Reply] = []
            asks = [ask for work in works if (ask := self._align(work, replies)) is not None]
            num_rows = 0
            try:
                num_rows = self._draft(asks)
            except DeviceLost:
                raise
            except OutOfDeviceMemory as error:
                _log.warning("event=draft_batch_failed num_requests=%d reason=%r", len(asks), str(error))
                replies.extend(self._dropped(asks, "out_of_memory", str(error)))
                # Else the caches of requests that wait would fail every batch to come.
                self.counters["evicted"] += len(self._states)
                self._states.clear()
            except Exception as error:  # noqa: BLE001 - the batch is a request boundary, logged with traceback
                _log.exception("event=draft_batch_failed num_requests=%d", len(asks))
                replies.extend(self._dropped(asks, "internal", repr(error)))
            else:
                replies.extend(self._proposed(ask.waiting, ask.draft_ids) for ask in asks)
            self._evict({work.request_id for work in works})
            self.counters["batches"] += 1
            self.counters["rows"] += num_rows
            return BatchOutcome(replies=tuple(replies), num_rows=num_rows)

    def close(self, request_id: str) -> None:
        """Free a request's state."""
        if self._states.pop(request_id, None) is not None:
            self.counters["closed"] += 1

    # ------------------------------------------------------------ aligning

    def _align(self, work: DraftWork, replies: list[Reply]) -> _Ask | None:
        """Apply a request's messages in order; answer all but the one that gets a draft."""
        replies.extend(self._superseded(waiting) for waiting in work.skipped)
        newest = work.applied[-1]
        for waiting in work.applied:
            try:
                state = self._apply(waiting.message, work.sampling)
                ask = self._ask(waiting, state) if waiting is newest else None
            except DraftRejected as rejected:
                replies.append(self._failed(waiting, rejected.code, str(rejected)))
            except Exception as error:  # noqa: BLE001 - a request boundary, logged with traceback
                _log.exception("event=align_failed request_id=%s", work.request_id)
                self._states.pop(work.request_id, None)
                replies.append(self._failed(waiting, "internal", repr(error)))
            else:
                if ask is not None:
                    return ask
                replies.append(self._proposed(waiting, ()) if waiting is newest else self._superseded(waiting))
        return None

    def _apply(self, message: DraftExtend, sampling: SamplingParams | None) -> RequestState:
        self._check(message)
        state = self._states.get(message.request_id)
        if message.start == 0:
            # A request's first message, or a re-sync: nothing held is trusted, except how it samples.
            fresh = RequestState(feature_size=self._runner.feature_size, cache=self._runner.new_cache())
            if state is not None:
                fresh.sampling = state.sampling
                self.counters["resyncs"] += 1
            state = self._states[message.request_id] = fresh
        if state is None:
            raise DraftRejected("unknown_request", "no state is held for this request")
        if message.start > len(state.ids):
            raise DraftRejected("feature_gap", f"ids start at {message.start}, only {len(state.ids)} are known")
        self._states.move_to_end(message.request_id)
        if sampling is not None:
            state.sampling = sampling
        state.replace_ids(message.start, message.token_ids)
        self._read_spans(state, message)
        return state

    def _check(self, message: DraftExtend) -> None:
        if message.start < 0 or message.base_len != message.start + len(message.token_ids):
            raise DraftRejected("internal", f"start {message.start} and the ids don't add up to {message.base_len}")
        if message.base_len > self._limits.max_context_len:
            raise DraftRejected("context_limit", f"{message.base_len} ids, limit {self._limits.max_context_len}")
        if message.token_ids and not 0 <= min(message.token_ids) <= max(message.token_ids) < self._runner.vocab_size:
            raise DraftRejected("internal", f"an id is outside the vocabulary of {self._runner.vocab_size}")

    def _read_spans(self, state: RequestState, message: DraftExtend) -> None:
        """Append the rows not held yet. Rows past base_len - 2 belong to rejected drafts and are cut."""
        for span in message.spans:
            store, shape = state.features, span.ref.shape
            if len(shape) != 2 or shape[1] != self._runner.feature_size:
                raise DraftRejected("internal", f"features of shape {shape}, {self._runner.feature_size} wide expected")
            if span.start > store.end:
                raise DraftRejected("feature_gap", f"span from {span.start}, features are held up to {store.end}")
            begin, end = store.end - span.start, min(shape[0], message.base_len - 1 - span.start)
            if begin >= end:
                continue
            try:
                rows = self._features.read(span.ref)
            except StaleTensor as error:
                raise DraftRejected("stale_features", str(error)) from None
            except RingError as error:
                raise DraftRejected("internal", str(error)) from None
            store.append(rows[begin:end])

    def _ask(self, waiting: Waiting, state: RequestState) -> _Ask | None:
        message = waiting.message
        room = self._limits.max_context_len - message.base_len
        count = min(message.num_draft_tokens, self._limits.max_draft_tokens, room)
        if count < 1 or message.base_len < 2:
            return None
        if state.features.end < message.base_len - 1:
            raise DraftRejected(
                "feature_gap", f"features up to {state.features.end}, {message.base_len - 1} needed to draft"
            )
        return _Ask(waiting=waiting, state=state, num_draft_tokens=count)

    # ------------------------------------------------------------ drafting

    def _draft(self, asks: Sequence[_Ask]) -> int:
        """Fill every ask's draft_ids; returns the rows it took."""
        if not asks:
            return 0
        num_rows = self._shorten(asks)
        for ask in asks:
            # At least the last slot is computed (again): its state is what the first guess comes from.
            ask.state.cache.length = min(ask.state.cache.length, ask.num_slots - 1)
        stretches = [ask.stretch(ask.num_slots - ask.state.cache.length) for ask in asks]
        drafts = self._runner.draft(stretches, [self._wish(ask) for ask in asks])
        for ask, ids in zip(asks, drafts, strict=True):
            ask.draft_ids = ids
            ask.state.settle(ask.num_slots)
        return num_rows + sum(len(stretch.token_ids) for stretch in stretches) + sum(len(ids) - 1 for ids in drafts)

    def _shorten(self, asks: Sequence[_Ask]) -> int:
        """Read long stretches in pieces, keys and values only, until the rest fits one forward."""
        num_rows = 0
        while sum(pending := [ask.num_slots - ask.state.cache.length for ask in asks]) > _MAX_ROWS:
            longest = asks[int(np.argmax(pending))]
            count = min(max(pending) - 1, _MAX_ROWS)
            if count < 1:
                break
            self._runner.read(longest.stretch(count))
            longest.state.settle(longest.state.cache.length)
            num_rows += count
        return num_rows

    def _wish(self, ask: _Ask) -> DraftWish:
        message, sampling = ask.waiting.message, ask.state.sampling
        return DraftWish(
            num_draft_tokens=ask.num_draft_tokens,
            position=message.base_len,
            sampling=sampling if self._limits.shared_noise else GREEDY,
        )

    # ------------------------------------------------------------ replies

    def _evict(self, needed: set[str]) -> None:
        for request_id in choose_evictions(list(self._states), max_requests=self._limits.max_requests, needed=needed):
            del self._states[request_id]
            self.counters["evicted"] += 1

    def _proposed(self, waiting: Waiting, draft_ids: Sequence[int]) -> Reply:
        self.counters["proposals"] += bool(draft_ids)
        self.counters["draft_tokens"] += len(draft_ids)
        return _reply(waiting, draft_ids)

    def _superseded(self, waiting: Waiting) -> Reply:
        self.counters["superseded"] += 1
        return _reply(waiting, ())

    def _dropped(self, asks: Sequence[_Ask], code: str, text: str) -> list[Reply]:
        """Fail a batch: nobody knows what its caches hold, so the requests start anew."""
        for ask in asks:
            self._states.pop(ask.waiting.message.request_id, None)
        return [self._failed(ask.waiting, code, text) for ask in asks]

    def _failed(self, waiting: Waiting, code: str, text: str) -> Reply:
        self.counters[f"failed_{code}"] += 1
        message = waiting.message
        failed = DraftFailed(
            request_id=message.request_id,
            round_id=message.round_id,
            base_len=message.base_len,
            code=code,
            message=text,
        )
        return Reply(peer=waiting.peer, message=failed)


def _reply(waiting: Waiting, draft_ids: Sequence[int]) -> Reply:
    message = waiting.message
    proposal = DraftProposal(
        request_id=message.request_id,
        round_id=message.round_id,
        base_len=message.base_len,
        draft_ids=tuple(draft_ids),
    )
    return Reply(peer=waiting.peer, message=proposal)
