"""How fast the queue empties, measured, and when a client that was refused should come back. Pure: time is an argument.

The rate is a weighted mean of finished generations per second over the last half minute or so; a client that needs
``num_missing`` more places than there are should come back after num_missing / rate seconds.
"""

from __future__ import annotations

import math

__all__ = ["DrainRate"]

_WINDOW_S = 30.0
_MIN_WAIT_S = 1.0
_MAX_WAIT_S = 60.0


class DrainRate:
    """Estimates generations finished per second.

    Args:
        default_wait_s: the answer while nothing has been measured.
    """

    def __init__(self, *, default_wait_s: float = 5.0) -> None:
        self._default_wait_s = default_wait_s
        self._weighted_count = 0.0  # finished generations, each worth exp(-age / window)
        self._first_s: float | None = None
        self._last_s = 0.0

    def observe(self, num_finished: int, now_s: float) -> None:
        """``num_finished`` generations have just given their places back."""
        if self._first_s is None:
            self._first_s = now_s
            self._last_s = now_s
        self._weighted_count = self._decayed(now_s) + num_finished
        self._last_s = now_s

    def rate_per_s(self, now_s: float) -> float | None:
        """Generations finished per second; None before the first second of measurement is over."""
        if self._first_s is None or now_s - self._first_s < 1.0:
            return None
        # The weights of a steady stream since first_s sum to rate * window * (1 - exp(-elapsed / window)).
        share = 1.0 - math.exp(-(now_s - self._first_s) / _WINDOW_S)
        return self._decayed(now_s) / (_WINDOW_S * share)

    def wait_s(self, num_missing: int, now_s: float) -> float:
        """Seconds until ``num_missing`` more places should be free, bounded to 1..60."""
        rate = self.rate_per_s(now_s)
        if rate is None:
            return self._default_wait_s
        if rate <= 0.0:
            return _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(_MIN_WAIT_S, num_missing / rate))

    def _decayed(self, now_s: float) -> float:
        return self._weighted_count * math.exp(-(now_s - self._last_s) / _WINDOW_S)
