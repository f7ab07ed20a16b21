"""One POST for all waiting sequences, such that what one of them suffers the others don't."""

from __future__ import annotations

import asyncio

from verifier.sglang.answers import Answer
from verifier.sglang.counters import Counters
from verifier.sglang.errors import refusal_of_abort
from verifier.sglang.fast_lane import FastLane
from verifier.sglang.http import EngineHttp
from verifier.sglang.indexing import Ask, batch_payload
from wire.errors import PeerRefused

__all__ = ["BatchPoster"]

_FIRST_PAUSE_S = 0.05


class BatchPoster:
    """Posts batches; splits one that is refused as a whole, tries again what was refused for load.

    Asking again is done under fresh rids: of a batch refused for one item the others may run already, and the engine
    takes no rid twice at a time.

    lane: takes batches of rounds past HTTP, where the engine has one. What it refuses goes by HTTP.
    """

    def __init__(self, http: EngineHttp, counters: Counters, *, overload_retries: int) -> None:
        self.lane: FastLane | None = None
        self._http = http
        self._counters = counters
        self._overload_retries = overload_retries

    async def post(self, asks: list[Ask]) -> list[Answer | PeerRefused]:
        """One answer or one error per sequence, in order; ``asks`` then holds what was asked last.

        Raises:
            PeerLost: the engine is gone.
        """
        self._counters["posts"] += 1
        try:
            answers = await self._over_lane(asks) or await self._once(asks)
        except PeerRefused as error:
            # The engine refuses a batch for the sake of one of its items.
            answers = [error] * len(asks)
            if len(asks) > 1:
                self._counters["batch_splits"] += 1
                await self._abort(asks)
                await self._one_by_one(asks, answers, list(range(len(asks))))
                return answers
        again = [i for i, answer in enumerate(answers) if isinstance(answer, PeerRefused) and _is_overload(answer)]
        await self._one_by_one(asks, answers, again)
        return answers

    async def _one_by_one(self, asks: list[Ask], answers: list[Answer | PeerRefused], indices: list[int]) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._persist(asks, i)) for i in indices]
        for i, task in zip(indices, tasks, strict=True):
            answers[i] = task.result()

    async def _abort(self, asks: list[Ask]) -> None:
        """Free the engine of what it may have begun; it may be too busy to be told."""
        await asyncio.gather(*(self._http.abort(ask.rid) for ask in asks), return_exceptions=True)

    async def _persist(self, asks: list[Ask], index: int) -> Answer | PeerRefused:
        pause_s = _FIRST_PAUSE_S
        for attempt in range(self._overload_retries + 1):
            asks[index] = asks[index].again()
            try:
                answer = (await self._once([asks[index]]))[0]
            except PeerRefused as error:
                answer = error
            if not (isinstance(answer, PeerRefused) and _is_overload(answer)) or attempt == self._overload_retries:
                return answer
            self._counters["overload_retries"] += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2
        raise AssertionError("unreachable")

    async def _over_lane(self, asks: list[Ask]) -> list[Answer | PeerRefused] | None:
        if self.lane is None or not all(ask.is_round and not ask.wants_hidden for ask in asks):
            return None
        try:
            answers = await self.lane.generate(batch_payload(asks))
        except PeerRefused:
            self._counters["lane_refusals"] += 1
            return None
        self._counters["lane_posts"] += 1
        return [_checked(answer) for answer in answers]

    async def _once(self, asks: list[Ask]) -> list[Answer | PeerRefused]:
        answers = await self._http.generate(batch_payload(asks))
        if len(answers) != len(asks):
            raise PeerRefused("target_error", f"{len(answers)} answers to {len(asks)} requests")
        return [_checked(answer) for answer in answers]


def _checked(answer: Answer) -> Answer | PeerRefused:
    reason = answer.meta_info.finish_reason
    if reason is not None and reason.type == "abort":
        return refusal_of_abort(reason.status_code, reason.message or "")
    return answer


def _is_overload(error: PeerRefused) -> bool:
    return error.code == "unavailable"
