"""What measured costs say about drafting: break-even lengths, and the K that pays most at an acceptance rate. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from verifier.tuning.records import TrialResult
from verifier.tuning.verdict import metric_medians

__all__ = ["DraftCost", "best_num_draft_tokens", "draft_costs", "expected_length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """One batch size and K.

    Fields:
        plain_ms: a token of one stream in plain decode, B at once. verify_ms: a verify pass of B requests.
        break_even_length: verify_ms / plain_ms, drafting itself not counted.
    """

    batch_size: int
    num_draft_tokens: int
    plain_ms: float
    verify_ms: float

    @property
    def break_even_length(self) -> float:
        """Acceptance length above which drafting is faster than plain decode."""
        return self.verify_ms / self.plain_ms

    def speedup(self, acceptance_rate: float) -> float:
        """Against plain decode, with drafts that are accepted at this rate each."""
        return expected_length(self.num_draft_tokens, acceptance_rate) / self.break_even_length


def expected_length(num_draft_tokens: int, acceptance_rate: float) -> float:
    """Committed tokens of a round: 1 + a + a^2 + ... + a^K."""
    return sum(acceptance_rate**i for i in range(num_draft_tokens + 1))


def draft_costs(results: Sequence[TrialResult]) -> list[DraftCost]:
    """By batch size and K, medians over trials of the same settings."""
    medians = [metric_medians(result) for result in results]
    found = []
    for name, batch_size, k in sorted({metric for each in medians for metric in each}):
        plain = [each[key] for each in medians if (key := ("plain_tok_per_s", batch_size, 0)) in each]
        verify = [each[key] for each in medians if (key := ("verify_ms", batch_size, k)) in each]
        if name == "verify_ms" and plain and verify:
            found.append(
                DraftCost(
                    batch_size=batch_size,
                    num_draft_tokens=k,
                    plain_ms=batch_size * 1e3 / statistics.median(plain),
                    verify_ms=statistics.median(verify),
                )
            )
    return found


def best_num_draft_tokens(costs: Sequence[DraftCost], acceptance_rate: float) -> int:
    """K with the largest geometric mean speedup over batch sizes; 0 if plain decode is faster than any."""
    best, best_gain = 0, 1.0
    for k in sorted({cost.num_draft_tokens for cost in costs}):
        gain = statistics.geometric_mean(c.speedup(acceptance_rate) for c in costs if c.num_draft_tokens == k)
        if gain > best_gain:
            best, best_gain = k, gain
    return best
