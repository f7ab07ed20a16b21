"""What one API key may do: requests at the same time, and requests in a minute. Pure: time is an argument.

The rate is a token bucket: a key may use its minute at once and then gets one request back every 60 / limit seconds. So
there is no moment at which a whole minute's requests come free together.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import QueueFull

__all__ = ["KeyLimits", "RateState"]

_MINUTE_S = 60.0
# A request of a busy key usually ends within this; nothing better is known about one client's own requests.
_BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """What is left of a key's minute: requests, and seconds until all of them are back."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(slots=True)
class _KeyState:
    available: float
    seen_s: float
    num_running: int = 0


class KeyLimits:
    """Counts by key id.

    Args:
        max_running: requests of one key at the same time; 0 = any number.
        max_per_minute: requests of one key in a minute; 0 = any number.
    """

    def __init__(self, *, max_running: int, max_per_minute: int) -> None:
        self._max_running = max_running
        self._max_per_minute = max_per_minute
        self._keys: dict[str, _KeyState] = {}  # as many as there are keys

    def __bool__(self) -> bool:
        return self._max_running > 0 or self._max_per_minute > 0

    def enter(self, key_id: str, now_s: float) -> RateState | None:
        """Begin one request; ``leave`` must follow unless this raises.

        Returns:
            What is left of the minute, or None if there is no such limit.

        Raises:
            QueueFull: one of the two limits is reached (429), with the time until the next request would pass.
        """
        state = self._state(key_id, now_s)
        if 0 < self._max_running <= state.num_running:
            raise QueueFull(
                f"This API key has {state.num_running} requests running, its limit.",
                retry_after_s=_BUSY_RETRY_S,
                code="concurrency_limit_exceeded",
            )
        if self._max_per_minute and state.available < 1.0:
            raise QueueFull(
                f"This API key may send {self._max_per_minute} requests a minute.",
                retry_after_s=(1.0 - state.available) * _MINUTE_S / self._max_per_minute,
                code="rate_limit_exceeded",
            )
        state.available -= 1.0
        state.num_running += 1
        return self.rate_state(key_id, now_s)

    def hold(self, key_id: str) -> None:
        """A request goes on after its answer (in the background): it counts as running until another ``leave``."""
        self._keys.setdefault(key_id, _KeyState(available=float(self._max_per_minute), seen_s=0.0)).num_running += 1

    def leave(self, key_id: str) -> None:
        """The request is over."""
        self._keys[key_id].num_running -= 1

    def rate_state(self, key_id: str, now_s: float) -> RateState | None:
        """What is left of the key's minute; None if there is no such limit."""
        if not self._max_per_minute:
            return None
        available = max(0.0, self._state(key_id, now_s).available)
        missing = self._max_per_minute - available
        return RateState(
            limit=self._max_per_minute,
            remaining=int(available),
            reset_s=missing * _MINUTE_S / self._max_per_minute,
        )

    def _state(self, key_id: str, now_s: float) -> _KeyState:
        full = float(self._max_per_minute)
        state = self._keys.setdefault(key_id, _KeyState(available=full, seen_s=now_s))
        state.available = min(full, state.available + (now_s - state.seen_s) * full / _MINUTE_S)
        state.seen_s = now_s
        return state
