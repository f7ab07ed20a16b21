"""Batches verify items into forward passes. Owned by one thread; no sockets, no clock but the one passed in.

One pass takes every waiting item that needs only a few rows (verify and plain decode steps of all requests together),
and fills up with a chunk of prompts: half of it the oldest, the rest the shortest. Long prompts therefore never hold up
decoding streams for more than one chunk, nor short prompts for long. Items of one request are never in the same pass
twice: the gateway sends the next when the last is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from cpukernels.ports import ragged_rows
from verifier.embedded.errors import ItemRefused
from verifier.embedded.grammar import GrammarState
from verifier.embedded.grammar_queue import GrammarSource, PendingGrammar
from verifier.embedded.model import TargetModel
from verifier.embedded.prefix_store import PrefixStore
from verifier.embedded.sampling import TokenSampler, position_logprobs
from verifier.embedded.sequence import CachedSequence, common_prefix_len
from wire.messages import (
    FeatureSpan,
    PositionLogprobs,
    VerifyFailed,
    VerifyItem,
    VerifyReply,
    VerifyResult,
)
from wire.tensor_ring import TensorRingWriter

__all__ = ["EmbeddedEngine"]

# An item that needs at most this many rows is a decode step and always taken; more is a prompt, taken in chunks.
_DECODE_ROWS = 24


@dataclass(slots=True, kw_only=True)
class _Request:
    request_id: str
    sampler: TokenSampler
    sequence: CachedSequence | None = None  # None until its first rows are computed
    ids: list[int] = field(default_factory=list)  # committed


@dataclass(slots=True, kw_only=True)
class _Job:
    item: VerifyItem
    request: _Request
    is_prepared: bool = False
    cached_len: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def num_inputs(self) -> int:
        """Rows still to be computed; before a prompt's first turn, as many as if no prefix could be reused."""
        done = 0 if self.request.sequence is None or not self.is_prepared else len(self.request.sequence)
        if done == 0 and self.request.sequence is not None:
            done = self.item.start
        return self.item.base_len + len(self.item.draft_ids) - done

    def inputs(self) -> list[int]:
        """Ids whose rows are still to be computed."""
        sequence = self.request.sequence
        assert sequence is not None
        done = len(sequence)
        base = self.item.base_len
        return self.request.ids[done:] + list(self.item.draft_ids[max(0, done - base) :])


class EmbeddedEngine:
    """The target's requests, batching and replies.

    Args:
        model: weights and forward pass.
        ring: where features go; written by this engine's thread only.
        slot_rows: positions whose features fit one slot of the ring.
        max_requests, prefill_chunk_tokens, prefix_cache_tokens: see VerifierConfig.
        clock: monotonic seconds.
        grammars: compiles the grammars of requests, beside this thread; None refuses them.
    """

    def __init__(
        self,
        model: TargetModel,
        ring: TensorRingWriter,
        *,
        slot_rows: int,
        max_requests: int,
        prefill_chunk_tokens: int,
        prefix_cache_tokens: int,
        clock: Callable[[], float],
        grammars: GrammarSource | None = None,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._ring = ring
        self._slot_rows = slot_rows
        self._max_requests = max_requests
        self._chunk = prefill_chunk_tokens
        self._prefixes = PrefixStore(prefix_cache_tokens)
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._waiting: list[_Job] = []
        self._compiling: list[tuple[VerifyItem, PendingGrammar]] = []
        self._refused: list[VerifyFailed] = []
        self.counters = dict.fromkeys(
            ("num_forwards", "num_rows", "num_prefill_rows", "num_items", "num_cached_tokens", "num_failed"), 0
        )

    @property
    def model(self) -> TargetModel:
        """The weights and forward pass this engine runs."""
        return self._model

    @property
    def has_work(self) -> bool:
        """True if ``step`` has something to compute or to answer."""
        return bool(self._waiting or self._refused)

    @property
    def is_compiling(self) -> bool:
        """True if items wait for their grammars: ``step`` looks whether one is there, so call it from time to time."""
        return bool(self._compiling)

    def add(self, items: Iterable[VerifyItem]) -> None:
        """Queue items; one that can't be served is answered with VerifyFailed by the next step."""
        for item in items:
            try:
                pending = self._begin_grammar(item)
                if pending is not None:
                    self._compiling.append((item, pending))
                else:
                    self._waiting.append(_Job(item=item, request=self._request_of(item)))
            except ItemRefused as refusal:
                self._refuse(item, refusal)

    def close(self, request_id: str) -> None:
        """Forget a request, also when it is waiting; what was computed may serve as a prefix."""
        self._waiting = [job for job in self._waiting if job.item.request_id != request_id]
        self._compiling = [(item, pending) for item, pending in self._compiling if item.request_id != request_id]
        request = self._requests.pop(request_id, None)
        if request is not None and request.sequence is not None:
            self._prefixes.put(request.sequence)

    def fail_waiting(self, message: str) -> VerifyReply:
        """Answer everything that waits with an error and forget those requests: the way out of a bug in a pass."""
        for job in self._waiting:
            self._refuse(job.item, ItemRefused("internal", message))
            self._requests.pop(job.item.request_id, None)
        self._waiting = []
        refused, self._refused = tuple(self._refused), []
        return self._reply(refused, self._clock(), 0, 0)

    def step(self) -> VerifyReply | None:
        """One forward pass over what waits; None if nothing does.

        Returns:
            Results of the items that are complete; prompts that need more passes stay queued.
        """
        begin = self._clock()
        self._take_compiled()
        chosen = self._choose()
        refused, self._refused = tuple(self._refused), []
        if not chosen:
            return self._reply(refused, begin, 0, 0) if refused else None
        input_ids = [token_id for _, ids in chosen for token_id in ids]
        sequences = [self._sequence(job) for job, _ in chosen]
        rows = ragged_rows([s.cache for s in sequences], [len(ids) for _, ids in chosen])
        hidden, features = self._model.forward(np.array(input_ids, dtype=np.int64), rows)
        for (_, ids), sequence, start in zip(chosen, sequences, rows.starts[:-1], strict=True):
            sequence.append(ids, features[start : start + len(ids)])
        results = self._finish([job for job, _ in chosen], rows.starts, hidden)
        num_prefill = sum(len(ids) for job, ids in chosen if len(ids) > len(job.item.draft_ids) + 1)
        self.counters["num_forwards"] += 1
        self.counters["num_rows"] += len(input_ids)
        self.counters["num_prefill_rows"] += num_prefill
        return self._reply((*refused, *results), begin, len(input_ids), num_prefill)

    def _reply(
        self, results: tuple[VerifyResult | VerifyFailed, ...], begin: float, num_rows: int, num_prefill: int
    ) -> VerifyReply:
        return VerifyReply(
            results=results,
            forward_s=self._clock() - begin,
            num_rows=num_rows,
            num_prefill_rows=num_prefill,
            num_forwards=self.counters["num_forwards"],
        )

    def _refuse(self, item: VerifyItem, refusal: ItemRefused) -> None:
        self.counters["num_failed"] += 1
        self._refused.append(
            VerifyFailed(
                request_id=item.request_id,
                round_id=item.round_id,
                base_len=item.base_len,
                code=refusal.code,
                message=refusal.message,
            )
        )

    def _begin_grammar(self, item: VerifyItem) -> PendingGrammar | None:
        """None if the item needs no grammar, or opens no request."""
        if item.request_id in self._requests or item.sampling is None or item.sampling.grammar is None:
            return None
        if self._grammars is None:
            raise ItemRefused("invalid_grammar", "grammars are not supported here")
        return self._grammars.begin(item.sampling.grammar, item.sampling.eos_ids)

    def _take_compiled(self) -> None:
        """Queue the items whose grammars are there by now."""
        compiling, self._compiling = self._compiling, []
        for item, pending in compiling:
            try:
                grammar = pending.poll()
                if grammar is None:
                    self._compiling.append((item, pending))
                else:
                    self._waiting.append(_Job(item=item, request=self._request_of(item, grammar)))
            except ItemRefused as refusal:
                self._refuse(item, refusal)

    def _request_of(self, item: VerifyItem, grammar: GrammarState | None = None) -> _Request:
        """Check an item, align its request's committed ids, and open the request on its first item."""
        vocab_size = self._model.architecture.vocab_size
        for token_id in (*item.token_ids, *item.draft_ids):
            if not 0 <= token_id < vocab_size:
                raise ItemRefused("invalid_token", f"token id {token_id} is not in the vocabulary of {vocab_size}")
        if item.base_len != item.start + len(item.token_ids) or item.base_len < 1:
            raise ItemRefused("internal", "base_len, start and token_ids contradict each other")
        if item.base_len + len(item.draft_ids) > self._model.context_len:
            raise ItemRefused("context_limit", f"{item.base_len} tokens are over the limit {self._model.context_len}")
        request = self._requests.get(item.request_id)
        if request is None:
            request = self._open(item, grammar)
        if item.start > len(request.ids):
            raise ItemRefused("unknown_request", f"ids {len(request.ids)}..{item.start - 1} were never sent")
        if any(job.request is request for job in self._waiting):
            raise ItemRefused("internal", "the request has an unanswered item already")
        request.ids[item.start :] = item.token_ids
        return request

    def _open(self, item: VerifyItem, grammar: GrammarState | None) -> _Request:
        if item.sampling is None or item.prompt_len is None or item.start != 0:
            raise ItemRefused("unknown_request", "the verifier does not know this request")
        if len(self._requests) >= self._max_requests:
            raise ItemRefused("too_many_requests", f"the limit of {self._max_requests} requests is reached")
        vocab_size = self._model.architecture.vocab_size
        named = (*(i for i, _ in item.sampling.logit_bias), *item.sampling.eos_ids)
        if any(not 0 <= token_id < vocab_size for token_id in named):
            raise ItemRefused("invalid_token", f"logit_bias names ids outside the vocabulary of {vocab_size}")
        sampler = TokenSampler(item.sampling, vocab_size=vocab_size, prompt_len=item.prompt_len, grammar=grammar)
        request = _Request(request_id=item.request_id, sampler=sampler)
        self._requests[item.request_id] = request
        return request

    def _choose(self) -> list[tuple[_Job, list[int]]]:
        """Jobs of the next pass with the ids each computes in it."""
        chosen = []
        prompts = [job for job in self._waiting if job.num_inputs > _DECODE_ROWS]
        steps = [job for job in self._waiting if job.num_inputs <= _DECODE_ROWS]
        # The oldest prompt gets half of the chunk whatever comes, so that it ends; shorter ones then overtake it.
        others = sorted(prompts[1:], key=lambda job: job.num_inputs)
        budget = self._chunk
        for job in (*steps, *prompts[:1], *others):
            if not job.is_prepared and (budget > 0 or job.request.sequence is not None):
                self._prepare(job)
            if not job.is_prepared:
                continue
            inputs = job.inputs()
            # Rows whose logits are wanted must be in one pass: the last committed id's and the drafts'.
            last_rows = len(job.item.draft_ids) + 1
            if len(inputs) <= max(_DECODE_ROWS, last_rows):
                chosen.append((job, inputs))
            elif budget > 0:
                share = budget // 2 if others and job is prompts[0] else budget
                taken = len(inputs) if len(inputs) <= share else min(share, len(inputs) - last_rows)
                chosen.append((job, inputs[:taken]))
                budget -= taken
        return chosen

    def _prepare(self, job: _Job) -> None:
        """Drop what no longer matches the committed ids; on a first item look for a reusable prefix.

        Done when the job first gets a turn, not when it arrives: of several requests with one new prompt the first
        computes it and the others copy.
        """
        request, item = job.request, job.item
        ids = np.array(request.ids, dtype=np.int64)
        if request.sequence is None:
            live = (r.sequence for r in self._requests.values() if r.sequence is not None)
            found = None if item.score_prompt else self._prefixes.take(ids, live)
            request.sequence = found or CachedSequence(self._model.new_cache(), feature_size=self._model.feature_size)
            job.cached_len = len(request.sequence)
            self.counters["num_cached_tokens"] += job.cached_len
        else:
            # Accepted drafts stay; the newest committed id is always an input, its logits are what we are here for.
            shared = common_prefix_len(request.sequence.ids[item.start :], ids[item.start :])
            kept = min(len(request.sequence), item.start + shared, item.base_len - 1)
            request.sequence.truncate(kept)
        job.is_prepared = True

    def _sequence(self, job: _Job) -> CachedSequence:
        assert job.request.sequence is not None
        return job.request.sequence

    def _finish(self, jobs: list[_Job], starts: tuple[int, ...], hidden: torch.Tensor) -> list[VerifyResult]:
        """Sample for the jobs whose last row is computed; ``hidden`` [M, H] holds this pass's rows."""
        wanted: list[range] = []  # rows of ``hidden`` whose logits each job needs
        for job, start, stop in zip(jobs, starts[:-1], starts[1:], strict=True):
            is_done = len(self._sequence(job)) == job.item.base_len + len(job.item.draft_ids)
            begin = start if job.item.score_prompt else max(start, stop - len(job.item.draft_ids) - 1)
            wanted.append(range(begin, stop) if is_done or job.item.score_prompt else range(0))
        index = [row for rows in wanted for row in rows]
        if not index:
            return []
        logits = self._model.logits(hidden[index])
        results: list[VerifyResult] = []
        failed: set[str] = set()
        offset = 0
        for job, rows in zip(jobs, wanted, strict=True):
            own = logits[offset : offset + len(rows)]
            offset += len(rows)
            if job.item.score_prompt:
                self._score_prompt(job, own)
            if len(rows) and len(self._sequence(job)) == job.item.base_len + len(job.item.draft_ids):
                try:
                    results.append(self._result(job, own[-(len(job.item.draft_ids) + 1) :]))
                except ItemRefused as refusal:
                    self._refuse(job.item, refusal)  # answered by the next step
                    failed.add(job.item.request_id)
        done = {result.request_id for result in results} | failed
        self._waiting = [job for job in self._waiting if job.item.request_id not in done]
        self.counters["num_items"] += len(results)
        return results

    def _score_prompt(self, job: _Job, logits: npt.NDArray[np.float32]) -> None:  # [rows of this pass, V]
        end = len(self._sequence(job))
        begin = end - len(logits)
        following = job.request.ids[begin + 1 : end + 1]  # row of position p scores the id at p + 1
        job.prompt_logprobs.extend(position_logprobs(logits[: len(following)], following, job.item.num_logprobs or 0))

    def _result(self, job: _Job, logits: npt.NDArray[np.float32]) -> VerifyResult:  # [K+1, V]
        item = job.item
        target_ids = job.request.sampler.choose(logits, job.request.ids, item.draft_ids)
        logprobs = None
        if item.num_logprobs is not None:
            logprobs = position_logprobs(logits, target_ids, item.num_logprobs)
        return VerifyResult(
            request_id=item.request_id,
            round_id=item.round_id,
            base_len=item.base_len,
            target_ids=tuple(target_ids),
            spans=self._emit_features(job),
            logprobs=logprobs,
            prompt_logprobs=tuple(job.prompt_logprobs) if item.score_prompt else None,
            cached_len=job.cached_len,
        )

    def _emit_features(self, job: _Job) -> tuple[FeatureSpan, ...]:
        begin = job.item.features_from
        if begin is None:
            return ()
        sequence = self._sequence(job)
        spans: Sequence[FeatureSpan] = [
            FeatureSpan(
                start=start,
                ref=self._ring.write(sequence.features(start, min(start + self._slot_rows, len(sequence)))),
            )
            for start in range(max(0, begin), len(sequence), self._slot_rows)
        ]
        return tuple(spans)
