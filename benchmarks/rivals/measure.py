"""One cell: B streams at once through one system, and what they delivered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

__all__ = ["Answer", "Ask", "Cell", "measure_cell", "percentile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``prompt`` is the rendered chat prompt as text."""

    prompt: str
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Text with the arrival time of every piece, in s on time.perf_counter(); acceptance length where it is told."""

    pieces: tuple[tuple[float, str], ...]
    acceptance_length: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Delivered: tokens of all streams over the wall time from the first request to the last piece.

    TPOT of a stream: (last piece - first piece) / (tokens - 1). Tokens are counted by tokenizing the text, for every
    system alike; some count words.
    """

    tok_per_s: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    num_tokens: int
    acceptance_length: float | None


Speak = Callable[[Ask], Awaitable[Answer]]


async def measure_cell(speak: Speak, asks: Sequence[Ask], count_tokens: Callable[[str], int]) -> Cell:
    """All asks at once.

    Raises:
        RuntimeError: a stream delivered nothing.
    """
    begin = time.perf_counter()
    answers = await asyncio.gather(*(speak(ask) for ask in asks))
    counts = [count_tokens("".join(text for _, text in answer.pieces)) for answer in answers]
    if not all(counts):
        raise RuntimeError("a stream delivered no text")
    end = max(answer.pieces[-1][0] for answer in answers)
    lengths = [answer.acceptance_length for answer in answers if answer.acceptance_length is not None]
    return Cell(
        tok_per_s=sum(counts) / (end - begin),
        ttft_ms=tuple(1e3 * (answer.pieces[0][0] - begin) for answer in answers),
        tpot_ms=tuple(
            1e3 * (answer.pieces[-1][0] - answer.pieces[0][0]) / (count - 1)
            for answer, count in zip(answers, counts, strict=True)
            if count > 1
        ),
        num_tokens=sum(counts),
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of at least one value."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
