"""A child asks to die with its parent; a parent that is already gone ends it at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from wire.process import die_with_parent

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux")


def test_elsewhere_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with_parent(-1)


@linux
@pytest.mark.slow
@pytest.mark.timeout(30)
def test_a_child_dies_when_its_parent_is_killed() -> None:
    # parent starts a child that waits for ever; the child prints its pid once it is protected.
    child = (
        "import os,sys,signal\n"
        "from wire.process import die_with_parent\n"
        "die_with_parent(os.getppid())\n"
        "print(os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    parent = f"import subprocess,sys,signal\nsubprocess.Popen([sys.executable,'-c',{child!r}])\nsignal.pause()\n"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert int(process.stdout.readline()) > 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    # The child holds the other end of the pipe: end of file means that it is gone.
    assert process.stdout.read() == ""
    process.stdout.close()


@linux
@pytest.mark.slow
def test_a_parent_that_died_before_the_call_ends_the_child() -> None:
    code = "from wire.process import die_with_parent\ndie_with_parent(1 << 22)\nprint('alive')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == ""


@linux
@pytest.mark.slow
def test_a_living_parent_changes_nothing() -> None:
    code = "import os\nfrom wire.process import die_with_parent\ndie_with_parent(os.getppid())\nprint('alive')\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")
