"""Acceptance over all requests, which is every request's prior."""

from __future__ import annotations

from gateway.speculation.acceptance_estimate import AcceptanceEstimate
from gateway.speculation.change_detection import FirstTokenCusum
from gateway.speculation.records import ControllerLimits

__all__ = ["AcceptancePool"]


class AcceptancePool:
    """One estimate for all requests and buckets: acceptance is a property of texts, not of load.

    Attributes:
        rates: P(position i accepted | all before it accepted), over all requests.
    """

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._estimate = AcceptanceEstimate(
            half_life_rounds=limits.bucket_half_life_rounds, max_draft_tokens=limits.candidates[-1]
        )
        self._first_token = FirstTokenCusum()
        self.rates = self._believed()

    def observe(
        self, request: AcceptanceEstimate, *, num_draft_tokens: int, num_accepted_tokens: int, is_cut: bool
    ) -> bool:
        """Count a round, or a shadow, of ``request``; True means that acceptance has changed."""
        is_changed = False
        if not is_cut or num_accepted_tokens > 0:
            is_changed = self._first_token.observe(is_accepted=num_accepted_tokens > 0, believed_rate=self.rates[0])
            if is_changed:
                self.forget()
        for estimate in (self._estimate, request):
            estimate.observe(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, is_cut=is_cut)
        self.rates = self._believed()
        return is_changed

    def forget(self) -> None:
        """Something changed: keep little of the memory."""
        self._estimate.shrink(self._limits.alarm_keep)

    def request_rates(self, request: AcceptanceEstimate) -> list[float]:
        """As ``rates``, of one request."""
        return request.conditional_rates(prior=self.rates, prior_weight=self._limits.request_prior_rounds)

    def _believed(self) -> list[float]:
        return self._estimate.continued_rates(first=self._limits.prior_rate, prior_weight=self._limits.prior_rounds)
