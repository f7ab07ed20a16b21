"""All buckets: which one a round belongs to, how a new one starts, what the drafter's coming and going does to them."""

from __future__ import annotations

from gateway.speculation.bucket import Bucket
from gateway.speculation.costs import BUCKETS, batch_bucket, context_class
from gateway.speculation.records import ControllerLimits

__all__ = ["BucketTable"]

_CLASS_SLACK = 1.15  # a mean context length must pass the edge by so much to change the class


class BucketTable:
    """Buckets by batch bucket and context class.

    Attributes:
        is_drafter_up: whether anything can be drafted.
    """

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._current: Bucket | None = None
        self.is_drafter_up = False
        self._drafter_reason = "not connected yet"

    def set_drafter(self, *, is_up: bool, reason: str) -> None:
        """The drafter came or went."""
        self.is_drafter_up, self._drafter_reason = is_up, reason
        for bucket in self._buckets.values():
            self._align(bucket, bucket.last_s)

    def newest(self) -> list[Bucket]:
        """For each batch bucket seen the one used last, by size."""
        newest: dict[int, Bucket] = {}
        for (size, _), bucket in self._buckets.items():
            if size not in newest or bucket.last_s >= newest[size].last_s:
                newest[size] = bucket
        return [bucket for _, bucket in sorted(newest.items())]

    def smaller(self, bucket: Bucket) -> Bucket | None:
        """The bucket of the next smaller batch and the same context class, if there is one."""
        index = BUCKETS.index(bucket.batch)
        return self._buckets.get((BUCKETS[index - 1], bucket.context_class)) if index else None

    def for_round(self, batch_size: int, context_len: int, now_s: float) -> Bucket:
        """The bucket of a round: ``batch_size`` streams decoding, the planned one with ``context_len`` tokens."""
        current = self._current
        mean_context = float(context_len)
        if current is not None and batch_size > 1:
            mean_context = current.context_len + (context_len - current.context_len) / batch_size
        size, level = batch_bucket(batch_size), context_class(mean_context)
        if current is not None:
            if size != current.batch and current.batch >= 4 and _is_near(batch_size, current.batch):
                size = current.batch
            is_near_level = (
                context_class(mean_context / _CLASS_SLACK)
                <= current.context_class
                <= context_class(mean_context * _CLASS_SLACK)
            )
            if batch_size > 1 and is_near_level:
                level = current.context_class
        bucket = self._buckets.get((size, level))
        if bucket is None:
            bucket = self._new_bucket(size, level, now_s)
        elif now_s - bucket.last_s > self._limits.stale_after_s:
            bucket.lookout.costs_changed()
            bucket.last_s = now_s
        self._current = bucket
        bucket.context_len = mean_context
        return bucket

    def _new_bucket(self, size: int, level: int, now_s: float) -> Bucket:
        bucket = Bucket(self._limits, batch=size, context_class=level)
        bucket.last_s = bucket.gate.since_s = now_s
        siblings = [other for (other_size, _), other in self._buckets.items() if other_size == size]
        if siblings:
            bucket.inherit(min(siblings, key=lambda other: abs(other.context_class - level)), now_s=now_s)
        self._buckets[size, level] = bucket
        self._align(bucket, now_s)
        return bucket

    def _align(self, bucket: Bucket, now_s: float) -> None:
        gate = bucket.gate
        if self._limits.mode == "off":  # no drafter is started then, so its absence is no fault
            if gate.state != "PINNED":
                gate.apply("pinned", reason="mode is off", now_s=now_s)
            bucket.chosen = 0
        elif not self.is_drafter_up:
            gate.apply("drafter_down", reason=self._drafter_reason, now_s=now_s)
            bucket.chosen = 0
        elif self._limits.mode != "auto":
            if gate.state != "PINNED":
                gate.apply("pinned", reason=f"mode is {self._limits.mode}", now_s=now_s)
        elif gate.state == "FAULT":
            if bucket.has_baseline():
                gate.apply("drafter_up", reason="the drafter is back", now_s=now_s)
                bucket.start_probe(bucket.probe_k)
            else:
                gate.apply("drafter_up_unmeasured", reason="measuring plain decode", now_s=now_s)


def _is_near(batch_size: int, bucket: int) -> bool:
    """Whether a batch is at most one stream outside ``bucket``: load that swings around an edge must not flip."""
    return bucket // 2 <= batch_size <= bucket + 1
