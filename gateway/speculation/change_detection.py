"""Alarms that something changed. An alarm only shrinks memory; it never switches a mode by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PageHinkley"]

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
