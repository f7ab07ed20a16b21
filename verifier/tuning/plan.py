"""A plan of experiments: TOML to frozen records. Every experiment is one change; unknown keys are errors."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from verifier.tuning.change import Change
from wire.settings import ConfigError

__all__ = ["Experiment", "Objective", "Plan", "Rules", "SeedNote", "Workload", "find_plan", "load_plan"]


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is measured and what counts as a win.

    Fields:
        repeats: engine starts per side of a comparison, interleaved with known-good.
        min_gain: smallest relative gain that is worth a setting, beside being above the noise.
        resolution: "same" means that a gain or loss of so much can be excluded; else it is undecided.
        min_agreement: smallest share of the known-good's greedy answer that must come again, else it is wrong output.
        measure_timeout_s: for the whole workload. hang_timeout_s: for one answer.
    """

    repeats: int = 3
    min_gain: float = 0.01
    resolution: float = 0.05
    min_agreement: float = 0.5
    measure_timeout_s: float = 900.0
    hang_timeout_s: float = 120.0


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine start is measured with.

    Fields:
        prompt_tokens: length of every prompt. batch_sizes: requests at once.
        plain_tokens: tokens per stream and window of plain decode; windows: how many, after one for warming up.
        num_draft_tokens: every K whose verify pass is timed; verify_rounds: how often.
    """

    prompt_tokens: int = 256
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    plain_tokens: int = 64
    windows: int = 3
    num_draft_tokens: tuple[int, ...] = (1, 3, 5)
    verify_rounds: int = 12
    seed: int = 7


class Objective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is made larger: exponents of plain tok/s and of verify passes per second, geometric mean over batch sizes.

    acceptance_rate: of a draft token, for the break-even table and the choice of K.
    """

    plain: float = 1.0
    verify: float = 1.0
    acceptance_rate: float = 0.6


class SeedNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known about an experiment from elsewhere. subject: the line of docs/fast-verify.md it belongs to."""

    subject: str
    claim: str
    today: str


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    rank: int
    why: str
    source: str = ""
    arg: str | None = None
    env: str | None = None
    value: str | int | float | bool | list[str | int] = True
    needs: Literal["", "gpu"] = ""
    strategy: str | None = None
    seed: SeedNote | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    rules: Rules = Rules()
    workload: Workload = Workload()
    objective: Objective = Objective()
    experiment: list[_Entry] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One line of the plan.

    Fields:
        rank: order of trying, lowest first. needs: "gpu" if it means nothing without one.
        strategy: the all-reduce it needs, a name of the capability table, or None.
    """

    name: str
    rank: int
    why: str
    source: str
    change: Change
    needs: str
    strategy: str | None
    seed: SeedNote | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole plan; experiments by rank."""

    title: str
    rules: Rules
    workload: Workload
    objective: Objective
    experiments: tuple[Experiment, ...]


def find_plan(name: str) -> Path:
    """A path as it is, or a plan of configs/plans by its name.

    Raises:
        ConfigError: neither.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return path
    bundled = Path(str(resources.files("configs"))) / "plans" / f"{name}.toml"
    if not bundled.is_file():
        known = sorted(p.stem for p in bundled.parent.glob("*.toml"))
        raise ConfigError("plan", f"{name!r} is not one of {', '.join(known)} and not a .toml file")
    return bundled


def load_plan(path: Path) -> Plan:
    """Read and check a plan.

    Raises:
        ConfigError: it can't be read, has unknown keys, or an experiment is not exactly one change.
    """
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text())
        file = msgspec.convert(data, _File)
    except OSError as error:
        raise ConfigError(str(path), f"can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(str(path), str(error)) from None
    experiments = sorted((_experiment(entry) for entry in file.experiment), key=lambda e: (e.rank, e.name))
    plan = Plan(
        title=file.title,
        rules=file.rules,
        workload=file.workload,
        objective=file.objective,
        experiments=tuple(experiments),
    )
    _check(plan)
    return plan


def _experiment(entry: _Entry) -> Experiment:
    where = f"experiment {entry.name!r}"
    if (entry.arg is None) == (entry.env is None):
        raise ConfigError(where, "needs exactly one of arg and env: an experiment is one change")
    if entry.arg is not None and not entry.arg.startswith("--"):
        raise ConfigError(where, "arg must be a flag, as --page-size")
    value = entry.value
    values: tuple[str, ...] | None
    if isinstance(value, bool):
        values = () if value else None
    elif isinstance(value, list):
        values = tuple(str(each) for each in value)
    else:
        values = (str(value),)
    if entry.env is not None and values is not None and len(values) != 1:
        raise ConfigError(where, "value of a variable must be one text or number, or false to remove it")
    change = Change(kind="env" if entry.arg is None else "arg", key=entry.arg or entry.env or "", values=values)
    return Experiment(
        name=entry.name,
        rank=entry.rank,
        why=entry.why,
        source=entry.source,
        change=change,
        needs=entry.needs,
        strategy=entry.strategy,
        seed=entry.seed,
    )


def _check(plan: Plan) -> None:
    rules, workload = plan.rules, plan.workload
    names = [experiment.name for experiment in plan.experiments]
    checks: list[tuple[str, bool, str]] = [
        ("experiment.name", len(names) == len(set(names)), "every experiment needs a name of its own"),
        ("rules.repeats", 2 <= rules.repeats <= 50, "must be between 2 and 50"),
        ("rules.min_gain", 0.0 <= rules.min_gain < 1.0, "must be between 0 and 1"),
        ("rules.resolution", 0.0 < rules.resolution < 1.0, "must be above 0 and below 1"),
        ("rules.min_agreement", 0.0 <= rules.min_agreement <= 1.0, "must be between 0 and 1"),
        ("rules.measure_timeout_s", rules.measure_timeout_s > 0.0, "must be above 0"),
        ("rules.hang_timeout_s", rules.hang_timeout_s > 0.0, "must be above 0"),
        ("workload.prompt_tokens", 1 <= workload.prompt_tokens <= 1 << 20, "must be between 1 and a million"),
        ("workload.batch_sizes", _in_range(workload.batch_sizes, 1, 4096), "must be numbers between 1 and 4096"),
        ("workload.num_draft_tokens", _in_range(workload.num_draft_tokens, 1, 64), "must be numbers between 1 and 64"),
        ("workload.plain_tokens", workload.plain_tokens >= 2, "must be 2 or more"),
        ("workload.windows", workload.windows >= 1, "must be 1 or more"),
        ("workload.verify_rounds", workload.verify_rounds >= 1, "must be 1 or more"),
        ("objective.acceptance_rate", 0.0 <= plan.objective.acceptance_rate < 1.0, "must be between 0 and 1"),
        ("objective", plan.objective.plain + plan.objective.verify > 0.0, "needs a weight above 0"),
    ]
    for key, holds, message in checks:
        if not holds:
            raise ConfigError(key, message)


def _in_range(values: tuple[int, ...], low: int, high: int) -> bool:
    return bool(values) and len(set(values)) == len(values) and all(low <= value <= high for value in values)
