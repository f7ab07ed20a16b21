"""The tune command: what it prints without a GPU, and the page that is made of its ledgers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from breakeven.cli import app
from tools.fast_verify_docs import RESULTS, render
from verifier.tuning.plan import find_plan, load_plan
from wire.settings import ConfigError

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]


def test_fast_verify_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "fast-verify.md").read_text() == render(ROOT), "run: python -m tools.fast_verify_docs"


def test_every_seed_experiment_has_its_entry_in_a_ledger() -> None:
    ledgers = [json.loads(path.read_text()) for path in (ROOT / RESULTS).glob("*.json")]
    entered = {each["name"]: each["verdict"] for ledger in ledgers for each in ledger["experiments"]}
    for experiment in load_plan(find_plan("pcie")).experiments:
        assert entered.get(experiment.name), experiment.name


@pytest.mark.slow
def test_probe_prints_on_any_machine() -> None:
    result = RUNNER.invoke(app, ["tune", "--probe", "--profile", "cpu-smollm2", "--sglang.python", sys.executable])
    assert result.exit_code == 0
    assert "| strategy | possible here |" in result.output
    assert "SGLang pcie_ipc" in result.output


@pytest.mark.slow
def test_experiments_that_can_not_run_here_are_ruled_out_without_a_start(tmp_path: Path) -> None:
    flags = ["--profile", "kimi-k2.5-8x-rtx-pro-6000", "--sglang.python", sys.executable]
    flags += ["--tune.state-dir", str(tmp_path), "--tune.only", "torch-symm-mem"]
    result = RUNNER.invoke(app, ["tune", *flags])
    assert result.exit_code == 0, result.output
    (report,) = tmp_path.glob("report/*/report.md")
    assert "| torch-symm-mem | `--enable-torch-symm-mem` | not_possible |" in report.read_text()
    assert (tmp_path / "best-kimi-k2.5-8x-rtx-pro-6000.toml").is_file()
    assert not list(tmp_path.glob("trials/**/sglang.log"))
    again = RUNNER.invoke(app, ["tune", "--report", *flags])
    assert again.exit_code == 0


def test_bad_settings_name_the_key(tmp_path: Path) -> None:
    def failure(*flags: str) -> str:
        result = RUNNER.invoke(app, ["tune", "--profile", "cpu-smollm2", "--tune.state-dir", str(tmp_path), *flags])
        assert isinstance(result.exception, ConfigError)
        return str(result.exception)

    assert "no such experiment in the plan: nothing" in failure("--tune.only", "nothing")
    assert "tune.max_trials" in failure("--tune.max-trials", "-1")
    assert "not one of cpu, pcie" in failure("--tune.plan", "gpu")
