"""The drafter's state of one request: committed ids, features still to read, the keys and values of stable slots."""

from __future__ import annotations

from collections.abc import Sequence

from drafter.features import FeatureStore
from drafter.ports import DraftCache
from wire.sampling import SamplingParams

__all__ = ["GREEDY", "RequestState"]

GREEDY = SamplingParams(temperature=0.0)


class RequestState:
    """Aligned to the gateway's committed ids; knows nothing it was not told.

    Slot i needs the features of position i and token i + 1. ``cache.length`` counts the stable slots, those computed
    from the target's own features; what a chain wrote behind them is dropped by never being counted.

    Invariants: features.first <= cache.length <= features.end <= len(ids), and cache.length <= max(0, len(ids) - 1).
    """

    def __init__(self, *, feature_size: int, cache: DraftCache) -> None:
        self.ids: list[int] = []
        self.features = FeatureStore(feature_size)
        self.cache = cache
        self.sampling = GREEDY

    @property
    def num_slots(self) -> int:
        """Slots that could be computed now."""
        return min(self.features.end, max(0, len(self.ids) - 1))

    def replace_ids(self, start: int, token_ids: Sequence[int]) -> None:
        """Keep the ids before ``start``, then ``token_ids``; what rested on changed ids is rolled back. O(new ids).

        Ids sent again unchanged roll nothing back.
        """
        assert 0 <= start <= len(self.ids)
        unchanged = 0
        for old, new in zip(self.ids[start:], token_ids, strict=False):
            if old != new:
                break
            unchanged += 1
        keep = start + unchanged
        if keep < len(self.ids):
            del self.ids[keep:]
            # A feature row depends on ids up to its own position, a slot on one more.
            self.features.truncate(keep)
            slots = max(0, keep - 1)
            if self.features.first > slots:
                self.features.truncate(slots)
            self.cache.length = min(self.cache.length, slots, self.features.end)
        self.ids.extend(token_ids[unchanged:])

    def settle(self, num_slots: int) -> None:
        """``num_slots`` slots are stable now; their features, but for the last one's, are not needed again."""
        self.cache.length = num_slots
        self.features.forget(num_slots - 1)
