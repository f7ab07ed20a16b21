"""What every server process does about its own life: title, parent, interruption."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGTERM to this process when ``parent_pid`` dies. Linux only; elsewhere a no-op.

    A gateway killed with SIGKILL can't stop its children; without this they would hold the model's memory for ever.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)
