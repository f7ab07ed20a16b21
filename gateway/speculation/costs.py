"""What rounds cost: one cell per number of draft tokens, measured, never fitted by a line over all of them.

Costs are staircases: kernels and graphs step, so a line through three points picks a bad K. A table belongs to one
bucket, which is a batch bucket and a context class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from gateway.speculation.change_detection import PageHinkley

__all__ = ["BUCKETS", "CostCell", "CostTable", "batch_bucket", "context_class"]

BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_SEED_SAMPLES: Final = 3
_ALPHA: Final = 0.02  # least weight of a new sample: 33 rounds of memory, so a cell errs by cv * sqrt(0.015)
_CLAMP: Final = 2.0  # a sample counts as at most this many times the cell, so that one stall moves it by 3 %
_STALL: Final = 10.0  # beyond this it is a stall and is not counted at all
_STALLS_IN_A_ROW: Final = 4  # so many are no stalls: the cell is wrong, or the costs are others now
_AGED_COUNT: Final = 3  # samples a cell is believed to hold after a change alarm
_MIN_DEVIATION: Final = 0.02  # of log seconds: timers and schedulers jitter by this much anywhere
_LINE_SAMPLES: Final = 8  # that the line through all K is worth beside a cell's own
_SLOPE_SAMPLES: Final = 6  # of a cell, before it may tilt the slope
_INFER_EVERY: Final = 16  # samples; inferring is a sort, and measured cells move slowly
_CONTEXT_BASE: Final = 512  # tokens; attention starts to show in a round's time above it


def batch_bucket(batch_size: int) -> int:
    """Smallest bucket that holds ``batch_size`` streams."""
    return next((bucket for bucket in BUCKETS if batch_size <= bucket), BUCKETS[-1])


def context_class(context_len: float) -> int:
    """0 up to 512 tokens, then one class for each factor of two."""
    return 0 if context_len <= _CONTEXT_BASE else math.ceil(math.log2(context_len / _CONTEXT_BASE))


@dataclass(slots=True)
class CostCell:
    """Seconds of one kind of round.

    The first sample of a shape is dropped (it may compile or page in). Up to three samples the value is their median,
    then a running mean that becomes an exponential one, every sample clamped to twice the value. The minimum of three,
    which suits graph replays without noise, is a quarter too low where round times scatter by 25 %.
    """

    seconds: float | None = None
    count: int = 0
    num_stalls: int = 0
    deviation: float = 0.25  # of log seconds, a running mean of absolute values scaled to a standard deviation
    _is_warm: bool = False
    _seed: list[float] = field(default_factory=list)
    _weight_count: int = 0
    _stalls_in_a_row: int = 0
    _change: PageHinkley = field(default_factory=lambda: PageHinkley(drift=0.3, threshold=15.0))

    def clamp(self, seconds: float) -> float | None:
        """What ``seconds`` counts as: itself, at most twice the cell, or None for a stall.

        A cell without its seed can't tell: after a stall, rounds of tokens that were read ahead take next to nothing,
        and one of them as the first sample would make a stall of every round that follows.
        """
        if self.seconds is None or len(self._seed) < _SEED_SAMPLES:
            return seconds
        if seconds > _STALL * self.seconds:
            return None
        return min(seconds, _CLAMP * self.seconds)

    def observe(self, seconds: float) -> bool:
        """Count one sample; True means the costs have changed."""
        if not self._is_warm:
            self._is_warm = True
            return False
        used = self.clamp(seconds)
        if used is None:
            self.num_stalls += 1
            self._stalls_in_a_row += 1
            if self._stalls_in_a_row < _STALLS_IN_A_ROW:
                return False
            self._seed, self.seconds, self.count, self._weight_count = [seconds], seconds, 1, 1
            self._stalls_in_a_row = 0
            return True
        self._stalls_in_a_row = 0
        self.count += 1
        self._weight_count += 1
        if self.seconds is None or len(self._seed) < _SEED_SAMPLES:
            self._seed.append(seconds)
            self.seconds = median(self._seed)
            return False
        log_ratio = math.log(max(used, 1e-9) / self.seconds)
        is_changed = self._change.observe(log_ratio / max(self.deviation, _MIN_DEVIATION))
        weight = max(_ALPHA, 1.0 / self._weight_count)
        self.deviation += max(_ALPHA, 1.0 / (self.count + _SEED_SAMPLES)) * (1.25 * abs(log_ratio) - self.deviation)
        self.seconds += weight * (used - self.seconds)
        return is_changed

    def age(self) -> None:
        """Believe the value less: the next samples weigh as after the seed."""
        self._weight_count = min(self._weight_count, _AGED_COUNT)

    def inherit(self, seconds: float) -> None:
        """Start from a neighbour's value, which a few samples of one's own overrule."""
        self.seconds, self._is_warm = seconds, True
        self._seed = [seconds] * _SEED_SAMPLES
        self.count = self._weight_count = _AGED_COUNT

    @property
    def weight(self) -> float:
        """Samples that the value rests on."""
        return min(self._weight_count, 2.0 / _ALPHA)

    @property
    def is_warm(self) -> bool:
        """The shape has run before."""
        return self._is_warm

    @property
    def is_seeded(self) -> bool:
        """Enough samples to decide on."""
        return self.count >= _SEED_SAMPLES


class CostTable:
    """Cells by K.

    Args:
        slope_share: a K above all measured ones is taken to go on with this share of the slope from plain decode to the
            last of them. 0 for few streams, whose rows fit a step of the staircase.
    """

    def __init__(self, *, slope_share: float = 0.0) -> None:
        self._slope_share = slope_share
        self.cells: dict[int, CostCell] = {}
        self._inferred: dict[int, float | None] = {}
        self._since_inferred = 0
        self._line: tuple[float, float, float] | None = None
        self._deviation = 0.0  # of the K >= 1 with the most samples: few of one's own say little about scatter
        self._num_drafting = 0  # samples of all K >= 1

    def cell(self, num_draft_tokens: int) -> CostCell:
        """The cell, made on first use."""
        cell = self.cells.get(num_draft_tokens)
        if cell is None:
            cell = self.cells[num_draft_tokens] = CostCell()
        return cell

    def known(self) -> dict[int, CostCell]:
        """Cells that hold a value, by K."""
        return {k: cell for k, cell in sorted(self.cells.items()) if cell.seconds is not None}

    def is_measured(self, num_draft_tokens: int) -> bool:
        """Whether that K has run often enough."""
        cell = self.cells.get(num_draft_tokens)
        return cell is not None and cell.is_seeded

    def seconds(self, num_draft_tokens: int) -> float | None:
        """Seconds of a round as measured; None before the first sample."""
        cell = self.cells.get(num_draft_tokens)
        return None if cell is None else cell.seconds

    def believed(self, num_draft_tokens: int) -> tuple[float, float] | None:
        """Seconds of a round with so many drafts and their standard error; None unless it is measured.

        The cell's own samples, and _LINE_SAMPLES more on the line through all measured K >= 1: rounds of 3 drafts say
        something about 6. A step of the staircase overrules the line within a few rounds.
        """
        cell = self.cells.get(num_draft_tokens)
        if cell is None or cell.seconds is None or not cell.is_seeded:
            return None
        line_s = self._line_s(num_draft_tokens) if num_draft_tokens else None
        error = max(cell.deviation, self._deviation if num_draft_tokens else 0.0) / math.sqrt(max(1.0, cell.weight))
        if line_s is None:
            return cell.seconds, cell.seconds * error
        seconds = (cell.weight * cell.seconds + _LINE_SAMPLES * line_s) / (cell.weight + _LINE_SAMPLES)
        return seconds, seconds * error

    def low_seconds(self, num_draft_tokens: int) -> float | None:
        """The least that a round may cost: measured less one standard error, or inferred.

        Between two measured K it is their line, and below them the line through all K >= 1. Above all of them it is the
        cost of the last one and ``slope_share`` of the way on: a step may be flat, and the full line from plain decode
        would take a large fixed cost for a slope and hide all longer drafts. Only for deciding what to measure and what
        shadows are worth. None where no drafting round has been measured.
        """
        believed = self.believed(num_draft_tokens)
        if believed is not None:
            return max(0.5 * believed[0], believed[0] - believed[1])
        if num_draft_tokens not in self._inferred:
            self._inferred[num_draft_tokens] = self._infer(num_draft_tokens)
        return self._inferred[num_draft_tokens]

    def optimistic_seconds(self, num_draft_tokens: int) -> float | None:
        """As ``low_seconds``, but the more rounds other K have had since, the lower: what to measure again.

        By 0.7 * sqrt(ln(all drafting rounds / rounds of this K)) standard errors, at least one (an upper confidence
        bound): a K whose first samples were unlucky is never written off for good.
        """
        believed = self.believed(num_draft_tokens)
        if believed is None:
            return self.low_seconds(num_draft_tokens)
        share = self._num_drafting / max(1, self.cells[num_draft_tokens].count)
        errors = max(1.0, 0.7 * math.sqrt(math.log(max(1.0, share))))
        return max(0.5 * believed[0], believed[0] - errors * believed[1])

    def samples_changed(self, num_draft_tokens: int) -> None:
        """That cell took a sample: inferences are redone, at once while it is new and now and then later."""
        self._since_inferred += 1
        if self._since_inferred >= _INFER_EVERY or self.cells[num_draft_tokens].count < _INFER_EVERY:
            self._since_inferred = 0
            self._inferred.clear()
            self._line = self._fit(_SEED_SAMPLES)
            self._weigh()

    def _infer(self, num_draft_tokens: int) -> float | None:
        known = [(k, c.seconds) for k, c in sorted(self.cells.items()) if c.is_seeded and c.seconds is not None]
        if not known or known[-1][0] == 0:
            return None
        upper = next((i for i, (k, _) in enumerate(known) if k > num_draft_tokens), None)
        if upper is None:
            (low_k, low_s), (high_k, high_s) = known[0], known[-1]
            slope = self._slope_share * max(0.0, high_s - low_s) / max(1, high_k - low_k)
            return high_s + slope * (num_draft_tokens - high_k)
        if upper == 0:
            return None
        (low_k, low_s), (high_k, high_s) = known[upper - 1], known[upper]
        line_s = self._line_s(num_draft_tokens) if low_k == 0 else None
        return low_s + (high_s - low_s) * (num_draft_tokens - low_k) / (high_k - low_k) if line_s is None else line_s

    def _weigh(self) -> None:
        drafting = [cell for k, cell in self.cells.items() if k]
        self._num_drafting = sum(cell.count for cell in drafting)
        self._deviation = max(drafting, key=lambda cell: cell.count).deviation if drafting else 0.0

    def _line_s(self, num_draft_tokens: int) -> float | None:
        if self._line is None:
            return None
        mean_k, mean_s, slope_s = self._line
        return mean_s + slope_s * (num_draft_tokens - mean_k)

    def _fit(self, least_samples: int) -> tuple[float, float, float] | None:
        """(mean K, mean seconds, slope >= 0) of the least-squares line through the cells with K >= 1, by samples."""
        known = [
            (k, c.seconds, min(c.count, 33))
            for k, c in self.cells.items()
            if k and c.count >= least_samples and c.seconds is not None
        ]
        if len(known) < 2:
            return None
        weight = sum(n for _, _, n in known)
        mean_k = sum(k * n for k, _, n in known) / weight
        mean_s = sum(s * n for _, s, n in known) / weight
        covariance = sum((k - mean_k) * (s - mean_s) * n for k, s, n in known)
        return mean_k, mean_s, max(0.0, covariance / sum((k - mean_k) ** 2 * n for k, _, n in known))

    def slope_s(self) -> float | None:
        """Seconds that one more draft token a stream adds to a speculating batch's round, >= 0.

        That of the line, because the mean K of a batch moves between the steps of the staircase anyway. None with fewer
        than two well measured K >= 1.
        """
        line = self._fit(_SLOPE_SAMPLES)
        return None if line is None else line[2]

    def age(self) -> None:
        """A change alarm: believe every cell less."""
        for cell in self.cells.values():
            cell.age()

    def inherit(self, other: CostTable) -> None:
        """Start every cell that ``other`` knows and this table does not from its value."""
        for k, cell in other.known().items():
            if k not in self.cells and cell.seconds is not None:
                self.cell(k).inherit(cell.seconds)
        self._inferred.clear()
        self._line = self._fit(_SEED_SAMPLES)
