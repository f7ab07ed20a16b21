"""What an experiment's engine left running, and how it is removed. Linux only; elsewhere there is nothing to find."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verifier.tuning.warden import descendants

__all__ = ["Leader", "adopt_orphans", "boot_id", "cpu_share", "end_new_children", "end_session", "leader_of"]

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """The first process of an engine's session; its number alone could by now be someone else's.

    Fields:
        pid: process and session id. start_ticks: when it began, in clock ticks since boot. boot: which boot that was.
    """

    pid: int
    start_ticks: int
    boot: str


def adopt_orphans() -> None:
    """Let what our children orphan become ours, so that it can be found and ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def boot_id() -> str:
    """Name of this boot of the machine; a run that was begun under another one was ended by it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def leader_of(pid: int) -> Leader | None:
    """The record of a living process, None if it is gone."""
    fields = _stat(pid)
    return None if fields is None else Leader(pid=pid, start_ticks=int(fields[19]), boot=boot_id())


def end_session(leader: Leader, *, patience_s: float = 10.0) -> list[int]:
    """Kill what is left of an engine's session; returns the processes that would not go.

    While members live the kernel gives their session's number to nobody else, so a process of that number with another
    start means that none is left.
    """
    now = leader_of(leader.pid)
    if leader.boot != boot_id() or (now is not None and now.start_ticks != leader.start_ticks):
        return []
    return _kill_until_gone(lambda: _members(leader.pid), patience_s)


def end_new_children(before: frozenset[int], *, patience_s: float = 10.0) -> list[int]:
    """Kill every descendant of this process that is not in ``before``; returns those that would not go."""
    left = _kill_until_gone(lambda: [pid for pid in descendants(os.getpid()) if pid not in before], patience_s)
    _reap(before)
    return left


def _reap(before: frozenset[int]) -> None:
    """Take the exit status of adopted processes that ended, or they would fill the process table."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid, fields = int(entry.name), _stat(int(entry.name))
        if fields is not None and fields[0] == "Z" and int(fields[1]) == os.getpid() and pid not in before:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def cpu_share(session_id: int, *, over_s: float = 0.5) -> float:
    """Cores an engine's session keeps busy now: a collective that never ends spins, a deadlock sleeps."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    before = _cpu_ticks(session_id)
    time.sleep(over_s)
    return (_cpu_ticks(session_id) - before) / ticks_per_s / over_s


def _cpu_ticks(session_id: int) -> int:
    fields = [_stat(pid) for pid in _members(session_id)]
    return sum(int(each[11]) + int(each[12]) for each in fields if each is not None)


def _kill_until_gone(find: Callable[[], list[int]], patience_s: float) -> list[int]:
    deadline_s = time.monotonic() + patience_s
    killed: set[int] = set()
    while (found := find()) and time.monotonic() < deadline_s:
        for pid in found:
            with contextlib.suppress(OSError):  # gone already
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.02)
    for pid in killed:
        with contextlib.suppress(OSError):  # not our child, and so not ours to wait for
            os.waitpid(pid, os.WNOHANG)
    return list(found)


def _members(session_id: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None and int(fields[3]) == session_id and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
