"""Runs anything that may hang in a child that can be killed: a broken driver blocks whoever asks it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Ran", "run_limited", "run_module"]

_ROOT = Path(__file__).parents[2]
_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How it ended. ``problem`` is "" if it exited with 0; ``output`` is what it printed, at any rate."""

    output: str
    problem: str

    def last_json(self) -> Any:
        """The value on its last line that is JSON; None if there is none."""
        for line in reversed(self.output.splitlines()):
            with contextlib.suppress(ValueError):
                return json.loads(line)
        return None


def run_limited(command: Sequence[str], *, timeout_s: float) -> Ran:
    """Run a command in a process group of its own; kill the group after ``timeout_s``.

    A process that the kernel holds (state D) can't be killed at all: it is left behind, and said so.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed command lines
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return Ran(output="", problem=f"{command[0]} can't be run: {error.strerror}")
        problem = ""
        try:
            status = process.wait(timeout_s)
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"no end within {timeout_s:g} s, killed"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                problem = f"no end within {timeout_s:g} s, and the kernel does not let it be killed"
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if problem and text.strip():
        problem += f": {text.strip().splitlines()[-1][:200]}"
    return Ran(output=text, problem=problem)


def run_module(module: str, arguments: Sequence[str], *, python: str = "", timeout_s: float) -> Ran:
    """Run one of our modules, by another interpreter if ``python`` is given (the engine's, which has CUDA)."""
    script = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return run_limited([python or sys.executable, "-c", script, *arguments], timeout_s=timeout_s)
