"""Alarms that something changed. An alarm only shrinks memory; it never switches a mode by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FirstTokenCusum", "PageHinkley"]

_MAX_Z: Final = 4.0  # one wild sample must not raise the alarm alone


@dataclass(slots=True)
class PageHinkley:
    """Two-sided Page-Hinkley test on standardised deviations (mean 0, deviation 1 while nothing changes).

    Args:
        drift: deviation that is tolerated for ever, in standard deviations.
        threshold: accumulated excess that raises the alarm. With drift 0.3 and 15 a stationary normal stream alarms
            about once in (1 / (2 * 0.3^2)) * exp(2 * 0.3 * 15) = 45,000 samples, and a shift by one deviation
            alarms after 15 / (1 - 0.3) = 21.
    """

    drift: float
    threshold: float
    _up: float = 0.0
    _down: float = 0.0

    def observe(self, z: float) -> bool:
        """Count one sample; True means alarm, and the sums start over."""
        clipped = max(-_MAX_Z, min(_MAX_Z, z))
        self._up = max(0.0, self._up + clipped - self.drift)
        self._down = max(0.0, self._down - clipped - self.drift)
        if max(self._up, self._down) < self.threshold:
            return False
        self._up = self._down = 0.0
        return True


class FirstTokenCusum:
    """Two-sided CUSUM on "was the first draft token accepted" against the rate that is believed.

    Args:
        drift: difference in rate that is tolerated. threshold: accumulated excess that raises the alarm: with 0.1 and
            7 a shift from 0.3 to 0.8 alarms after about 17 rounds and a stationary 0.5 once in some thousands.
    """

    __slots__ = ("_test",)

    def __init__(self, *, drift: float = 0.1, threshold: float = 7.0) -> None:
        self._test = PageHinkley(drift=drift, threshold=threshold)

    def observe(self, *, is_accepted: bool, believed_rate: float) -> bool:
        """Count one round; True means alarm."""
        return self._test.observe((1.0 if is_accepted else 0.0) - believed_rate)
