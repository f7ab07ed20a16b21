"""One contender of the comparison."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.rivals.measure import Ask, Speak

__all__ = ["System"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Who is asked, and what it runs on.

    Fields:
        pids: its processes; all below them count as its own. max_batch: assisted generation takes one sequence.
        num_warm_ups: unmeasured batches of each size beforehand.
        acceptance: asks for the acceptance length where the answers themselves don't tell it; unmeasured.
    """

    name: str
    speak: Speak
    pids: tuple[int, ...]
    max_batch: int = 1 << 30
    num_warm_ups: int = 1
    acceptance: Callable[[Ask], Awaitable[float | None]] | None = None
