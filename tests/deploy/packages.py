"""Builds wheel and sdist of this tree with the hooks a front end would call."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.compose_file import ROOT

_NO_SOURCE = (".*", "tests", "benchmarks", "docs", "build", "dist", "*.egg-info", "__pycache__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Paths of what was built."""

    wheel: Path
    sdist: Path
    wheel_from_sdist: Path


def _run_hook(source: Path, hook: str, out: Path) -> Path:
    """What a front end does after it has made the environment that pyproject.toml asks for."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import setuptools.build_meta as backend; print('built', backend.{hook}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.rpartition("built ")[2].strip()


def build_packages(root: Path) -> Built:
    """Both from this tree, and the wheel once more from the sdist; about 20 s.

    Args:
        root: an empty directory to work in.
    """
    # A copy: a build writes into its source, and what an old one left there must not get in.
    source = shutil.copytree(ROOT, root / "source", ignore=shutil.ignore_patterns(*_NO_SOURCE))
    sdist = _run_hook(source, "build_sdist", root / "dist")
    wheel = _run_hook(source, "build_wheel", root / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "unpacked", filter="data")
    again = _run_hook(root / "unpacked" / sdist.name.removesuffix(".tar.gz"), "build_wheel", root / "again")
    return Built(wheel=wheel, sdist=sdist, wheel_from_sdist=again)
