"""How long a plain stretch may go on without a look at what speculation really costs.

Shadow drafts tell the acceptance of a plain stretch (shadow_pace.py), but nothing of changed costs. So a probe comes

    after probe_backoff_tokens, doubled with each stretch that failed lately, where nothing is known against it, and
    once its expected loss is down to probe_budget of the plain stretch, where the belief says that it can't pay.
"""

from __future__ import annotations

import math

from gateway.speculation.rate_estimate import MIN_ROUND_CV, RatioEstimate
from gateway.speculation.records import ControllerLimits

__all__ = ["Lookout"]

_MAX_DOUBTS = 4
_PROBE_ROUNDS = 6  # rounds that a hopeless probe lasts
_RESYNC_TOKENS = 1.0  # plain tokens of time that getting back in step costs, about


class Lookout:
    """One plain stretch after another, of a bucket or of a request.

    Attributes:
        doubts: stretches of speculation in a row that did not pay.
        probe_in_tokens: plain tokens until a probe is due.
        num_shadows: scored in this stretch.
    """

    __slots__ = (
        "_backoff_tokens",
        "_is_cost_stale",
        "_limits",
        "_plain_tokens",
        "_shadow_rate",
        "doubts",
        "num_shadows",
        "probe_in_tokens",
    )

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self.doubts = 0
        self.start(has_paid=True)

    def start(self, *, has_paid: bool) -> None:
        """A plain stretch begins.

        Args:
            has_paid: the speculation before it gained clearly; otherwise the next one must be better founded.
        """
        self.doubts = 0 if has_paid else min(self.doubts + 1, _MAX_DOUBTS)
        limit = self._limits.probe_backoff_max_tokens
        self._backoff_tokens = min(self._limits.probe_backoff_tokens << self.doubts, limit)
        self._plain_tokens = 0.0
        self.probe_in_tokens: float = self._backoff_tokens
        self._is_cost_stale = False
        self.num_shadows = 0
        self._shadow_rate = RatioEstimate(half_life_rounds=self._limits.shadow_half_life)

    def costs_changed(self) -> None:
        """A change alarm: look again soon, and do not let shadows talk one out of it."""
        self._backoff_tokens = self._limits.probe_backoff_tokens
        self.probe_in_tokens = min(self.probe_in_tokens, self._backoff_tokens)
        self._is_cost_stale = True

    def count_plain(self, tokens: float, *, share: float) -> None:
        """Plain tokens came. ``share``: 1 / streams of the bucket, so that the back-off counts one stream's tokens."""
        self.probe_in_tokens -= tokens * share
        self._plain_tokens += tokens * share

    def observe_shadow(self, tokens: float, *, round_s: float) -> None:
        """One shadow was scored: ``tokens`` would have been committed in ``round_s``."""
        self.num_shadows += 1
        self._shadow_rate.observe(tokens, round_s)

    def is_probe_due(self, gain_tokens: float | None) -> bool:
        """Whether to try speculation although nothing says that it pays.

        Args:
            gain_tokens: plain tokens that a round is believed to gain, mostly < 0; None: not known.
        """
        if gain_tokens is not None and gain_tokens < 0.0 and self.num_shadows and not self._is_cost_stale:
            loss_tokens = _RESYNC_TOKENS - _PROBE_ROUNDS * gain_tokens
            self.probe_in_tokens = loss_tokens / self._limits.probe_budget - self._plain_tokens
        return self.probe_in_tokens <= 0.0

    def predicted(self, plain_s: float) -> tuple[float, float] | None:
        """ln of the speedup that shadows predict, and its standard error; None before the first two."""
        rate = self._shadow_rate.tok_per_s
        if rate is None or self._shadow_rate.count < 2:
            return None
        floor = MIN_ROUND_CV * MIN_ROUND_CV / self._shadow_rate.count
        return math.log(rate * plain_s), math.sqrt(max(self._shadow_rate.relative_variance, floor))
