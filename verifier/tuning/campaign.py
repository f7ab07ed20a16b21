"""A campaign: clears up after an earlier one, then runs trial after trial until the plan is decided."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import structlog

from verifier.sglang.config import SGLangConfig
from verifier.tuning.change import apply_changes
from verifier.tuning.errors import KnownGoodFailed, NotReverted, Paused
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import Plan
from verifier.tuning.process_tree import Leader, adopt_orphans, boot_id, end_session
from verifier.tuning.records import COMPARED, ExperimentRow, TrialResult, TrialRow, VerdictName
from verifier.tuning.schedule import NewExperiment, next_combination, order_of_sides, singles
from verifier.tuning.setup import Setup
from verifier.tuning.verdict import agreement, compare, log_score, noise

__all__ = ["Campaign", "TrialRunner"]

log = structlog.get_logger("tune")

# A change under which the machine itself went down so often is not tried again.
_MAX_MACHINE_DOWNS = 2
# A base trial that fails is tried so often before the campaign gives up: a machine may need a moment after a crash.
_BASE_ATTEMPTS = 3


class TrialRunner(Protocol):
    """Runs one engine start with the given settings."""

    async def run(
        self,
        trial_id: int,
        config: SGLangConfig,
        *,
        on_started: Callable[[Leader], None],
        on_phase: Callable[[str, float], None],
    ) -> TrialResult:
        """Launch, measure, stop; a failing engine is a result."""
        ...


class Campaign:
    """One plan on one setup.

    Args:
        config: section [sglang] of the profile, the known-good settings.
        impossible: experiment name to the reason why it can't be run here.
        only: names of the experiments to run; empty = all. max_trials: engine starts until it pauses; 0 = no limit.
        on_trial: told what runs now: experiment, side, phase, share loaded.
    """

    def __init__(
        self,
        config: SGLangConfig,
        plan: Plan,
        setup: Setup,
        ledger: Ledger,
        trials: TrialRunner,
        *,
        impossible: dict[str, str],
        only: Sequence[str] = (),
        max_trials: int = 0,
        on_trial: Callable[[str, str, str, float], None] = lambda name, side, phase, share: None,
    ) -> None:
        self._config = config
        self._plan = plan
        self._setup = setup
        self._ledger = ledger
        self._trials = trials
        self._impossible = impossible
        self._only = frozenset(only)
        self._trials_left = max_trials or None
        self._on_trial = on_trial

    async def run(self) -> None:
        """Until everything is decided; may be killed and run again at any point.

        Raises:
            KnownGoodFailed, NotReverted: nothing measured from here on would mean anything.
            Paused: max_trials are done.
        """
        adopt_orphans()
        self.recover()
        self._ledger.enter_setup(self._setup.key, self._setup.facts)
        for experiment in singles(self._plan):
            if not self._only or experiment.name in self._only:
                self._enter(experiment)
                if experiment.name in self._impossible:
                    self._rule_out(experiment.name, self._impossible[experiment.name])
        await self._run_open()
        self.review()
        self._extend_undecided()
        await self._run_open()
        self.review()
        while not self._only and (combination := next_combination(self._rows())) is not None:
            self._enter(combination)
            await self._run_open()

    def recover(self) -> None:
        """Remove what trials of a killed campaign left, and put these trials back to planned.

        Raises:
            NotReverted: a process of them can't be killed.
        """
        for trial_id, leader, boot in self._ledger.interrupted():
            left = [] if leader is None else end_session(leader)
            if left:
                raise NotReverted(f"processes {left} of interrupted trial {trial_id} can't be ended")
            downs = self._ledger.replan_trial(trial_id, by_machine=bool(boot) and boot != boot_id())
            log.warning("an interrupted trial runs again", trial=trial_id, machine_went_down=downs)
            if downs >= _MAX_MACHINE_DOWNS:
                message = f"the machine went down {downs} times while it ran"
                self._ledger.begin_trial(trial_id, boot=boot_id())
                self._ledger.end_trial(trial_id, TrialResult(outcome="machine_down", message=message), _provenance())

    # ------------------------------------------------------------ experiments

    def _enter(self, new: NewExperiment) -> None:
        self._ledger.plan_experiment(
            self._setup.key,
            name=new.name,
            kind=new.kind,
            rank=new.rank,
            base=new.base,
            change=new.change,
            sides=order_of_sides(self._plan.rules.repeats),
        )

    def _rule_out(self, name: str, reason: str) -> None:
        for row in self._rows():
            if row.name == name and row.state == "planned":
                self._ledger.end_experiment(row.experiment_id, "not_possible", {"message": reason})

    def _extend_undecided(self) -> None:
        """Where the noise hid the answer and the plan now asks for more repeats, plan the missing pairs."""
        trials = self._ledger.trials(self._setup.key)
        sides = order_of_sides(self._plan.rules.repeats)
        for row in self._rows():
            count = sum(trial.experiment_id == row.experiment_id for trial in trials)
            if row.verdict == "undecided" and count < len(sides):
                self._ledger.extend_experiment(row.experiment_id, sides[count:], first=count)

    def _rows(self) -> list[ExperimentRow]:
        return self._ledger.experiments(self._setup.key)

    async def _run_open(self) -> None:
        """Every experiment that is not done, by rank; known-good is always the first to run."""
        rows = [row for row in self._rows() if row.state != "done" and (not self._only or row.name in self._only)]
        for row in sorted(rows, key=lambda row: (row.rank, row.experiment_id)):
            await self._run_experiment(row)

    async def _run_experiment(self, row: ExperimentRow) -> None:
        while True:
            own = [trial for trial in self._ledger.trials(self._setup.key) if trial.experiment_id == row.experiment_id]
            own.sort(key=lambda trial: trial.sequence)
            verdict = self._verdict(row, own)
            if verdict is not None:
                name, detail = verdict
                self._ledger.end_experiment(row.experiment_id, name, detail)
                log.info("experiment", name=row.name, verdict=name, **_short(detail))
                return
            if self._trials_left == 0:
                raise Paused("as many trials as asked for are done; the same command goes on")
            await self._run_trial(row, next(trial for trial in own if trial.state == "planned"))
            if self._trials_left is not None:
                self._trials_left -= 1

    async def _run_trial(self, row: ExperimentRow, trial: TrialRow) -> None:
        changes = row.base if trial.side == "base" else (*row.base, *row.change)
        self._ledger.begin_trial(trial.trial_id, boot=boot_id())
        try:
            result = await self._attempt(row, trial, apply_changes(self._config, changes))
        except BaseException:
            self._ledger.replan_trial(trial.trial_id, by_machine=False)  # we are being stopped: it runs again
            raise
        if trial.side == "base" and result.outcome != "measured":
            self._ledger.replan_trial(trial.trial_id, by_machine=False)
            after = f" (experiment {row.name!r}, changes {[change.text for change in changes]})"
            raise KnownGoodFailed(f"the settings to compare with do not run{after}: {result.message}")
        self._ledger.end_trial(trial.trial_id, result, _provenance())
        log.info(
            "trial", experiment=row.name, side=trial.side, outcome=result.outcome, load_s=result.load_s,
            message=result.message or None,
        )  # fmt: skip
        if not result.is_reverted:
            raise NotReverted(f"something of trial {trial.trial_id} ({row.name}) is still there: see the log above")

    async def _attempt(self, row: ExperimentRow, trial: TrialRow, config: SGLangConfig) -> TrialResult:
        """One start; settings that are known to run get another try."""
        left = _BASE_ATTEMPTS if trial.side == "base" else 1
        while True:
            left -= 1
            result = await self._trials.run(
                trial.trial_id,
                config,
                on_started=lambda leader: self._ledger.note_leader(trial.trial_id, leader),
                on_phase=lambda phase, share: self._on_trial(row.name, trial.side, phase, share),
            )
            if result.outcome == "measured" or left == 0 or not result.is_reverted:
                return result
            log.warning("known-good failed, once more", reason=result.message)

    def review(self) -> None:
        """Judge the comparisons of the plan again with all that is known of the noise by now; nothing runs again."""
        trials = self._ledger.trials(self._setup.key)
        for row in self._rows():
            if row.kind != "single" or row.verdict not in COMPARED:
                continue
            own = sorted((t for t in trials if t.experiment_id == row.experiment_id), key=lambda t: t.sequence)
            name, detail = self._compared(own)
            if (name, detail) != (row.verdict, row.detail):
                self._ledger.end_experiment(row.experiment_id, name, detail)
                log.info("reviewed", name=row.name, before=row.verdict, verdict=name, **_short(detail))

    # ------------------------------------------------------------ verdicts

    def _verdict(self, row: ExperimentRow, own: Sequence[TrialRow]) -> tuple[VerdictName, dict[str, Any]] | None:
        """What the trials so far decide; None while more are needed."""
        done = [trial for trial in own if trial.result is not None]
        for trial in done:
            result = trial.result
            assert result is not None
            if result.outcome != "measured":
                return result.outcome, _failure_detail(result)
            share = agreement([each.answer for each in self._answers(done)], result.answer)
            if trial.side == "changed" and share < self._plan.rules.min_agreement:
                message = f"only {share:.0%} of the greedy answer is that of the unchanged settings"
                return "wrong_output", {"message": message, "agreement": round(share, 3)}
        if any(trial.state != "done" for trial in own):
            return None
        return self._compared(done)

    def _compared(self, done: Sequence[TrialRow]) -> tuple[VerdictName, dict[str, Any]]:
        """Of an experiment that is measured whole."""
        base = [trial.result for trial in done if trial.side == "base" and trial.result is not None]
        changed = [trial.result for trial in done if trial.side == "changed" and trial.result is not None]
        sigma, degrees = noise(self._scores_of_equals())
        found = compare(
            base,
            changed,
            objective=self._plan.objective,
            sigma=sigma,
            degrees=degrees,
            min_gain=self._plan.rules.min_gain,
            resolution=self._plan.rules.resolution,
        )
        detail = {key: value for key, value in asdict(found).items() if key not in ("by_metric", "verdict")}
        detail = {key: round(value, 5) if isinstance(value, float) else value for key, value in detail.items()}
        detail["by_metric"] = [[*metric, round(change, 5)] for metric, change in found.by_metric.items()]
        return found.verdict, detail

    def _answers(self, done: Sequence[TrialRow]) -> list[TrialResult]:
        return [trial.result for trial in done if trial.side == "base" and trial.result is not None]

    def _scores_of_equals(self) -> list[list[float]]:
        """ln(score) of all measured trials, one list per settings, in order of time."""
        rows = {row.experiment_id: row for row in self._rows()}
        groups: dict[str, list[float]] = {}
        for trial in self._ledger.trials(self._setup.key):
            if trial.result is None or trial.result.outcome != "measured":
                continue
            row = rows[trial.experiment_id]
            changes = row.base if trial.side == "base" else (*row.base, *row.change)
            key = repr(sorted(change.text for change in changes))
            groups.setdefault(key, []).append(log_score(trial.result, self._plan.objective))
        return list(groups.values())


def _failure_detail(result: TrialResult) -> dict[str, Any]:
    detail: dict[str, Any] = {"message": result.message, "phase": result.phase}
    if result.diagnosis is not None:
        detail["diagnosis"] = {
            "name": result.diagnosis.name,
            "cause": result.diagnosis.cause,
            "remedy": result.diagnosis.remedy,
            "source": result.diagnosis.source,
            "evidence": result.diagnosis.evidence,
        }
    return detail


def _short(detail: dict[str, Any]) -> dict[str, Any]:
    return {key: detail[key] for key in ("gain", "low", "high", "noise", "message") if key in detail}


def _provenance() -> dict[str, Any]:
    return {
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
