"""Runs the choices of one response at the engine, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing

from gateway.errors import InternalError
from gateway.ports import Engine, GenerationDelta, GenerationFinished, GenerationRequest, PromptScored

__all__ = ["EngineEvent", "run_choices"]

EngineEvent = PromptScored | GenerationDelta | GenerationFinished


async def run_choices(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    sink: Callable[[int, EngineEvent], Awaitable[None]],
    *,
    beside: Callable[[], Coroutine[None, None, None]] | None = None,
) -> None:
    """Generate all choices; every event goes to ``sink(choice index, event)`` in the order of its choice.

    Cancellation, or an error of one choice, closes all generations at once.

    Args:
        beside: a task that runs until the last choice has ended (keep-alive).

    Raises:
        The first error of any choice, of the sink or of ``beside``, not wrapped in a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            companion = None if beside is None else group.create_task(beside())
            if len(requests) == 1:
                await _run_choice(engine, requests[0], 0, sink)
            else:
                async with asyncio.TaskGroup() as choices:
                    for index, request in enumerate(requests):
                        choices.create_task(_run_choice(engine, request, index, sink))
            if companion is not None:
                companion.cancel()
    except BaseExceptionGroup as errors:
        raise _first_leaf(errors) from None


async def _run_choice(
    engine: Engine, request: GenerationRequest, index: int, sink: Callable[[int, EngineEvent], Awaitable[None]]
) -> None:
    events: AsyncGenerator[EngineEvent, None] = engine.generate(request)
    is_finished = False
    async with aclosing(events):
        async for event in events:
            await sink(index, event)
            is_finished = isinstance(event, GenerationFinished)
    if not is_finished:
        raise InternalError("The engine ended a generation without finishing it.")


def _first_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
