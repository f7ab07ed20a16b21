"""The heart of the scripted engine: forward passes one after another, of given lengths, as a scheduler runs them.

One thread. An extend pass serves all sequences that wait (prompts, verifies, the first token of a stream), a decode
pass one token of every running stream; extends go first, as in SGLang. Passes follow each other at absolute deadlines,
so that a late wake-up is not added to the next pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["PassCosts", "PassLoop", "PassTimes"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Seconds of a decode pass and of an extend pass, whatever their rows: latency of the all-reduces is most of it."""

    plain_s: float
    verify_s: float


@dataclass(slots=True)
class PassTimes:
    """What the passes of one kind really took. late_s: wake-up after the deadline, of each pass."""

    count: int = 0
    total_s: float = 0.0
    late_s: list[float] = field(default_factory=list)

    def report(self) -> dict[str, float]:
        """Mean and lateness in ms."""
        late = sorted(self.late_s) or [0.0]
        return {
            "count": self.count,
            "mean_ms": round(1e3 * self.total_s / max(1, self.count), 3),
            "late_p50_ms": round(1e3 * late[len(late) // 2], 3),
            "late_p99_ms": round(1e3 * late[int(0.99 * (len(late) - 1))], 3),
            "late_max_ms": round(1e3 * late[-1], 3),
        }


class PassLoop(Generic[Item]):
    """Runs passes for as long as there is work.

    Args:
        on_pass: called in the loop's thread at the end of each pass with its kind ("extend" or "decode") and items; it
            returns those that want a decode pass next.
    """

    def __init__(self, costs: PassCosts, on_pass: Callable[[str, Sequence[Item]], Sequence[Item]]) -> None:
        self._costs = costs
        self._on_pass = on_pass
        self._extends: list[Item] = []
        self._has_work = threading.Condition()
        self._is_stopping = False
        self.times = {"extend": PassTimes(), "decode": PassTimes()}
        self._thread = threading.Thread(target=self._run, name="passes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End after the pass under way."""
        with self._has_work:
            self._is_stopping = True
            self._has_work.notify()
        self._thread.join()

    def extend(self, items: Sequence[Item]) -> None:
        """Queue sequences for the next extend pass; callable from any thread."""
        with self._has_work:
            self._extends += items
            self._has_work.notify()

    def _run(self) -> None:
        decoding: list[Item] = []
        end_s = 0.0
        while True:
            with self._has_work:
                while not (self._extends or decoding or self._is_stopping):
                    end_s = 0.0  # idle: the next pass starts when its work comes
                    self._has_work.wait()
                if self._is_stopping:
                    return
                items, self._extends = self._extends, []
            kind = "extend" if items else "decode"
            begin_s = end_s or time.monotonic()
            end_s = begin_s + (self._costs.verify_s if items else self._costs.plain_s)
            self._sleep_until(end_s, kind, begin_s)
            if items:
                decoding += self._on_pass(kind, items)
            else:
                decoding = list(self._on_pass(kind, decoding))

    def _sleep_until(self, end_s: float, kind: str, begin_s: float) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        woke_s = time.monotonic()
        times = self.times[kind]
        times.count += 1
        times.total_s += woke_s - begin_s
        times.late_s.append(woke_s - end_s)
