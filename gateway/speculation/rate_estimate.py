"""Delivered tokens per second of wall time, with a standard error: the ratio estimator.

For rounds i with weights w_i (older ones fade), tokens y_i and wall seconds x_i:

    rate r = sum w_i y_i / sum w_i x_i                                     tokens / s
    relative variance of r = sum w_i^2 (y_i - r x_i)^2 / (sum w_i y_i)^2 * n / (n - 1)
    d = ln(r_spec / r_plain),  SE(d) = sqrt(relative variance of both, added)   (delta method)

The ratio of sums is what a client feels; a mean of per-round ratios would favour short rounds.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = ["MIN_ROUND_CV", "RatioEstimate", "log_speedup"]

# One round's tokens vary by about this much of their mean (0.6 at E = 2.2), its wall time by 0.05-0.35. A handful of
# equal rounds would otherwise claim a standard error near 0.
MIN_ROUND_CV: Final = 0.5


class RatioEstimate:
    """Decayed sums of (tokens, seconds) pairs.

    Args:
        half_life_rounds: after this many rounds a pair counts half; infinity never forgets.
    """

    __slots__ = ("_cross", "_decay", "_seconds", "_seconds_sq", "_tokens", "_tokens_sq", "count")

    def __init__(self, *, half_life_rounds: float) -> None:
        self._decay = 0.5 ** (1.0 / half_life_rounds)
        self.count = 0
        self._tokens = self._seconds = 0.0
        self._tokens_sq = self._seconds_sq = self._cross = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Count one round."""
        decay, decay_sq = self._decay, self._decay * self._decay
        self.count += 1
        self._tokens = self._tokens * decay + tokens
        self._seconds = self._seconds * decay + seconds
        self._tokens_sq = self._tokens_sq * decay_sq + tokens * tokens
        self._seconds_sq = self._seconds_sq * decay_sq + seconds * seconds
        self._cross = self._cross * decay_sq + tokens * seconds

    def charge(self, seconds: float) -> None:
        """Add time that delivered nothing (a re-sync) without counting a round."""
        self._seconds += seconds

    def shrink(self, factor: float) -> None:
        """Keep ``factor`` of the memory: the rate stays, new rounds weigh more and the standard error grows."""
        self._tokens *= factor
        self._seconds *= factor
        # The squared sums shrink by less than factor^2, so that relative variance grows by 1 / factor.
        self._tokens_sq *= factor
        self._seconds_sq *= factor
        self._cross *= factor

    def lost_tokens(self, plain_s: float) -> float:
        """Tokens that plain decode at ``plain_s`` a token would have delivered more in the same time; < 0 = fewer."""
        return self._seconds / plain_s - self._tokens

    @property
    def tok_per_s(self) -> float | None:
        """Delivered tokens per wall second; None before the first token."""
        return self._tokens / self._seconds if self._tokens > 0.0 and self._seconds > 0.0 else None

    @property
    def relative_variance(self) -> float:
        """Variance of the rate over the rate squared; infinite before the second round."""
        rate = self.tok_per_s
        square = self._tokens * self._tokens
        if self.count < 2 or rate is None or square == 0.0:
            return math.inf
        residual = self._tokens_sq - 2.0 * rate * self._cross + rate * rate * self._seconds_sq
        return max(0.0, residual) / square * self.count / (self.count - 1)


def log_speedup(spec: RatioEstimate, plain: RatioEstimate, *, batch: int = 1) -> tuple[float, float]:
    """d = ln(spec rate / plain rate) and its standard error; (0, infinity) while one of them is unknown.

    batch: streams whose tokens each round of ``spec`` is the mean of.
    """
    spec_rate, plain_rate = spec.tok_per_s, plain.tok_per_s
    if spec_rate is None or plain_rate is None:
        return 0.0, math.inf
    floor = MIN_ROUND_CV * MIN_ROUND_CV / (max(spec.count, 1) * min(batch, 8))
    return math.log(spec_rate / plain_rate), math.sqrt(max(spec.relative_variance, floor) + plain.relative_variance)
