"""Plans: every shipped one loads, and a bad one names what is wrong."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from breakeven.settings import load_settings
from tests.verifier.tuning.conftest import PLAN, experiment_text
from verifier.allreduce.capabilities import STRATEGIES
from verifier.sglang.config import SGLangConfig
from verifier.tuning.plan import find_plan, load_plan
from verifier.tuning.tune import _plan_name
from wire.settings import ConfigError

PLANS = sorted(Path(str(resources.files("configs"))).glob("plans/*.toml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_shipped_plan_loads_and_names_known_strategies(path: Path) -> None:
    plan = load_plan(path)
    known = {strategy.name for strategy, _ in STRATEGIES}
    assert plan.experiments
    assert [experiment.rank for experiment in plan.experiments] == sorted(e.rank for e in plan.experiments)
    for experiment in plan.experiments:
        assert experiment.strategy is None or experiment.strategy in known, experiment.name
        assert experiment.why
        assert experiment.source


def test_the_founding_cases_experiments_are_all_there() -> None:
    seeds = {e.seed.subject for e in load_plan(find_plan("pcie")).experiments if e.seed is not None}
    assert seeds == {
        "lower --cuda-graph-max-bs",
        "FlashInfer all-reduce fusion",
        "SGLang's custom all-reduce",
        "torch symmetric memory",
        "expert parallelism",
        "NCCL: 1-2 channels, 128 KiB buffer, 64 threads",
    }


def test_plan_by_profile() -> None:
    from verifier.tuning.config import TuneConfig

    for profile, name in (("cpu-smollm2", "cpu"), ("kimi-k2.5-8x-rtx-pro-6000", "pcie")):
        assert _plan_name(load_settings(profile, {}).section("sglang", SGLangConfig), TuneConfig()) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\n', "exactly one of arg and env"),
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\narg = "--a"\nenv = "B"\n', "exactly one of arg and env"),
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\narg = "page-size"\n', "must be a flag"),
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\nenv = "A"\nvalue = [1, 2]\n', "one text or number"),
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\nenv = "A"\n', "one text or number"),
        ('[[experiment]]\nname = "x"\nrank = 1\nwhy = "w"\narg = "--a"\ncolour = 1\n', "colour"),
        (experiment_text("x", 1, "--a", "1") + experiment_text("x", 2, "--b", "1"), "a name of its own"),
        ("[broken", "plan.toml"),
    ],
)
def test_bad_plans_say_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN + text)
    with pytest.raises(ConfigError, match=message):
        load_plan(path)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("repeats = 2", "repeats = 1", "rules.repeats"),
        ("min_gain = 0.05", "min_gain = 2.0", "rules.min_gain"),
        ("batch_sizes = [2]", "batch_sizes = [0]", "workload.batch_sizes"),
        ("batch_sizes = [2]", "batch_sizes = []", "workload.batch_sizes"),
        ("num_draft_tokens = [2]", "num_draft_tokens = [99]", "workload.num_draft_tokens"),
        ("plain_tokens = 4", "plain_tokens = 1", "workload.plain_tokens"),
    ],
)
def test_ranges(tmp_path: Path, old: str, new: str, key: str) -> None:
    path = tmp_path / "plan.toml"
    assert old in PLAN
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(ConfigError, match=key):
        load_plan(path)


def test_unknown_plan() -> None:
    with pytest.raises(ConfigError, match="not one of cpu, pcie"):
        find_plan("nothing")
    with pytest.raises(ConfigError, match="can't be read"):
        load_plan(Path("/nowhere/plan.toml"))
