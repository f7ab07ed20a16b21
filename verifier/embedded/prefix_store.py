"""Sequences of finished requests, kept for reuse by requests that start with the same ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from verifier.embedded.sequence import CachedSequence, common_prefix_len

__all__ = ["PrefixStore"]

# Copying a shorter prefix than this saves less than it costs to look at.
_MIN_PREFIX = 8


class PrefixStore:
    """Least recently finished first out; bounded by the number of positions held.

    Args:
        max_positions: bound over all idle sequences; 0 keeps nothing.
    """

    def __init__(self, max_positions: int) -> None:
        self._max_positions = max_positions
        self._idle: list[CachedSequence] = []  # oldest first
        self.num_evicted = 0

    @property
    def num_positions(self) -> int:
        """Positions held now."""
        return sum(len(sequence) for sequence in self._idle)

    def put(self, sequence: CachedSequence) -> None:
        """Keep a sequence nobody uses any more; evicts the oldest over the bound."""
        if len(sequence) < _MIN_PREFIX or len(sequence) > self._max_positions:
            return
        self._idle.append(sequence)
        while self.num_positions > self._max_positions:
            self._idle.pop(0)
            self.num_evicted += 1

    def take(self, ids: npt.NDArray[np.int64], live: Iterable[CachedSequence]) -> CachedSequence | None:
        """The longest held prefix of ``ids``, as a sequence the caller owns; None if there is none worth it.

        The last id is never part of it: its logits must be computed. An idle sequence that is mostly shared is handed
        over; otherwise, and for ``live`` sequences of running requests, the shared part is copied.
        """
        best: CachedSequence | None = None
        best_len = _MIN_PREFIX - 1
        for sequence in (*live, *self._idle):
            length = min(common_prefix_len(sequence.ids, ids), len(ids) - 1)
            if length > best_len:
                best, best_len = sequence, length
        if best is None:
            return None
        for index, sequence in enumerate(self._idle):
            if sequence is best and 2 * best_len >= len(sequence):
                del self._idle[index]
                sequence.truncate(best_len)
                return sequence
        return best.fork(best_len)
