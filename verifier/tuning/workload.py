"""Measures a serving engine through the gateway's own client: plain decode and verify passes at several batch sizes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifier.sglang.client import SGLangVerifierClient
from verifier.tuning.plan import Workload
from verifier.tuning.records import Series
from wire.errors import PeerLate, PeerRefused
from wire.messages import VerifyFailed, VerifyItem, VerifyResult
from wire.sampling import SamplingParams

__all__ = ["Measured", "measure", "rate_together"]

_GREEDY = SamplingParams(temperature=0.0)
# An aborted stream ends within a decode step; the next window must not share the engine with it.
_SETTLE_S = 0.3
_LOWEST_ID = 300  # below are control tokens and single bytes in most vocabularies


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Every series, and the greedy answer to the first prompt alone."""

    series: tuple[Series, ...]
    answer: tuple[int, ...]


async def measure(
    client: SGLangVerifierClient, workload: Workload, *, hang_timeout_s: float, on_phase: Callable[[str], None]
) -> Measured:
    """Run the whole workload. The client is connected and ready.

    Raises:
        PeerLate: the engine stopped answering. PeerLost: it died. PeerRefused: it refused a request of the workload.
    """
    status = await client.status(timeout_s=hang_timeout_s)
    assert status.verifier is not None
    run = _Run(client, workload, vocab_size=status.verifier.vocab_size, hang_timeout_s=hang_timeout_s)
    series: list[Series] = []
    answer: tuple[int, ...] = ()
    for batch_size in workload.batch_sizes:
        on_phase(f"plain decode, {batch_size} at once")
        values: list[float] = []
        for window in range(workload.windows + 1):  # the first one warms up
            rate, ids = await run.plain_window(batch_size)
            if window:
                values.append(rate)
            answer = answer or ids
        series.append(_series("plain_tok_per_s", batch_size, 0, values))
        for k in workload.num_draft_tokens:
            on_phase(f"verify, {batch_size} at once, K = {k}")
            series.append(_series("verify_ms", batch_size, k, await run.verify_rounds(batch_size, k)))
    return Measured(series=tuple(series), answer=answer)


def _series(metric: str, batch_size: int, k: int, values: list[float]) -> Series:
    rounded = tuple(float(f"{value:.5g}") for value in values)
    return Series(
        metric="verify_ms" if metric == "verify_ms" else "plain_tok_per_s",
        batch_size=batch_size,
        num_draft_tokens=k,
        values=rounded,
    )


class _Sequence:
    """The committed ids of one request, as a Session keeps them."""

    def __init__(self, request_id: str, prompt: list[int]) -> None:
        self.request_id = request_id
        self.ids = list(prompt)
        self.told = 0

    def item(self, round_id: int, draft_ids: tuple[int, ...]) -> VerifyItem:
        start, self.told = self.told, len(self.ids)
        is_first = start == 0
        return VerifyItem(
            request_id=self.request_id,
            round_id=round_id,
            base_len=len(self.ids),
            start=start,
            token_ids=tuple(self.ids[start:]),
            draft_ids=draft_ids,
            sampling=_GREEDY if is_first else None,
            prompt_len=len(self.ids) if is_first else None,
        )

    def commit(self, draft_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> None:
        accepted = 0
        while accepted < len(draft_ids) and draft_ids[accepted] == target_ids[accepted]:
            accepted += 1
        self.ids.extend(target_ids[: accepted + 1])


class _Run:
    """Requests numbered over the whole trial; prompts are the same in every trial of a workload."""

    def __init__(
        self, client: SGLangVerifierClient, workload: Workload, *, vocab_size: int, hang_timeout_s: float
    ) -> None:
        self._client = client
        self._workload = workload
        self._vocab_size = vocab_size
        self._lowest_id = min(_LOWEST_ID, vocab_size // 2)
        self._hang_timeout_s = hang_timeout_s
        self._next_round = 0
        self._next_request = 0

    async def plain_window(self, batch_size: int) -> tuple[float, tuple[int, ...]]:
        """Tokens per second of all streams together, and the first stream's ids."""
        sequences = [self._open(index) for index in range(batch_size)]
        wanted = self._workload.plain_tokens

        async def stream(sequence: _Sequence) -> list[float]:
            times_s = []
            for _ in range(wanted):
                await self._round([sequence], ())
                times_s.append(time.perf_counter())
            self._close([sequence])  # those that wait for a place must not wait for ever
            return times_s

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(stream(sequence)) for sequence in sequences]
        except BaseExceptionGroup as group_error:
            raise _first_of(group_error) from None
        finally:
            self._close(sequences)
        await asyncio.sleep(_SETTLE_S)
        prompt_len = self._workload.prompt_tokens
        answer = tuple(sequences[0].ids[prompt_len : prompt_len + wanted])
        return rate_together([task.result() for task in tasks]), answer

    async def verify_rounds(self, batch_size: int, k: int) -> list[float]:
        """Milliseconds of each verify round of ``batch_size`` requests with ``k`` drafts, prompts excluded."""
        rng = random.Random(f"{self._workload.seed} drafts {batch_size} {k}")  # noqa: S311 - data, not secrets
        sequences = [self._open(index) for index in range(batch_size)]
        times: list[float] = []
        try:
            for number in range(self._workload.verify_rounds + 2):
                drafts = tuple(rng.randrange(self._lowest_id, self._vocab_size) for _ in range(k))
                begin_s = time.perf_counter()
                await self._round(sequences, drafts)
                if number >= 2:  # the first computes the prompts, the second may build something
                    times.append((time.perf_counter() - begin_s) * 1e3)
        finally:
            self._close(sequences)
        return times

    def _open(self, index: int) -> _Sequence:
        rng = random.Random(f"{self._workload.seed} prompt {index}")  # noqa: S311 - data, not secrets
        prompt = [rng.randrange(self._lowest_id, self._vocab_size) for _ in range(self._workload.prompt_tokens)]
        self._next_request += 1
        return _Sequence(f"tune-{self._next_request}", prompt)

    def _close(self, sequences: list[_Sequence]) -> None:
        for sequence in sequences:
            self._client.close_request(sequence.request_id)

    async def _round(self, sequences: list[_Sequence], draft_ids: tuple[int, ...]) -> None:
        self._next_round += 1
        items = [sequence.item(self._next_round, draft_ids) for sequence in sequences]
        reply = await self._client.verify(items, timeout_s=self._hang_timeout_s)
        found = {result.request_id: result for result in reply.results}
        for sequence in sequences:
            result = found.get(sequence.request_id)
            if isinstance(result, VerifyFailed):
                raise PeerRefused(result.code, result.message)
            if not isinstance(result, VerifyResult):
                raise PeerLate("the reply lacks a request")
            sequence.commit(draft_ids, result.target_ids)


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def rate_together(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens per second of streams whose tokens came at ``times_s``: while all of them ran, prompts excluded.

    If the engine had no place for all at once, there was no such time; then all tokens over the whole time.
    """
    begin_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    if end_s <= begin_s:
        begin_s, end_s = min(times[0] for times in times_s), max(times[-1] for times in times_s)
    return sum(begin_s < at_s <= end_s for times in times_s for at_s in times) / (end_s - begin_s)
