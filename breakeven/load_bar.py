"""A progress bar for the time before the model is ready; on a terminal only, logs say the same elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gateway.ports import LoadPhase

__all__ = ["LoadBar"]


class LoadBar:
    """Shows phase, share done and time; disappears when the model is ready."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("starting", total=None)

    def show(self, phase: LoadPhase) -> None:
        """Update; ends the bar once ``phase`` is ready."""
        if phase.is_ready:
            self._progress.stop()
            return
        total = 1.0 if phase.progress is not None else None
        self._progress.update(self._task, description=phase.phase, total=total, completed=phase.progress or 0.0)

    def __enter__(self) -> LoadBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
