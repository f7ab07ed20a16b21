"""How often drafts are accepted, position by position, with old rounds fading."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["AcceptanceEstimate", "expected_committed_tokens"]


class AcceptanceEstimate:
    """Decayed counts per draft position: of the rounds that reached position i, how many accepted it.

    Args:
        half_life_rounds: after this many rounds an observation counts half.
        max_draft_tokens: number of positions tracked.
    """

    def __init__(self, *, half_life_rounds: float, max_draft_tokens: int) -> None:
        self._decay = 0.5 ** (1.0 / half_life_rounds)
        self._reached = [0.0] * max_draft_tokens
        self._accepted = [0.0] * max_draft_tokens

    @property
    def weight(self) -> float:
        """Effective number of rounds behind the estimate of the first position."""
        return self._reached[0] if self._reached else 0.0

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int, is_cut: bool) -> None:
        """Count one round.

        Args:
            is_cut: a stop or limit ended the round, so the position after the accepted ones was not judged.
        """
        for position in range(len(self._reached)):
            self._reached[position] *= self._decay
            self._accepted[position] *= self._decay
        judged = num_accepted_tokens if is_cut else min(num_accepted_tokens + 1, num_draft_tokens)
        for position in range(min(judged, len(self._reached))):
            self._reached[position] += 1.0
            self._accepted[position] += 1.0 if position < num_accepted_tokens else 0.0

    def conditional_rates(self, *, prior: Sequence[float], prior_weight: float) -> list[float]:
        """P(position i accepted | all before it accepted), shrunk towards ``prior`` with ``prior_weight`` rounds."""
        return [
            (accepted + prior_weight * before) / (reached + prior_weight)
            for accepted, reached, before in zip(self._accepted, self._reached, prior, strict=True)
        ]


def expected_committed_tokens(conditional_rates: Sequence[float], num_draft_tokens: int) -> float:
    """E(K) = 1 + sum over i <= K of P(first i drafts accepted): tokens a round with K drafts commits on average."""
    total, survival = 1.0, 1.0
    for rate in conditional_rates[:num_draft_tokens]:
        survival *= rate
        total += survival
    return total
