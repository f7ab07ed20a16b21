"""The ledger by itself: states, uniqueness, recovery."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verifier.tuning.change import Change
from verifier.tuning.ledger import Ledger
from verifier.tuning.process_tree import Leader, boot_id, end_session, leader_of
from verifier.tuning.records import Series, TrialResult

A = Change(kind="arg", key="--a", values=("1",))
B = Change(kind="env", key="B", values=None)
RESULT = TrialResult(
    outcome="measured",
    series=(Series(metric="verify_ms", batch_size=2, num_draft_tokens=3, values=(1.5, 2.5)),),
    answer=(1, 2),
    load_s=3.0,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.enter_setup("s1", {"x": 1})
        yield ledger


def plan(ledger: Ledger, setup: str = "s1", base: tuple[Change, ...] = (), change: tuple[Change, ...] = (A,)) -> None:
    ledger.plan_experiment(setup, name="a", kind="single", rank=1, base=base, change=change, sides=("base", "changed"))


def test_an_experiment_is_entered_once_for_each_setup(ledger: Ledger) -> None:
    plan(ledger)
    plan(ledger)
    assert len(ledger.experiments("s1")) == 1
    assert [trial.side for trial in ledger.trials("s1")] == ["base", "changed"]
    plan(ledger, change=(B,))
    plan(ledger, base=(B,))
    assert len(ledger.experiments("s1")) == 3
    ledger.enter_setup("s2", {})
    plan(ledger, setup="s2")
    assert len(ledger.experiments("s2")) == 1
    assert ledger.facts("s1") == {"x": 1}


def test_results_come_back_as_they_were(ledger: Ledger) -> None:
    plan(ledger)
    trial = ledger.trials("s1")[0]
    ledger.begin_trial(trial.trial_id, boot="b")
    ledger.end_trial(trial.trial_id, RESULT, {"date": "today"})
    done = next(each for each in ledger.trials("s1") if each.trial_id == trial.trial_id)
    assert (done.state, done.result, done.provenance) == ("done", RESULT, {"date": "today"})
    ledger.end_trial(trial.trial_id, TrialResult(outcome="crashed"), {})  # done is done
    assert ledger.trials("s1")[0].result == RESULT


def test_a_verdict_drops_what_is_not_needed_any_more(ledger: Ledger) -> None:
    plan(ledger)
    first = ledger.trials("s1")[0]
    ledger.begin_trial(first.trial_id, boot="b")
    ledger.end_trial(first.trial_id, TrialResult(outcome="crashed", message="m"), {})
    (row,) = ledger.experiments("s1")
    assert row.state == "running"
    ledger.end_experiment(row.experiment_id, "crashed", {"message": "m"})
    (row,) = ledger.experiments("s1")
    assert (row.state, row.verdict, row.detail, row.change, row.base) == ("done", "crashed", {"message": "m"}, (A,), ())
    assert len(ledger.trials("s1")) == 1


def test_an_interrupted_trial_runs_again(tmp_path: Path, ledger: Ledger) -> None:
    plan(ledger)
    trial = ledger.trials("s1")[0]
    ledger.begin_trial(trial.trial_id, boot="other boot")
    assert ledger.interrupted() == [(trial.trial_id, None, "other boot")]
    leader = Leader(pid=2, start_ticks=3, boot="other boot")
    ledger.note_leader(trial.trial_id, leader)
    assert ledger.interrupted() == [(trial.trial_id, leader, "other boot")]
    assert ledger.replan_trial(trial.trial_id, by_machine=True) == 1
    assert ledger.replan_trial(trial.trial_id, by_machine=True) == 1  # it does not run any more
    assert ledger.interrupted() == []
    again = next(each for each in ledger.trials("s1") if each.trial_id == trial.trial_id)
    assert (again.state, again.interruptions) == ("planned", 1)


@pytest.mark.integration
@pytest.mark.slow
def test_only_the_very_session_is_ended() -> None:
    script = "import os, subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        time.sleep(0.3)
        leader = leader_of(process.pid)
        assert leader is not None
        other = Leader(pid=leader.pid, start_ticks=leader.start_ticks + 1, boot=leader.boot)
        assert end_session(other) == []  # the number is someone else's now
        assert process.poll() is None
        assert end_session(Leader(pid=leader.pid, start_ticks=leader.start_ticks, boot="another")) == []
        assert process.poll() is None
        assert end_session(leader) == []
        process.wait(5)
    finally:
        process.kill()
        process.wait()
    assert leader_of(process.pid) is None
    assert boot_id()
    assert leader_of(os.getpid()) is not None
