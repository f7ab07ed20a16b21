"""What rounds cost: one cell per (batch bucket, number of draft tokens), measured, never fitted by a line.

Costs are staircases: kernels and graphs step, so a line through three points picks a bad K.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["BUCKETS", "CostCell", "CostTable", "batch_bucket"]

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_SEED_SAMPLES = 3
_ALPHA = 0.05  # weight of a new sample once the cell is seeded
_CLAMP = 2.0  # a sample counts as at most this many times the cell, so that one stall moves it by 5 %
_STALL = 10.0  # beyond this it is a stall and is not counted at all


def batch_bucket(batch_size: int) -> int:
    """Smallest bucket that holds ``batch_size`` streams."""
    return next((bucket for bucket in BUCKETS if batch_size <= bucket), BUCKETS[-1])


@dataclass(slots=True)
class CostCell:
    """Seconds of one kind of round: the first sample of a shape is dropped (it may compile or page in), the next three
    give the seed by their minimum, later ones move it slowly."""

    seconds: float | None = None
    count: int = 0
    num_stalls: int = 0
    _is_warm: bool = False
    _seed: list[float] = field(default_factory=list)

    def observe(self, seconds: float) -> None:
        """Count one sample."""
        if not self._is_warm:
            self._is_warm = True
            return
        if self.seconds is None or len(self._seed) < _SEED_SAMPLES:
            self._seed.append(seconds)
            self.seconds = min(self._seed)
        elif seconds > _STALL * self.seconds:
            self.num_stalls += 1
            return
        else:
            self.seconds += _ALPHA * (min(seconds, _CLAMP * self.seconds) - self.seconds)
        self.count += 1

    @property
    def is_seeded(self) -> bool:
        """Enough samples to decide on."""
        return self.count >= _SEED_SAMPLES


class CostTable:
    """Cells by (bucket, K)."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], CostCell] = {}

    def cell(self, bucket: int, num_draft_tokens: int) -> CostCell:
        """The cell, made on first use."""
        return self._cells.setdefault((bucket, num_draft_tokens), CostCell())

    def known(self, bucket: int) -> dict[int, CostCell]:
        """Cells of one bucket that hold a value, by K."""
        return {k: cell for (b, k), cell in sorted(self._cells.items()) if b == bucket and cell.seconds is not None}

    @property
    def buckets(self) -> list[int]:
        """Buckets with at least one cell."""
        return sorted({bucket for bucket, _ in self._cells})
