"""Campaigns over a runner that only says how fast settings are: order, combinations, review, recovery. No processes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.verifier.tuning.conftest import PLAN, experiment_text
from verifier.sglang.config import SGLangConfig
from verifier.tuning.campaign import Campaign
from verifier.tuning.errors import KnownGoodFailed, NotReverted, Paused
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import Plan, load_plan
from verifier.tuning.process_tree import Leader
from verifier.tuning.records import Series, TrialResult
from verifier.tuning.schedule import best_changes
from verifier.tuning.setup import Setup

# Seconds per token are divided by these where the setting is present.
FACTORS = {"--a": 1.2, "--b": 1.1, "--c": 0.8, "--d": 1.0}


class Runner:
    """Settings to speed, with a little noise; ``fails`` names settings and what happens with them."""

    def __init__(self, *, sigma: float = 0.005, fails: dict[str, TrialResult] | None = None) -> None:
        self.seen: list[tuple[str, ...]] = []
        self.fails = fails or {}
        self._rng = random.Random(3)
        self._sigma = sigma

    async def run(
        self,
        trial_id: int,
        config: SGLangConfig,
        *,
        on_started: Callable[[Leader], None],
        on_phase: Callable[[str, float], None],
    ) -> TrialResult:
        flags = tuple(arg for arg in config.args if arg.startswith("--"))
        self.seen.append(flags)
        on_started(Leader(pid=1 << 22, start_ticks=1, boot="x"))
        on_phase("ready", 1.0)
        for flag in flags:
            if flag in self.fails:
                return self.fails[flag]
        rate = 80.0 * (1.0 + self._rng.gauss(0.0, self._sigma))
        for flag in flags:
            # Together, --a and --b are worth less than alone.
            rate *= FACTORS[flag] if not ({"--a", "--b"} <= set(flags) and flag == "--b") else 1.06
        series = Series(metric="plain_tok_per_s", batch_size=1, num_draft_tokens=0, values=(rate,))
        return TrialResult(outcome="measured", series=(series,), answer=(1, 2, 3))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        yield ledger


def plan_of(tmp_path: Path, *flags: str) -> Plan:
    path = tmp_path / "plan.toml"
    text = PLAN.replace("min_gain = 0.05", "min_gain = 0.02").replace("repeats = 2", "repeats = 3")
    path.write_text(text + "".join(experiment_text(f[2:], i, f, "1") for i, f in enumerate(flags)))
    return load_plan(path)


def campaign(
    ledger: Ledger, plan: Plan, runner: Runner, *, impossible: dict[str, str] | None = None, max_trials: int = 0
) -> Campaign:
    return Campaign(
        SGLangConfig(),
        plan,
        Setup(key="s", facts={}),
        ledger,
        runner,
        impossible=impossible or {},
        max_trials=max_trials,
    )


@pytest.mark.slow
async def test_known_good_first_one_change_at_a_time_then_winners_together(tmp_path: Path, ledger: Ledger) -> None:
    runner = Runner()
    plan = plan_of(tmp_path, "--c", "--a", "--d", "--b")
    await campaign(ledger, plan, runner, impossible={"d": "not here"}).run()
    rows = {row.name: row.verdict for row in ledger.experiments("s")}
    assert rows == {
        "c": "slower",
        "a": "faster",
        "d": "not_possible",
        "b": "faster",
        "b on top of 1": "faster",
        "all winners together": "faster",
    }
    assert runner.seen[0] == ()
    assert runner.seen[:6] == [(), ("--c",), ("--c",), (), (), ("--c",)]
    assert ("--d",) not in runner.seen
    assert [change.key for change in best_changes(ledger.experiments("s"))] == ["--a", "--b"]
    assert runner.seen[-6:].count(("--a", "--b")) == 3
    count = len(runner.seen)
    await campaign(ledger, plan, runner).run()
    assert len(runner.seen) == count


@pytest.mark.slow
async def test_it_pauses_after_any_number_of_trials_and_goes_on(tmp_path: Path, ledger: Ledger) -> None:
    plan = plan_of(tmp_path, "--c", "--a", "--b")
    whole = Runner()
    with contextlib.closing(Ledger(tmp_path / "other.sqlite")) as other:
        await campaign(other, plan, whole).run()
    pieces = Runner()
    for _ in range(100):
        try:
            await campaign(ledger, plan, pieces, max_trials=1).run()
            break
        except Paused:
            continue
    assert pieces.seen == whole.seen


async def test_what_fails_is_not_started_a_second_time(tmp_path: Path, ledger: Ledger) -> None:
    wrong = TrialResult(outcome="measured", series=(), answer=(9, 9, 9))
    runner = Runner(fails={"--a": TrialResult(outcome="stalled", message="m", phase="p"), "--b": wrong})
    await campaign(ledger, plan_of(tmp_path, "--a", "--b"), runner).run()
    rows = {row.name: (row.verdict, row.detail["message"]) for row in ledger.experiments("s")}
    assert rows["a"] == ("stalled", "m")
    assert rows["b"][0] == "wrong_output"
    assert runner.seen == [(), ("--a",), (), ("--b",)]


async def test_what_is_left_behind_stops_the_campaign_but_not_its_record(tmp_path: Path, ledger: Ledger) -> None:
    left = TrialResult(outcome="crashed", message="m", is_reverted=False)
    runner = Runner(fails={"--a": left})
    with pytest.raises(NotReverted):
        await campaign(ledger, plan_of(tmp_path, "--a", "--b"), runner).run()
    assert [trial.state for trial in ledger.trials("s")].count("done") == 2
    await campaign(ledger, plan_of(tmp_path, "--a", "--b"), Runner()).run()
    assert {row.name: row.verdict for row in ledger.experiments("s")}["a"] == "crashed"


async def test_known_good_gets_three_tries(tmp_path: Path, ledger: Ledger) -> None:
    runner = Runner()
    runner.fails = {"--a": TrialResult(outcome="late", message="m")}
    config = SGLangConfig(args=("--a",))
    plan = plan_of(tmp_path, "--b")
    broken = Campaign(config, plan, Setup(key="s", facts={}), ledger, runner, impossible={})
    with pytest.raises(KnownGoodFailed, match="m"):
        await broken.run()
    assert runner.seen == [("--a",)] * 3


async def test_a_change_that_takes_the_machine_down_twice_is_not_tried_again(tmp_path: Path, ledger: Ledger) -> None:
    plan = plan_of(tmp_path, "--a", "--b")

    class Gone(Campaign):
        async def _run_trial(self, row, trial) -> None:  # type: ignore[no-untyped-def]
            if trial.side == "changed" and row.name == "a":
                ledger.begin_trial(trial.trial_id, boot="before")
                ledger.note_leader(trial.trial_id, Leader(pid=1 << 22, start_ticks=1, boot="before"))
                raise SystemExit
            await super()._run_trial(row, trial)

    for _ in range(2):
        with pytest.raises(SystemExit):
            await Gone(SGLangConfig(), plan, Setup(key="s", facts={}), ledger, Runner(), impossible={}).run()
    await campaign(ledger, plan, Runner()).run()
    rows = {row.name: row for row in ledger.experiments("s")}
    assert rows["a"].verdict == "machine_down"
    assert rows["b"].verdict == "faster"


async def test_comparisons_are_judged_again_when_more_is_known_of_the_noise(tmp_path: Path, ledger: Ledger) -> None:
    plan = plan_of(tmp_path, "--a", "--c", "--d")
    await campaign(ledger, plan, Runner(sigma=0.03)).run()
    rows = {row.name: row for row in ledger.experiments("s") if row.kind == "single"}
    noises = {row.detail["noise"] for row in rows.values()}
    assert len(noises) == 1  # all by the same, last estimate


@pytest.mark.slow
async def test_more_repeats_decide_what_the_noise_hid_and_repeat_nothing(tmp_path: Path, ledger: Ledger) -> None:
    runner = Runner(sigma=0.05)
    plan = plan_of(tmp_path, "--b")
    await campaign(ledger, plan, runner).run()
    assert [row.verdict for row in ledger.experiments("s")] == ["undecided"]
    assert len(runner.seen) == 6
    before = {trial.trial_id: trial.result for trial in ledger.trials("s")}
    path = tmp_path / "plan.toml"
    path.write_text(path.read_text().replace("repeats = 3", "repeats = 20"))
    await campaign(ledger, load_plan(path), runner).run()
    (row,) = [row for row in ledger.experiments("s") if row.kind == "single"]
    assert row.verdict == "faster"
    assert len(runner.seen) == 40
    after = {trial.trial_id: trial.result for trial in ledger.trials("s")}
    assert {key: after[key] for key in before} == before
