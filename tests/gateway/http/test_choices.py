from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.errors import InternalError, TargetFailed
from gateway.http.choices import EngineEvent, run_choices
from gateway.ports import GenerationDelta, GenerationFinished, GenerationRequest
from tests.gateway.fakes import FakeEngine, Script
from wire.sampling import SamplingParams


def requests(count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=str(index), prompt_ids=(65,), sampling=SamplingParams(), max_new_tokens=99)
        for index in range(count)
    ]


class Seen:
    def __init__(self) -> None:
        self.events: list[tuple[int, EngineEvent]] = []

    async def __call__(self, index: int, event: EngineEvent) -> None:
        self.events.append((index, event))
        await asyncio.sleep(0)

    def text(self, index: int) -> str:
        return "".join(e.text for i, e in self.events if i == index and isinstance(e, GenerationDelta))


async def test_choices_run_side_by_side_each_in_its_order() -> None:
    seen = Seen()
    await run_choices(FakeEngine([Script(text="abc\x00"), Script(text="xyz\x00")]), requests(2), seen)
    assert [seen.text(index)[:3] for index in range(2)] == ["abc", "xyz"]
    assert [index for index, _ in seen.events][:4] == [0, 1, 0, 1]


@pytest.mark.parametrize("count", [1, 3])
async def test_an_error_is_raised_bare_and_closes_the_others(count: int) -> None:
    engine = FakeEngine([Script(error=TargetFailed("lost"), error_after=2)])
    with pytest.raises(TargetFailed):
        await run_choices(engine, requests(count), Seen())
    assert (engine.num_running, engine.num_closed_early) == (0, count)


@pytest.mark.parametrize("count", [1, 3])
async def test_cancellation_closes_all(count: int) -> None:
    engine = FakeEngine([Script(hold_after=1)])
    task = asyncio.ensure_future(run_choices(engine, requests(count), Seen()))
    await engine.held.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.num_running == 0


async def test_the_task_beside_ends_with_the_last_choice_or_ends_them() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail() -> None:
        raise ConnectionResetError

    engine = FakeEngine([Script(text="ab")])
    await run_choices(engine, requests(2), Seen(), beside=forever)
    assert ended == [True]
    with pytest.raises(ConnectionResetError):
        await run_choices(FakeEngine([Script(hold_after=0)]), requests(2), Seen(), beside=fail)


async def test_a_generation_must_finish() -> None:
    class Forgetful(FakeEngine):
        async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineEvent, None]:
            yield GenerationDelta(text="x", token_ids=(120,))

    seen = Seen()
    with pytest.raises(InternalError):
        await run_choices(Forgetful(), requests(1), seen)
    assert not any(isinstance(event, GenerationFinished) for _, event in seen.events)
