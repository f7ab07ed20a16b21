"""``breakeven tune``: run a campaign on a profile's engine, then write report and best profile."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import structlog
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from verifier.allreduce.capabilities import capabilities
from verifier.allreduce.probe import probe_machine
from verifier.sglang.config import SGLangConfig
from verifier.sglang.launch import resolve_model
from verifier.tuning.best_profile import best_profile
from verifier.tuning.campaign import Campaign
from verifier.tuning.config import TuneConfig
from verifier.tuning.errors import Paused, TuningError
from verifier.tuning.export import export_setup
from verifier.tuning.ledger import Ledger
from verifier.tuning.plan import Plan, find_plan, load_plan
from verifier.tuning.report import plot_gains, report_page
from verifier.tuning.schedule import best_changes
from verifier.tuning.setup import Setup, describe_setup
from verifier.tuning.trial import EngineTrials
from wire.settings import ConfigError

__all__ = ["tune"]

log = structlog.get_logger("tune")


def tune(
    sglang: SGLangConfig,
    config: TuneConfig,
    *,
    profile: str,
    tables: Mapping[str, Mapping[str, Any]],
    only_report: bool = False,
) -> int:
    """Run until decided, paused or stopped; report and best profile are written either way.

    Args:
        profile: its name, for reports. tables: its own tables, of which the best profile is made.
        only_report: write them from the ledger as it is.

    Returns:
        Exit status: 0 decided, 3 paused, 1 failed, 130 interrupted.

    Raises:
        ConfigError: plan or profile can't be used.
    """
    plan = load_plan(find_plan(_plan_name(sglang, config)))
    unknown = set(config.only) - {experiment.name for experiment in plan.experiments}
    if unknown:
        raise ConfigError("tune.only", f"no such experiment in the plan: {', '.join(sorted(unknown))}")
    model_path = resolve_model(sglang)
    setup = describe_setup(sglang, model_path=model_path, workload=plan.workload)
    state_dir = config.resolved_state_dir
    log.info("setup", key=setup.key, plan=plan.title, ledger=str(state_dir / "ledger.sqlite"))
    status = 0
    try:
        with contextlib.closing(Ledger(state_dir / "ledger.sqlite")) as ledger:
            trials = EngineTrials(
                sglang,
                model_path=model_path,
                rules=plan.rules,
                workload=plan.workload,
                dir_path=state_dir / "trials" / setup.key,
            )
            with _shown() as show:
                campaign = Campaign(
                    sglang,
                    plan,
                    setup,
                    ledger,
                    trials,
                    impossible={} if only_report else _impossible(plan, setup),
                    only=config.only,
                    max_trials=config.max_trials,
                    on_trial=show,
                )
                if only_report:
                    campaign.review()
                else:
                    status = asyncio.run(_until_stopped(campaign))
            _write_results(ledger, plan, setup, sglang, config, profile=profile, tables=tables)
    except TuningError as error:
        log.error("the campaign can't go on", reason=str(error))
        return 1
    return status


def _impossible(plan: Plan, setup: Setup) -> dict[str, str]:
    """Experiments whose all-reduce can't run here, with the reason."""
    machine = probe_machine(versions=setup.facts["versions"])
    reasons = {each.strategy.name: "; ".join(each.reasons) for each in capabilities(machine) if each.possible == "no"}
    found = {}
    for experiment in plan.experiments:
        if experiment.strategy in reasons:
            found[experiment.name] = reasons[experiment.strategy]
        elif experiment.needs == "gpu" and not machine.gpus:
            found[experiment.name] = "no NVIDIA GPU here"
    return found


def _write_results(
    ledger: Ledger,
    plan: Plan,
    setup: Setup,
    sglang: SGLangConfig,
    config: TuneConfig,
    *,
    profile: str,
    tables: Mapping[str, Mapping[str, Any]],
) -> None:
    state_dir = config.resolved_state_dir
    data = export_setup(ledger, setup.key, plan, profile=profile)
    data["date_utc"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    directory = state_dir / "report" / setup.key
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "ledger.json").write_text(json.dumps(data, indent=1) + "\n")
    plot = "gains.png" if plot_gains(data, directory / "gains.png") else ""
    (directory / "report.md").write_text(report_page(data, plot=plot))
    best_path = state_dir / f"best-{profile}.toml" if config.best_profile == "auto" else Path(config.best_profile)
    changes = best_changes(ledger.experiments(setup.key))
    comments = [f"{profile} as tuned by breakeven tune, setup {setup.key}; report: {directory.name}/report.md"]
    text = best_profile(tables, sglang, changes, comments=comments, num_draft_tokens=data["best_num_draft_tokens"])
    best_path.write_text(text)
    log.info("written", report=str(directory / "report.md"), best=str(best_path), changes=[c.text for c in changes])


async def _until_stopped(campaign: Campaign) -> int:
    work = asyncio.create_task(campaign.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        log.warning("stopped; the same command goes on where it was")
        return 130
    except Paused as error:
        log.info("paused", reason=str(error))
        return 3
    return 0


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[str, str, str, float], None]]:
    """What runs now: a bar on a terminal, a line per phase elsewhere."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("starting", total=1.0)

            def show_bar(name: str, side: str, phase: str, share: float) -> None:
                progress.update(task, description=f"{name} ({side}): {phase}", completed=share)

            yield show_bar
        return
    seen: list[tuple[str, str, str]] = []

    def show_line(name: str, side: str, phase: str, share: float) -> None:
        if seen[-1:] != [(name, side, phase)]:
            seen.append((name, side, phase))
            log.info("trial", experiment=name, side=side, phase=phase)

    yield show_line


def _plan_name(sglang: SGLangConfig, config: TuneConfig) -> str:
    if config.plan != "auto":
        return config.plan
    args = sglang.args
    on_cpu = any(arg == "--device" and args[i + 1 : i + 2] == ("cpu",) for i, arg in enumerate(args))
    return "cpu" if on_cpu or "--device=cpu" in args else "pcie"
