"""Stands between the tuner and an engine, so that no engine outlives a tuner that was killed.

    python -I warden.py TUNER_PID COMMAND...

It runs the command, ends with its status, and takes every process of it along: when the command ends, and at once when
the tuner dies, by whatever signal. A run as a file of its own, with the standard library only: the engine's interpreter
and ours differ, and it must start within milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["descendants", "main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_DIED = signal.SIGUSR1
_LOOK_S = 0.2
_PATIENCE_S = 10.0


def main(argv: Sequence[str]) -> int:
    """Run ``argv[1:]`` for the process ``argv[0]``; returns the command's status, 128 + n for signal n."""
    tuner_pid, command = int(argv[0]), list(argv[1:])
    signal.signal(_PARENT_DIED, lambda number, frame: None)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # sent to the whole group: the command ends by itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what the command orphans becomes our child, not init's
        libc.prctl(_PR_SET_PDEATHSIG, _PARENT_DIED, 0, 0, 0)
    if os.getppid() != tuner_pid:
        return 1  # it died before we asked to be told
    try:
        process = subprocess.Popen(command)  # noqa: S603 - the tuner's own command line
    except OSError as error:
        sys.stderr.write(f"{command[0]} can't be run: {error.strerror}\n")
        return 127
    status = _until_over(process, tuner_pid)
    _end_all()
    return status if status >= 0 else 128 - status


def _until_over(process: subprocess.Popen[bytes], tuner_pid: int) -> int:
    while os.getppid() == tuner_pid:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            continue
    return 1


def _end_all() -> None:
    """Kill whatever is left of the command, also what left its process group."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while (found := descendants(os.getpid())) and time.monotonic() < deadline_s:
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(0.02)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def descendants(root: int) -> list[int]:
    """Processes below ``root`` that live, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    level = children.get(root, [])
    while level:
        found += level
        level = [child for pid in level for child in children.get(pid, [])]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
