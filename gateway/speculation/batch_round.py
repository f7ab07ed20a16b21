"""Rounds of one stream, added up to rounds of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchRound", "BatchRounds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRound:
    """As many stream rounds as the batch has streams, about one of each.

    Fields:
        mean_k: drafts a stream. tokens: delivered a stream, mean. seconds: wall time, mean.
        is_fair: no round was unclean or lost its drafts. is_shadowed: a shadow was being drafted beside one.
        is_pinned: a client's pin made one draft.
    """

    mean_k: float
    tokens: float
    seconds: float
    is_fair: bool
    is_shadowed: bool
    is_pinned: bool

    @property
    def is_mixed(self) -> bool:
        """Few streams drafted: neither a plain batch nor one with a K."""
        return 0.0 < self.mean_k < 0.75

    @property
    def cost_k(self) -> int:
        """The cost cell: a batch's time depends on all its rows, so on the mean K; 0 only if nobody drafted."""
        return max(1, round(self.mean_k)) if self.mean_k > 0.0 else 0


class BatchRounds:
    """Collects them.

    Streams that were verified together report the same time. Counted one by one, a single slow batch of eight would
    look like eight slow rounds, and raise a change alarm.

    Args:
        batch: streams.
    """

    __slots__ = ("_batch", "_count", "_drafts", "_is_fair", "_is_pinned", "_is_shadowed", "_seconds", "_tokens")

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.clear()

    def clear(self) -> None:
        """Start over: what was collected belongs to a mode that has ended."""
        self._count = self._drafts = self._tokens = 0
        self._seconds = 0.0
        self._is_fair, self._is_shadowed, self._is_pinned = True, False, False

    def add(
        self,
        *,
        num_draft_tokens: int,
        tokens: int,
        seconds: float,
        is_fair: bool,
        is_shadowed: bool,
        is_pinned: bool,
    ) -> BatchRound | None:
        """Count one stream's round; the batch's when it is complete."""
        self._count += 1
        self._drafts += num_draft_tokens
        self._tokens += tokens
        self._seconds += seconds
        self._is_fair = self._is_fair and is_fair
        self._is_shadowed = self._is_shadowed or is_shadowed
        self._is_pinned = self._is_pinned or is_pinned
        if self._count < self._batch:
            return None
        count = self._count
        done = BatchRound(
            mean_k=self._drafts / count,
            tokens=self._tokens / count,
            seconds=self._seconds / count,
            is_fair=self._is_fair,
            is_shadowed=self._is_shadowed,
            is_pinned=self._is_pinned,
        )
        self.clear()
        return done
