"""When a plain stream should be drafted beside: as soon as not knowing costs more than looking.

While a request is plain, a token that speculation would have brought sooner is a loss. With ``gain`` the plain tokens
that a round with K drafts may gain, weighted by its chance (AcceptancePool.prospect), and c = C(K) / t, waiting costs

    gain / (gain + c)          plain tokens of time a token

These costs add up from one shadow to the next; when they reach the cost of a shadow, the next one is due. While nothing
is seen, the belief drifts towards the mixture, so the costs grow with the square of the wait, and the wait comes out as
sqrt(2 * shadow cost / (chance of a jump upwards a token * its gain)), the optimal inspection interval.
"""

from __future__ import annotations

from gateway.speculation.records import ControllerLimits

__all__ = ["ShadowPace"]


class ShadowPace:
    """Of one request."""

    __slots__ = ("_limits", "_missed_tokens", "_since_tokens")

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._missed_tokens = 0.0
        self._since_tokens = limits.shadow_max_interval_tokens * 1.0  # the first one is due at once

    def pass_token(self, *, gain_tokens: float, cost_tokens: float) -> None:
        """One plain token more was planned."""
        self._since_tokens += 1.0
        self._missed_tokens += gain_tokens / (gain_tokens + cost_tokens)

    def is_due(self, *, overhead_tokens: float) -> bool:
        """Whether a shadow should start now; if so, the wait for the next one starts.

        Args:
            overhead_tokens: what one shadow costs the plain stream, in plain tokens of time.
        """
        if self._since_tokens < overhead_tokens / self._limits.shadow_budget:
            return False
        worth = max(overhead_tokens, self._limits.shadow_min_cost_tokens)
        if self._missed_tokens < worth and self._since_tokens < self._limits.shadow_max_interval_tokens:
            return False
        self._missed_tokens = self._since_tokens = 0.0
        return True
