"""Export, page and profile of a ledger that was filled by hand."""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path

import pytest

from breakeven.settings import SECTIONS, find_profile, load_settings
from tests.verifier.tuning.conftest import PLAN, experiment_text
from tests.verifier.tuning.test_verdict import trial
from verifier.sglang.config import SGLangConfig
from verifier.tuning.best_profile import best_profile
from verifier.tuning.change import Change
from verifier.tuning.export import export_setup
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import load_plan
from verifier.tuning.records import TrialResult
from verifier.tuning.report import plot_gains, report_page
from wire.settings import load_profile

FAST = Change(kind="arg", key="--fast", values=("1",))
MACHINE = {"gpus": [], "processor": "P", "cores": 2}


def filled(tmp_path: Path) -> Ledger:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.enter_setup("s1", {"machine": MACHINE, "versions": {"sglang": "0.5.23"}})
    for name, change in (("fast", FAST), ("dead", Change(kind="arg", key="--dead", values=("1",)))):
        ledger.plan_experiment(
            "s1", name=name, kind="single", rank=1, base=(), change=(change,), sides=("base", "changed")
        )
    results = {"base": trial(80.0, 30.0), "changed": trial(100.0, 20.0)}
    rows = {row.name: row for row in ledger.experiments("s1")}
    for each in ledger.trials("s1"):
        if each.experiment_id == rows["fast"].experiment_id:
            ledger.begin_trial(each.trial_id, boot="b")
            ledger.end_trial(each.trial_id, results[each.side], {})
    moved = [["plain_tok_per_s", 1, 0, 0.25], ["verify_ms", 1, 3, -0.333]]
    detail = {"gain": 0.37, "low": 0.3, "high": 0.45, "by_metric": moved}
    ledger.end_experiment(rows["fast"].experiment_id, "faster", detail)
    diagnosis = {"name": "x", "cause": "the memory is full", "remedy": "less", "source": "here", "evidence": "e"}
    ledger.end_experiment(rows["dead"].experiment_id, "crashed", {"message": "it died", "diagnosis": diagnosis})
    return ledger


def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN + experiment_text("fast", 1, "--fast", "1") + experiment_text("dead", 1, "--dead", "1"))
    return path


def test_page_says_what_won_what_died_and_what_drafting_costs(tmp_path: Path) -> None:
    with contextlib.closing(filled(tmp_path)) as ledger:
        data = export_setup(ledger, "s1", load_plan(plan_path(tmp_path)), profile="p")
    page = report_page(data, plot="gains.png")
    assert "| fast | `--fast 1` | **faster** | +37.0% | +30.0% to +45.0% |" in page
    assert "tok/s B=1 +25.0%, verify K=3 B=1 -33.3%" in page
    assert "- **dead** (crashed): it died" in page
    assert "the memory is full. Remedy: less (here)." in page
    assert "| 1 | 3 | 10 | 20 | 2.00 |" in page  # of the best settings
    assert "![gains](gains.png)" in page
    assert data["best"] == ["--fast 1"]
    assert data["known_good"][0]["median"] == 80.0
    assert plot_gains(data, tmp_path / "gains.png")
    assert (tmp_path / "gains.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_done_yet_prints_too(tmp_path: Path) -> None:
    with contextlib.closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        ledger.enter_setup("s1", {"machine": MACHINE, "versions": {}})
        data = export_setup(ledger, "s1", load_plan(plan_path(tmp_path)), profile="p")
    assert "Not measured yet." in report_page(data)
    assert not plot_gains(data, tmp_path / "gains.png")


@pytest.mark.parametrize("profile", ["cpu-smollm2", "kimi-k2.5-8x-rtx-pro-6000"])
def test_best_profile_is_the_profile_with_the_changes(tmp_path: Path, profile: str) -> None:
    tables = load_profile(find_profile(profile))
    config = load_settings(profile, {}).section("sglang", SGLangConfig)
    changes = (
        Change(kind="arg", key="--page-size", values=("16",)),
        Change(kind="env", key="NCCL_P2P_LEVEL", values=None),
    )
    text = best_profile(tables, config, changes, comments=["tuned"], num_draft_tokens=5)
    path = tmp_path / "best.toml"
    path.write_text(text)
    settings = load_settings(str(path), {})
    for name, cls in SECTIONS.items():
        settings.section(name, cls)
    found = settings.section("sglang", SGLangConfig)
    assert found.args[found.args.index("--page-size") + 1] == "16"
    assert not any(entry.startswith("NCCL_P2P_LEVEL") for entry in found.env)
    assert tomllib.loads(text)["speculation"]["num_draft_tokens"] == 5
    assert "# --page-size 16 (before: 1)" in text
    unchanged = best_profile(tables, config, (), comments=[], num_draft_tokens=0)
    assert tomllib.loads(unchanged) == tables


def test_failed_trials_are_in_the_export(tmp_path: Path) -> None:
    with contextlib.closing(filled(tmp_path)) as ledger:
        (dead,) = [row for row in ledger.experiments("s1") if row.name == "dead"]
        assert dead.detail["message"] == "it died"
        data = export_setup(ledger, "s1", load_plan(plan_path(tmp_path)), profile="p")
    assert [each["verdict"] for each in data["experiments"]] == ["faster", "crashed"]
    assert isinstance(TrialResult(outcome="crashed").log_tail, tuple)
