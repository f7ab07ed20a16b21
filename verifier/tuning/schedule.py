"""What a campaign does next. Pure: the plan and the ledger's rows in, one decision out.

1. every single change of the plan against known-good, in order of rank
2. the best winner becomes the incumbent; each further winner is added to the incumbent alone, best first, and kept
   if it is a gain on top. Winners that set the same thing exclude each other
3. if more than one was kept: all of them together against known-good, to confirm the sum
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verifier.tuning.change import Change
from verifier.tuning.plan import Experiment, Plan
from verifier.tuning.records import ExperimentRow, Kind, Side

__all__ = ["NewExperiment", "best_changes", "next_combination", "order_of_sides", "singles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewExperiment:
    """To be entered in the ledger."""

    name: str
    kind: Kind
    rank: int
    base: tuple[Change, ...]
    change: tuple[Change, ...]


def order_of_sides(repeats: int) -> tuple[Side, ...]:
    """base changed, changed base, base changed, ...: neighbours are pairs, and neither side is always the first."""
    sides: list[Side] = []
    for i in range(repeats):
        sides += ["base", "changed"] if i % 2 == 0 else ["changed", "base"]
    return tuple(sides)


def singles(plan: Plan) -> list[NewExperiment]:
    """Every experiment of the plan, in order."""
    return [_single(experiment) for experiment in plan.experiments]


def next_combination(rows: Sequence[ExperimentRow]) -> NewExperiment | None:
    """The next experiment of steps 2 and 3, or None when all is decided. All singles are done."""
    kept, pending = _walk(rows)
    if pending is not None:
        return pending
    if len(kept) > 1 and _find(rows, (), tuple(kept), kind="confirmation") is None:
        return NewExperiment(name="all winners together", kind="confirmation", rank=0, base=(), change=tuple(kept))
    return None


def best_changes(rows: Sequence[ExperimentRow]) -> tuple[Change, ...]:
    """The settings to be written: what was kept, if the confirmation did not fail; else the best single winner."""
    kept, _ = _walk(rows)
    if len(kept) > 1:
        confirmation = _find(rows, (), tuple(kept), kind="confirmation")
        if confirmation is None or confirmation.verdict != "faster":
            return tuple(kept[:1])
    return tuple(kept)


def _walk(rows: Sequence[ExperimentRow]) -> tuple[list[Change], NewExperiment | None]:
    """Changes kept so far, and the combination that has to be tried next, if any."""
    winners = [row for row in rows if row.kind == "single" and row.verdict == "faster"]
    winners.sort(key=lambda row: (-float(row.detail["gain"]), row.name))
    kept: list[Change] = []
    for winner in winners:
        (change,) = winner.change
        if not kept:
            kept.append(change)
            continue
        if any((change.kind, change.key) == (other.kind, other.key) for other in kept):
            continue
        row = _find(rows, tuple(kept), (change,), kind="combination")
        if row is None or row.state != "done":
            name = f"{winner.name} on top of {len(kept)}"
            return kept, NewExperiment(
                name=name, kind="combination", rank=winner.rank, base=tuple(kept), change=(change,)
            )
        if row.verdict == "faster":
            kept.append(change)
    return kept, None


def _find(
    rows: Sequence[ExperimentRow],
    base: tuple[Change, ...],
    change: tuple[Change, ...],
    *,
    kind: Literal["combination", "confirmation"],
) -> ExperimentRow | None:
    for row in rows:
        if row.kind == kind and set(row.base) == set(base) and set(row.change) == set(change):
            return row
    return None


def _single(experiment: Experiment) -> NewExperiment:
    return NewExperiment(
        name=experiment.name, kind="single", rank=experiment.rank, base=(), change=(experiment.change,)
    )
