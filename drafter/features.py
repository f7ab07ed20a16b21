"""The target's features of one request that the draft layer still has to read: a window over positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FeatureStore"]

_MIN_CAPACITY = 16
_MAX_FORGOTTEN = 256


class FeatureStore:
    """Rows [F] float32 of positions ``first`` .. ``end`` - 1.

    Rows whose slot is in the draft's KV cache are dead weight (three hidden states a token are several times the size
    of its keys and values), so ``forget`` lets them go.
    """

    def __init__(self, feature_size: int) -> None:
        self.first = 0
        self.end = 0
        self._rows: npt.NDArray[np.float32] = np.empty((_MIN_CAPACITY, feature_size), np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return int(self._rows.nbytes)

    def append(self, rows: npt.NDArray[np.float32]) -> None:  # [n, F]
        """Add the rows of positions ``end`` .. ``end`` + n - 1."""
        used = self.end - self.first
        if used + len(rows) > len(self._rows):
            larger = np.empty((max(used + len(rows), 2 * len(self._rows)), self._rows.shape[1]), np.float32)
            larger[:used] = self._rows[:used]
            self._rows = larger
        self._rows[used : used + len(rows)] = rows
        self.end += len(rows)

    def rows(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """[end - begin, F], borrowed until the next change."""
        assert self.first <= begin <= end <= self.end
        return self._rows[begin - self.first : end - self.first]

    def truncate(self, end: int) -> None:
        """Drop the rows of positions from ``end`` on; an ``end`` before the window empties it there. O(1)."""
        if end < self.first:
            self.first = self.end = end
        self.end = min(self.end, end)

    def forget(self, before: int) -> None:
        """Positions before ``before`` won't be read again. Amortised O(1) per position."""
        if before - self.first < _MAX_FORGOTTEN:
            return
        kept = self._rows[before - self.first : self.end - self.first]
        # Shrinks as well: a long prompt's buffer must not stay for the rest of the request.
        rows = np.empty((max(_MIN_CAPACITY, 2 * len(kept)), self._rows.shape[1]), np.float32)
        rows[: len(kept)] = kept
        self._rows = rows
        self.first = before
