"""How well drafts are accepted: a belief over levels for each request, and what all requests teach about the levels.

A text is at one of a few levels of acceptance (LEVELS) and may jump to another one. Level l accepts the draft at
position i, given that all before it were accepted, with probability

    r[l][i] = min(0.98, LEVELS[l] * m[i])          m[0] = 1, m[i] learnt: drafts get worse further out

A request's belief p[l] is a forward filter of that hidden Markov chain, exact and of constant cost a round:

    n tokens pass          p[l] += (1 - (1 - h)^n) * (w[l] - p[l])              h = hazard, w = mixture
    a of K drafts accepted p[l] *= r[l][0] ... r[l][a - 1] * (1 - r[l][a])      without the last factor if a = K or cut

The mixture w, the share of tokens that all requests spend at each level, is learnt from the beliefs (empirical Bayes).
A new request starts from it, and a jump lands there, so a kind of text seen before is recognised within a few rounds.
Expected tokens of a round with K drafts: E(K) = sum_l p[l] * E_l(K), E_l(K) = 1 + sum_{i<=K} r[l][0] ... r[l][i - 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul
from typing import Final

from gateway.speculation.records import ControllerLimits

__all__ = ["LEVELS", "AcceptanceBelief", "AcceptancePool"]

LEVELS: Final = (0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.94)

_MAX_RATE: Final = 0.98  # no position is believed to be accepted always: one rejection would then prove a jump
_CURVE_PRIOR: Final = 40.0  # expected acceptances that a position is believed to be like the one before it
_REBUILD_EVERY: Final = 32  # observations between updates of the tables
_LEAST: Final = 1e-9  # of a belief: no level is ever impossible


class AcceptanceBelief:
    """P(level) of one request.

    Attributes:
        shares: [levels], adds up to 1. unseen_tokens: that passed since the last observation.
    """

    __slots__ = ("shares", "unseen_tokens")

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares = list(shares)
        self.unseen_tokens = 0.0


class AcceptancePool:
    """What all requests and buckets share: acceptance is a property of texts, not of load."""

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._positions = limits.candidates[-1]
        self._counts = [0.0] * len(LEVELS)  # tokens at each level, old ones fading
        self.mixture = [1.0 / len(LEVELS)] * len(LEVELS)
        self._reached = [0.0] * self._positions  # expected acceptances at each position, were its curve flat
        self._accepted = [0.0] * self._positions
        self._until_rebuild = _REBUILD_EVERY
        self._rebuild()

    def new_belief(self) -> AcceptanceBelief:
        """Of a request that nothing is known of."""
        return AcceptanceBelief(self.mixture)

    def pass_tokens(self, belief: AcceptanceBelief, tokens: float) -> None:
        """The request's text goes on by ``tokens``: it may have jumped."""
        belief.unseen_tokens += tokens
        moved = 1.0 - (1.0 - self._limits.hazard_per_token) ** tokens
        stays = 1.0 - moved
        belief.shares = [stays * p + moved * w for p, w in zip(belief.shares, self.mixture, strict=True)]

    def observe(
        self, belief: AcceptanceBelief, *, num_draft_tokens: int, num_accepted_tokens: int, is_cut: bool
    ) -> None:
        """A round, or a shadow, of the request was judged.

        Args:
            is_cut: a stop or limit ended the round, so the position after the accepted ones was not judged.
        """
        accepted = min(num_accepted_tokens, self._positions)
        is_rejected = not is_cut and accepted < min(num_draft_tokens, self._positions)
        self._learn_curve(belief, accepted, is_rejected=is_rejected)
        likelihood = self._rejected[accepted] if is_rejected else self._survival[accepted]
        shares = list(map(mul, belief.shares, likelihood))
        scale = 1.0 / sum(shares)
        belief.shares = shares = [p * scale + _LEAST for p in shares]
        self._learn_mixture(shares, belief.unseen_tokens)
        belief.unseen_tokens = 0.0

    def forget(self) -> None:
        """Another drafter: keep little of the memory."""
        keep = self._limits.alarm_keep
        self._counts = [count * keep for count in self._counts]
        self._reached = [count * keep for count in self._reached]
        self._accepted = [count * keep for count in self._accepted]
        self._learn_mixture(self.mixture, 0.0)
        self._rebuild()

    def expected_tokens(self, shares: Sequence[float]) -> list[float]:
        """E(K) for each candidate K under ``shares`` (a request's, or the mixture)."""
        return [sum(map(mul, shares, column)) for column in self._expected]

    def prospect(self, shares: Sequence[float], candidate: int, cost_tokens: float) -> tuple[float, float]:
        """What a round may gain and lose against plain decode, each weighted by its chance, in plain tokens.

        (sum_l p[l] * max(0, E_l(K) - c), sum_l p[l] * max(0, c - E_l(K))) with c = C(K) / t.

        Args:
            candidate: index of K among the candidates. cost_tokens: c.
        """
        gain = loss = 0.0
        for share, tokens in zip(shares, self._expected[candidate], strict=True):
            if tokens > cost_tokens:
                gain += share * (tokens - cost_tokens)
            else:
                loss += share * (cost_tokens - tokens)
        return gain, loss

    def _learn_mixture(self, shares: Sequence[float], tokens: float) -> None:
        keep = 0.5 ** (tokens / self._limits.mixture_half_life_tokens)
        self._counts = counts = [keep * count + tokens * p for count, p in zip(self._counts, shares, strict=True)]
        each = self._limits.mixture_prior_tokens / len(LEVELS)
        scale = 1.0 / (sum(counts) + self._limits.mixture_prior_tokens)
        self.mixture = [(count + each) * scale for count in counts]

    def _learn_curve(self, belief: AcceptanceBelief, accepted: int, *, is_rejected: bool) -> None:
        """Compare what each judged position did with what its level alone would make of it."""
        last = accepted + (1 if is_rejected else 0)
        for position in range(1, last):
            # Given that all before were accepted, which makes the higher levels likelier.
            given = list(map(mul, belief.shares, self._survival[position]))
            flat = sum(map(mul, given, LEVELS)) / sum(given)
            self._reached[position] += flat
            self._accepted[position] += position < accepted
        self._until_rebuild -= 1
        if self._until_rebuild == 0:
            keep = 0.5 ** (_REBUILD_EVERY / self._limits.bucket_half_life_rounds)
            self._reached = [count * keep for count in self._reached]
            self._accepted = [count * keep for count in self._accepted]
            self._rebuild()

    def _rebuild(self) -> None:
        """Tables by level: r, survival[a] = P(first a accepted), rejected[a] = P(exactly a accepted), E by K."""
        self._until_rebuild = _REBUILD_EVERY
        self.curve = [1.0]
        for accepted, reached in list(zip(self._accepted, self._reached, strict=True))[1:]:
            self.curve.append((accepted + _CURVE_PRIOR * self.curve[-1]) / (reached + _CURVE_PRIOR))
        self._survival = [[1.0] * len(LEVELS)]
        self._rejected: list[list[float]] = []
        for factor in self.curve:
            rates = [min(_MAX_RATE, level * factor) for level in LEVELS]
            before = self._survival[-1]
            self._survival.append(list(map(mul, before, rates)))
            self._rejected.append([b * (1.0 - r) for b, r in zip(before, rates, strict=True)])
        total, self._expected, position = [1.0] * len(LEVELS), [], 0
        for k in self._limits.candidates:
            for survival in self._survival[position + 1 : k + 1]:
                total = [sum(pair) for pair in zip(total, survival, strict=True)]
            position = k
            self._expected.append(total)
