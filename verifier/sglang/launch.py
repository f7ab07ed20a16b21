"""``breakeven launch``: start SGLang as a profile says, show how it loads, stay with it until it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import structlog
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from verifier.sglang.config import SGLangConfig
from verifier.sglang.launcher import EngineLauncher, EngineStartFailed
from wire.settings import ConfigError

__all__ = ["launch", "resolve_model"]

log = structlog.get_logger("launcher")

Result = TypeVar("Result")


def launch(config: SGLangConfig, *, cache_dir: Path | None = None) -> None:
    """Run until SIGTERM, SIGINT or the engine's own end; exits with status 1 if it failed.

    Args:
        cache_dir: where a bundled model is converted to; None = ~/.cache/breakeven.

    Raises:
        ConfigError: there is no model to serve.
    """
    model_path = resolve_model(config, cache_dir=cache_dir)
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("starting", total=1.0)
            status = asyncio.run(_run(config, model_path, progress, task))
    else:
        status = asyncio.run(_run(config, model_path, None, None))
    if status:
        sys.exit(status)


async def _run(config: SGLangConfig, model_path: str, progress: Progress | None, task: TaskID | None) -> int:
    launcher = EngineLauncher(config, model_path=model_path)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    phases: set[str] = set()

    def show(phase: str, share: float) -> None:
        if progress is not None and task is not None:
            progress.update(task, description=phase, completed=share)
        elif phase not in phases:
            phases.add(phase)
            log.info("loading", phase=phase, progress=round(share, 2))

    try:
        return await _serve(launcher, config, stopped, show)
    finally:
        await launcher.stop()


async def _serve(
    launcher: EngineLauncher, config: SGLangConfig, stopped: asyncio.Event, show: Callable[[str, float], None]
) -> int:
    try:
        command = await _unless(stopped, launcher.start(on_progress=show))
        if command is None:
            return 0
        log.info("SGLang serves", url=config.url, settings=command.label, log=str(launcher.log_path))
        ended = await _unless(stopped, launcher.wait())
        if stopped.is_set():
            return 0
        log.error("SGLang ended", diagnosis=ended, log=str(launcher.log_path))
    except EngineStartFailed as error:
        found = error.diagnosis
        log.error(
            "SGLang did not start",
            reason=str(error),
            evidence=found.evidence if found is not None else None,
            source=found.source if found is not None else None,
            log=str(error.log_path),
        )
    return 1


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of ``work``, or None if it was stopped before."""
    stop, run = asyncio.create_task(stopped.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({stop, run}, return_when=asyncio.FIRST_COMPLETED)
        return run.result() if run.done() else None
    finally:
        for task in (stop, run):
            task.cancel()
        await asyncio.gather(stop, run, return_exceptions=True)


def resolve_model(config: SGLangConfig, *, cache_dir: Path | None = None) -> str:
    """Directory or hub name of the model to serve; bundled weights are converted on first use.

    Args:
        cache_dir: where to; None = ~/.cache/breakeven.

    Raises:
        ConfigError: the profile names none.
    """
    model = config.model_path or (config.model_dir if config.model_dir != "auto" else "")
    if not model:
        raise ConfigError("sglang.model_path", "must name a model to launch")
    # Lazy: converting the bundled weights needs torch, everything else does not.
    from verifier.embedded.weights import BUNDLED_MODELS, resolve_model_dir

    if model not in BUNDLED_MODELS:
        return model
    cache_dir = cache_dir or Path.home() / ".cache" / "breakeven"
    return str(resolve_model_dir(model, cache_dir=cache_dir, progress=lambda phase, share: None))
