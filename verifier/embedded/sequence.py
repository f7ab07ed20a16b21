"""What the target has computed for one token sequence: ids, keys and values, and the drafter's features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cpukernels.kv_cache import KvCache

__all__ = ["CachedSequence", "common_prefix_len"]


def common_prefix_len(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Number of leading ids two sequences share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


class CachedSequence:
    """Ids whose keys, values and features are held. Truncation is O(1); appending is amortised O(1).

    Position p's entry depends on ids 0..p alone, so any prefix can serve any request that starts with the same ids.
    """

    def __init__(self, cache: KvCache, *, feature_size: int) -> None:
        self.cache = cache
        self._ids = np.empty(64, dtype=np.int64)
        self._features = np.empty((64, feature_size), dtype=np.float32)

    def __len__(self) -> int:
        return self.cache.length

    @property
    def ids(self) -> npt.NDArray[np.int64]:  # [len]
        """The ids held; a view, valid until the next append."""
        return self._ids[: self.cache.length]

    def features(self, start: int, stop: int) -> npt.NDArray[np.float32]:  # [stop - start, 3H]
        """Features of positions start..stop-1; a view."""
        assert 0 <= start <= stop <= self.cache.length
        return self._features[start:stop]

    def append(self, ids: Sequence[int], features: npt.NDArray[np.float32]) -> None:  # features: [len(ids), 3H]
        """Record positions whose keys and values the forward pass has just written to the cache."""
        begin, end = self.cache.length, self.cache.length + len(ids)
        if end > len(self._ids):
            capacity = max(end, 2 * len(self._ids))
            self._ids = np.resize(self._ids, capacity)
            grown = np.empty((capacity, self._features.shape[1]), dtype=np.float32)
            grown[:begin] = self._features[:begin]
            self._features = grown
        self._ids[begin:end] = ids
        self._features[begin:end] = features
        self.cache.length = end

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` positions."""
        self.cache.truncate(length)

    def fork(self, length: int) -> CachedSequence:
        """An independent copy of the first ``length`` positions."""
        copy = CachedSequence(self.cache.fork(length), feature_size=self._features.shape[1])
        copy._ids = self._ids[:length].copy() if length else copy._ids
        copy._features = self._features[:length].copy() if length else copy._features
        return copy
