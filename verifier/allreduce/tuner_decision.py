"""From measurements to one joint decision. Pure.

A candidate's time at a size is the mean of its medians with and without skew, of the slowest rank: ranks never arrive
together in practice, nor always apart. Libraries read their environment once, so one environment is chosen for all
sizes: the one whose best table is fastest in total, every size counted alike relative to the best known there.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from verifier.allreduce.tuner_records import Candidate, Decision, Measured, RankReport

__all__ = ["DecisionMismatch", "NoCandidate", "check_agreement", "decide", "is_slower", "merge_ranks"]

Environment = tuple[tuple[str, str], ...]
# A later candidate must be so much better than an earlier, simpler one.
_WORTH = 0.03


class DecisionMismatch(RuntimeError):
    """Ranks hold different decisions; starting would hang."""


class NoCandidate(RuntimeError):
    """Nothing that was tried can be used here."""


def merge_ranks(reports: Sequence[RankReport]) -> tuple[Measured, ...]:
    """The slowest rank of each replay, then median and 99th percentile over replays. No report has a problem."""
    merged = []
    for sizes in zip(*(report.times for report in reports), strict=True):
        even = [max(values) for values in zip(*(size.even_us for size in sizes), strict=True)]
        skewed = [max(values) for values in zip(*(size.skewed_us for size in sizes), strict=True)]
        merged.append(
            Measured(
                rows=sizes[0].rows,
                median_us=statistics.median(even),
                p99_us=_p99(even),
                skewed_median_us=statistics.median(skewed),
                skewed_p99_us=_p99(skewed),
            )
        )
    return tuple(merged)


def decide(
    key: str,
    candidates: Sequence[Candidate],
    measured: Mapping[str, tuple[Measured, ...]],
    rejected: Mapping[str, str],
) -> Decision:
    """Choose one environment and, within it, a candidate for each size.

    Raises:
        NoCandidate: all were rejected.
    """
    usable = [candidate for candidate in candidates if candidate.name in measured]
    if not usable:
        raise NoCandidate("; ".join(f"{name}: {why}" for name, why in rejected.items()) or "nothing to try")
    best: tuple[float, Environment, dict[int, str]] | None = None
    floor = _floor(measured)
    for environment in dict.fromkeys(candidate.env for candidate in usable):
        together = [candidate for candidate in usable if candidate.env in (environment, ())]
        table = _table(together, measured)
        if set(table) != set(floor):
            continue
        total = sum(_cost(measured[name], rows) / floor[rows] for rows, name in table.items())
        if best is None or total < best[0] * (1.0 - _WORTH / 2):
            best = (total, environment, table)
    if best is None:
        raise NoCandidate("no environment serves every size")
    _, environment, table = best
    chosen = set(table.values())
    return Decision(
        key=key,
        env=environment,
        table=tuple(sorted(table.items())),
        candidates=tuple(candidate for candidate in usable if candidate.name in chosen),
        measured={name: measured[name] for name in sorted(chosen)},
        rejected=dict(sorted(rejected.items())),
    )


def check_agreement(digests: Sequence[str]) -> None:
    """Compare what all ranks hold, gathered in rank order.

    Raises:
        DecisionMismatch: naming the ranks that differ from rank 0.
    """
    other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if other:
        raise DecisionMismatch(f"ranks {other} hold another all-reduce decision than rank 0: clear the cache on all")


def is_slower(cached: Sequence[Measured], now: Sequence[Measured], *, factor: float = 1.5) -> str | None:
    """Why a cached decision no longer holds: a size now takes ``factor`` times as long; None if it holds."""
    by_rows = {each.rows: each for each in cached}
    for each in now:
        before = by_rows.get(each.rows)
        if before is not None and each.median_us > factor * before.median_us:
            return f"{each.rows} rows take {each.median_us:.1f} us, {before.median_us:.1f} when it was tuned"
    return None


def _table(candidates: Sequence[Candidate], measured: Mapping[str, tuple[Measured, ...]]) -> dict[int, str]:
    table: dict[int, str] = {}
    for candidate in candidates:
        for each in measured[candidate.name]:
            holder = table.get(each.rows)
            cost = _cost(measured[candidate.name], each.rows)
            if holder is None or cost < _cost(measured[holder], each.rows) * (1.0 - _WORTH):
                table[each.rows] = candidate.name
    return table


def _floor(measured: Mapping[str, tuple[Measured, ...]]) -> dict[int, float]:
    floor: dict[int, float] = {}
    for times in measured.values():
        for each in times:
            floor[each.rows] = max(1e-3, min(floor.get(each.rows, float("inf")), _cost(times, each.rows)))
    return floor


def _cost(times: Sequence[Measured], rows: int) -> float:
    found = next(each for each in times if each.rows == rows)
    return (found.median_us + found.skewed_median_us) / 2


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
