"""Campaigns on a scripted engine: a real child process with SGLang's log and HTTP, that misbehaves as it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verifier.tuning.conftest import PLAN, experiment_text, living_children, scripted_config
from verifier.allreduce.probe_identity import machine_identity
from verifier.sglang.config import SGLangConfig
from verifier.tuning.campaign import Campaign
from verifier.tuning.errors import KnownGoodFailed, LedgerBusy, Paused
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import Plan, load_plan
from verifier.tuning.records import ExperimentRow
from verifier.tuning.schedule import best_changes
from verifier.tuning.setup import Setup, describe_setup
from verifier.tuning.trial import EngineTrials

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("quick_look")]


@pytest.fixture
def ledger(engine_dir: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(engine_dir / "ledger.sqlite")) as ledger:
        yield ledger


def plan_of(engine_dir: Path, *experiments: str) -> Plan:
    path = engine_dir / "plan.toml"
    path.write_text(PLAN + "".join(experiments))
    return load_plan(path)


def campaign_of(
    config: SGLangConfig, plan: Plan, ledger: Ledger, engine_dir: Path, *, max_trials: int = 0, **extra: object
) -> tuple[Campaign, Setup]:
    setup = describe_setup(config, model_path=config.model_path, workload=plan.workload, machine=machine_identity())
    trials = EngineTrials(
        config, model_path=config.model_path, rules=plan.rules, workload=plan.workload, dir_path=engine_dir / "trials"
    )
    return Campaign(config, plan, setup, ledger, trials, impossible={}, max_trials=max_trials), setup


def by_name(rows: list[ExperimentRow]) -> dict[str, ExperimentRow]:
    return {row.name: row for row in rows}


async def test_every_way_to_fail_is_told_apart_and_reverted(
    engine_dir: Path, ledger: Ledger, unused_tcp_port: int
) -> None:
    config = scripted_config(engine_dir, unused_tcp_port, base_s=0.005)
    behaviours = ("crash", "stall", "nccl", "silent", "wrong")
    plan = plan_of(engine_dir, *(experiment_text(b, i, "--behave", b) for i, b in enumerate(behaviours)))
    campaign, setup = campaign_of(config, plan, ledger, engine_dir)
    await campaign.run()
    rows = by_name(ledger.experiments(setup.key))
    verdicts = {name: row.verdict for name, row in rows.items()}
    assert verdicts == {
        "crash": "crashed", "stall": "stalled", "nccl": "hung", "silent": "hung", "wrong": "wrong_output"
    }  # fmt: skip
    assert rows["crash"].detail["diagnosis"]["name"] == "cuda_oom"
    assert "Tried to allocate" in rows["crash"].detail["diagnosis"]["evidence"]
    assert rows["stall"].detail["phase"] == "loading weights"
    assert rows["nccl"].detail["diagnosis"]["name"] == "nccl_hang"
    assert "cores meanwhile" in rows["silent"].detail["message"]
    trials = ledger.trials(setup.key)
    results = [trial.result for trial in trials if trial.result is not None]
    assert len(results) == len(trials)  # what a verdict made needless was dropped
    assert all(result.is_reverted for result in results)
    stalled = next(result for result in results if result.outcome == "stalled")
    assert any(" 19% " in line for line in stalled.log_tail)
    assert not living_children()
    assert best_changes(ledger.experiments(setup.key)) == ()


async def test_slower_and_faster_are_told_from_noise(engine_dir: Path, ledger: Ledger, unused_tcp_port: int) -> None:
    config = scripted_config(engine_dir, unused_tcp_port)
    behaviours = ("fast", "slow")
    plan = plan_of(engine_dir, *(experiment_text(b, i, "--behave", b) for i, b in enumerate(behaviours)))
    campaign, setup = campaign_of(config, plan, ledger, engine_dir)
    await campaign.run()
    rows = by_name(ledger.experiments(setup.key))
    assert {name: row.verdict for name, row in rows.items()} == {"fast": "faster", "slow": "slower"}
    assert rows["fast"].detail["gain"] > 0.1
    assert rows["slow"].detail["gain"] < -0.1
    assert [change.text for change in best_changes(ledger.experiments(setup.key))] == ["--behave fast"]
    # A second campaign on the same setup starts nothing.
    before = ledger.trials(setup.key)
    again, same_setup = campaign_of(config, plan, ledger, engine_dir)
    await again.run()
    assert same_setup.key == setup.key
    assert ledger.trials(setup.key) == before


async def test_what_it_left_in_another_session_is_ended(engine_dir: Path, ledger: Ledger, unused_tcp_port: int) -> None:
    config = scripted_config(engine_dir, unused_tcp_port, base_s=0.005)
    plan = plan_of(engine_dir, experiment_text("leave", 1, "--behave", "leave"))
    campaign, _ = campaign_of(config, plan, ledger, engine_dir, max_trials=2)
    with pytest.raises(Paused):
        await campaign.run()
    assert not living_children()


async def test_known_good_that_does_not_run_ends_the_campaign(
    engine_dir: Path, ledger: Ledger, unused_tcp_port: int
) -> None:
    config = scripted_config(engine_dir, unused_tcp_port, base_s=0.005)
    config = SGLangConfig(**{**_fields(config), "args": ("--behave", "crash")})
    plan = plan_of(engine_dir, experiment_text("fast", 1, "--behave", "fast"))
    campaign, setup = campaign_of(config, plan, ledger, engine_dir)
    with pytest.raises(KnownGoodFailed, match="memory is full"):
        await campaign.run()
    assert [trial.state for trial in ledger.trials(setup.key)] == ["planned"] * 4
    with pytest.raises(LedgerBusy):
        Ledger(engine_dir / "ledger.sqlite")


def _fields(config: SGLangConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in SGLangConfig.__dataclass_fields__}
