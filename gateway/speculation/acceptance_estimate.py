"""How often drafts are accepted, position by position, with old rounds fading."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["AcceptanceEstimate", "expected_committed_tokens"]


class AcceptanceEstimate:
    """Decayed counts per draft position: of the rounds that reached position i, how many accepted it.

    A round that stopped before a position says nothing about it, and neither does a round that a stop or limit cut.

    Args:
        half_life_rounds: after this many rounds an observation counts half.
        max_draft_tokens: number of positions tracked.
    """

    __slots__ = ("_accepted", "_decay", "_reached", "_scale")

    def __init__(self, *, half_life_rounds: float, max_draft_tokens: int) -> None:
        self._decay = 0.5 ** (1.0 / half_life_rounds)
        self._scale = 1.0  # counts are stored divided by it, so that fading is one multiplication
        self._reached = [0.0] * max_draft_tokens
        self._accepted = [0.0] * max_draft_tokens

    @property
    def weight(self) -> float:
        """Effective number of rounds behind the estimate of the first position."""
        return self._reached[0] * self._scale if self._reached else 0.0

    def observe(self, *, num_draft_tokens: int, num_accepted_tokens: int, is_cut: bool) -> None:
        """Count one round.

        Args:
            is_cut: a stop or limit ended the round, so the position after the accepted ones was not judged.
        """
        self.shrink(self._decay)
        judged = num_accepted_tokens if is_cut else min(num_accepted_tokens + 1, num_draft_tokens)
        one = 1.0 / self._scale
        for position in range(min(judged, len(self._reached))):
            self._reached[position] += one
            if position < num_accepted_tokens:
                self._accepted[position] += one

    def shrink(self, factor: float) -> None:
        """Keep ``factor`` of the memory; the rates stay."""
        self._scale *= factor
        if self._scale < 1e-12:
            self._reached = [count * self._scale for count in self._reached]
            self._accepted = [count * self._scale for count in self._accepted]
            self._scale = 1.0

    def conditional_rates(self, *, prior: Sequence[float], prior_weight: float) -> list[float]:
        """P(position i accepted | all before it accepted), shrunk towards ``prior`` with ``prior_weight`` rounds."""
        weight = prior_weight / self._scale
        return [
            (accepted + weight * before) / (reached + weight)
            for accepted, reached, before in zip(self._accepted, self._reached, prior, strict=True)
        ]

    def continued_rates(self, *, first: float, prior_weight: float) -> list[float]:
        """As ``conditional_rates``, each position shrunk towards the one before it and the first towards ``first``.

        A position that was never reached is believed to be like the last one that was.
        """
        weight = prior_weight / self._scale
        rates, before = [], first
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            before = (accepted + weight * before) / (reached + weight)
            rates.append(before)
        return rates


def expected_committed_tokens(conditional_rates: Sequence[float], num_draft_tokens: int) -> float:
    """E(K) = 1 + sum over i <= K of P(first i drafts accepted): tokens a round with K drafts commits on average."""
    total, survival = 1.0, 1.0
    for rate in conditional_rates[:num_draft_tokens]:
        survival *= rate
        total += survival
    return total
