"""One setup of a ledger as a JSON value, for the report and for keeping in a repository; without paths and secrets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from verifier.tuning.break_even import best_num_draft_tokens, draft_costs
from verifier.tuning.change import Change
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import Plan
from verifier.tuning.records import ExperimentRow, TrialResult, TrialRow
from verifier.tuning.schedule import best_changes
from verifier.tuning.verdict import metric_medians

__all__ = ["export_setup", "trials_of_settings"]


def export_setup(ledger: Ledger, setup_key: str, plan: Plan, *, profile: str) -> dict[str, Any]:
    """Everything known under a setup key."""
    rows, trials = ledger.experiments(setup_key), ledger.trials(setup_key)
    by_name = {experiment.name: experiment for experiment in plan.experiments}
    best = best_changes(rows)
    known_good = trials_of_settings(rows, trials, ())
    costs = draft_costs(trials_of_settings(rows, trials, best) or known_good)
    rate = plan.objective.acceptance_rate
    return {
        "profile": profile,
        "plan": plan.title,
        "setup_key": setup_key,
        "setup": ledger.facts(setup_key),
        "rules": {"repeats": plan.rules.repeats, "min_gain": plan.rules.min_gain},
        "experiments": [
            {
                "name": row.name,
                "kind": row.kind,
                "state": row.state,
                "verdict": row.verdict,
                "base": [change.text for change in row.base],
                "change": [change.text for change in row.change],
                "why": by_name[row.name].why if row.name in by_name else "",
                "source": by_name[row.name].source if row.name in by_name else "",
                "detail": row.detail,
                "trials": [_trial(trial) for trial in trials if trial.experiment_id == row.experiment_id],
            }
            for row in rows
        ],
        "known_good": _medians(known_good),
        "best": [change.text for change in best],
        "draft_costs": [
            {
                "batch_size": cost.batch_size,
                "num_draft_tokens": cost.num_draft_tokens,
                "plain_ms": round(cost.plain_ms, 3),
                "verify_ms": round(cost.verify_ms, 3),
                "break_even_length": round(cost.break_even_length, 3),
                "speedup": round(cost.speedup(rate), 3),
            }
            for cost in costs
        ],
        "acceptance_rate": rate,
        "best_num_draft_tokens": best_num_draft_tokens(costs, rate),
    }


def trials_of_settings(
    rows: Sequence[ExperimentRow], trials: Sequence[TrialRow], changes: Sequence[Change]
) -> list[TrialResult]:
    """Measured trials that ran with exactly these changes."""
    by_id = {row.experiment_id: row for row in rows}
    found = []
    for trial in trials:
        row = by_id[trial.experiment_id]
        own = row.base if trial.side == "base" else (*row.base, *row.change)
        if trial.result is not None and trial.result.outcome == "measured" and set(own) == set(changes):
            found.append(trial.result)
    return found


def _trial(trial: TrialRow) -> dict[str, Any]:
    found: dict[str, Any] = {"side": trial.side, "sequence": trial.sequence, "state": trial.state}
    if trial.interruptions:
        found["interruptions"] = trial.interruptions
    if trial.result is not None:
        result = trial.result
        found |= {"outcome": result.outcome, "load_s": result.load_s, "is_reverted": result.is_reverted}
        if result.message:
            found["message"] = result.message
        found["medians"] = _medians([result])
        found["provenance"] = trial.provenance
    return found


def _medians(results: Sequence[TrialResult]) -> list[dict[str, Any]]:
    medians = [metric_medians(result) for result in results]
    return [
        {
            "metric": name,
            "batch_size": batch_size,
            "num_draft_tokens": k,
            "median": round(statistics.median(each[name, batch_size, k] for each in medians), 4),
        }
        for name, batch_size, k in (sorted(medians[0]) if medians else ())
    ]
