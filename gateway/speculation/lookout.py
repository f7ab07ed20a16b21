"""When a plain stretch should try speculation again: shadow drafts first, a probe in the dark as the last resort.

A shadow draft of K tokens is made beside the plain stream and scored against what came. With ``a`` of them accepted a
real round would have gained (1 + a) * t - (1 + margin) * C(K) seconds. These gains accumulate, never below 0; when they
reach ``shadow_gain_tokens`` plain tokens of time, doubled for each stretch of speculation that failed lately and is not
forgiven, the plain stretch ends. Shadows are dense while the sum is above a tenth of that and thin out below.

The probe back-off counts plain tokens and doubles with each stretch that failed. Where shadows say that speculation
can't pay, a probe still comes, because shadows know nothing of changed costs, but only when its expected loss is down
to ``probe_budget`` of the plain stretch.
"""

from __future__ import annotations

import math
from typing import Literal

from gateway.speculation.rate_estimate import MIN_ROUND_CV, RatioEstimate
from gateway.speculation.records import ControllerLimits

__all__ = ["Lookout"]

_MAX_DOUBTS = 4
_SKIP_MIN_SHADOWS = 8
_PROMISING = 0.1  # of the evidence needed: from there on shadows are dense
_FIRST_INTERVAL = 8.0  # tokens between shadows at the begin of a hopeless stretch
_PROBE_ROUNDS = 6  # rounds that a hopeless probe lasts


class Lookout:
    """One plain stretch after another, of a bucket or of a request.

    Args:
        forgiven: failed stretches that do not yet raise the evidence needed: 1 for a request, whose text may have been
            bad for a moment, 0 for a bucket.
    """

    __slots__ = (
        "_backoff_tokens",
        "_dense_wait_tokens",
        "_evidence_s",
        "_forgiven",
        "_interval_tokens",
        "_is_cost_stale",
        "_limits",
        "_loss_tokens",
        "_plain_tokens",
        "_shadow_in_tokens",
        "_shadow_rate",
        "doubts",
        "probe_in_tokens",
    )

    def __init__(self, limits: ControllerLimits, *, forgiven: int = 0) -> None:
        self._limits = limits
        self._forgiven = forgiven
        self.doubts = 0  # stretches of speculation in a row that did not pay
        self.start(has_paid=True)

    def start(self, *, has_paid: bool) -> None:
        """A plain stretch begins.

        Args:
            has_paid: the speculation before it gained clearly; otherwise the next one must be better founded.
        """
        self.doubts = 0 if has_paid else min(self.doubts + 1, _MAX_DOUBTS)
        limit = self._limits.probe_backoff_max_tokens
        self._backoff_tokens = min(self._limits.probe_backoff_tokens << self.doubts, limit)
        self._plain_tokens = self._loss_tokens = 0.0
        self.probe_in_tokens: float = self._backoff_tokens
        self._evidence_s = 0.0
        self._is_cost_stale = False
        self._interval_tokens = 0.0
        self._shadow_in_tokens = self._dense_wait_tokens = 0.0
        self._shadow_rate = RatioEstimate(half_life_rounds=self._limits.request_half_life_rounds)

    def costs_changed(self) -> None:
        """A change alarm: look again soon, and do not let shadows talk one out of it."""
        self._backoff_tokens = self._limits.probe_backoff_tokens
        self.probe_in_tokens = min(self.probe_in_tokens, self._backoff_tokens)
        self._is_cost_stale = True

    def acceptance_changed(self) -> None:
        """A change alarm on acceptance: look again soon; old failures say less."""
        self.doubts = min(self.doubts, 1)
        self._backoff_tokens = self._limits.probe_backoff_tokens
        self.probe_in_tokens = min(self.probe_in_tokens, self._backoff_tokens)

    def count_plain(self, tokens: float, *, share: float) -> None:
        """Plain tokens came. ``share``: 1 / streams of the bucket, so that the back-off counts one stream's tokens."""
        self._shadow_in_tokens -= tokens
        self.probe_in_tokens -= tokens * share
        self._plain_tokens += tokens * share

    def takes_shadow(self, *, num_draft_tokens: int, overhead_tokens: float) -> bool:
        """Whether a shadow of K tokens should start now; if so, the wait for the next one starts.

        Args:
            overhead_tokens: what one shadow costs the plain stream, in plain tokens of time.
        """
        if self._shadow_in_tokens > 0.0:
            return False
        is_promising = self._evidence_s > 0.0 and self._interval_tokens == 0.0
        budget = self._limits.shadow_dense_budget if is_promising else self._limits.shadow_sparse_budget
        self._dense_wait_tokens = overhead_tokens / self._limits.shadow_dense_budget
        self._shadow_in_tokens = max(num_draft_tokens + 1.0, 4.0, self._interval_tokens, overhead_tokens / budget)
        return True

    def observe_shadow(self, tokens: float, *, round_s: float, plain_s: float) -> None:
        """One shadow was scored: ``tokens`` would have been committed in ``round_s``."""
        self._shadow_rate.observe(tokens, round_s)
        loss_tokens = round_s / plain_s - tokens
        self._loss_tokens += max(0.1, 1.0 / self._shadow_rate.count) * (loss_tokens - self._loss_tokens)
        gain_s = tokens * plain_s - (1.0 + self._limits.margin) * round_s
        self._evidence_s = max(0.0, self._evidence_s + gain_s)
        if self._evidence_s > _PROMISING * self._needed_s(plain_s):
            self._interval_tokens = self._interval_tokens / 4.0 if self._interval_tokens >= 16.0 else 0.0
            self._shadow_in_tokens = min(self._shadow_in_tokens, max(self._interval_tokens, self._dense_wait_tokens))
        else:
            longer = max(4.0, self._interval_tokens * 2.0)
            # The longer it has been hopeless, the longer may a change go unseen: the delay stays a small share.
            most = min(_FIRST_INTERVAL + self._plain_tokens / 32.0, float(self._limits.shadow_max_interval_tokens))
            self._interval_tokens = min(longer, most)

    def verdict(self, plain_s: float) -> Literal["shadow_pays", "probe_due"] | None:
        """Whether the plain stretch should end now, and why."""
        if self._evidence_s >= self._needed_s(plain_s):
            return "shadow_pays"
        if self._cannot_pay(plain_s):
            loss_tokens = 1.0 + _PROBE_ROUNDS * max(0.0, self._loss_tokens)
            self.probe_in_tokens = loss_tokens / self._limits.probe_budget - self._plain_tokens
        return "probe_due" if self.probe_in_tokens <= 0.0 else None

    def predicted(self, plain_s: float) -> tuple[float, float] | None:
        """ln of the speedup that shadows predict, and its standard error; None before the first two."""
        rate = self._shadow_rate.tok_per_s
        if rate is None or self._shadow_rate.count < 2:
            return None
        floor = MIN_ROUND_CV * MIN_ROUND_CV / self._shadow_rate.count
        return math.log(rate * plain_s), math.sqrt(max(self._shadow_rate.relative_variance, floor))

    def _needed_s(self, plain_s: float) -> float:
        return self._limits.shadow_gain_tokens * 2.0 ** min(max(0, self.doubts - self._forgiven), 3) * plain_s

    def _cannot_pay(self, plain_s: float) -> bool:
        predicted = self.predicted(plain_s)
        if predicted is None or self._is_cost_stale or self._shadow_rate.count < _SKIP_MIN_SHADOWS:
            return False
        return predicted[0] + predicted[1] < 0.0
