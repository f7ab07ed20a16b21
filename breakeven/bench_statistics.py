"""From arrival times to TTFT, TPOT, ITL and delivered tokens a second. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Acceptance", "RequestTimes", "Spread", "Summary", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One streamed answer, in seconds of one clock.

    Fields:
        begin_s: when the request was sent. arrivals_s: when each event with text arrived, in order.
        end_s: when the stream ended. num_tokens: completion tokens, as the server's usage says.
        error: why there is no whole answer, or "".
    """

    begin_s: float
    arrivals_s: tuple[float, ...]
    end_s: float
    num_tokens: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to the first event with text."""
        return self.arrivals_s[0] - self.begin_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if there was only one, or all came at once."""
        if self.num_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between one event and the next; under speculation an event can carry several tokens."""
        return tuple(after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, 99th percentile and mean of milliseconds, linearly interpolated."""

    p50: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What speculation did while the benchmark ran: differences of the server's counters."""

    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafted rounds."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One setting's run. Spreads are None where nothing was measured."""

    num_ok: int
    num_failed: int
    num_tokens: int
    wall_s: float
    delivered_tok_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_latency_ms: Spread | None
    errors: tuple[str, ...]


def summarize(requests: Sequence[RequestTimes], *, wall_s: float) -> Summary:
    """Add up the answers of one run.

    Args:
        wall_s: from the first request's start to the last one's end; failed ones count in it, their tokens don't.
    """
    done = [request for request in requests if not request.error]
    num_tokens = sum(request.num_tokens for request in done)
    return Summary(
        num_ok=len(done),
        num_failed=len(requests) - len(done),
        num_tokens=num_tokens,
        wall_s=wall_s,
        delivered_tok_per_s=num_tokens / wall_s if wall_s > 0 else 0.0,
        ttft_ms=_spread(request.ttft_s for request in done if request.arrivals_s),
        tpot_ms=_spread(tpot for request in done if (tpot := request.tpot_s) is not None),
        itl_ms=_spread(gap for request in done for gap in request.gaps_s),
        e2e_latency_ms=_spread(request.end_s - request.begin_s for request in done),
        errors=tuple(sorted({request.error for request in requests if request.error})),
    )


def _spread(values_s: Iterable[float]) -> Spread | None:
    values_ms = 1e3 * np.fromiter(values_s, dtype=np.float64)
    if not values_ms.size:
        return None
    p50, p99 = np.percentile(values_ms, [50, 99])
    return Spread(p50=float(p50), p99=float(p99), mean=float(values_ms.mean()))
