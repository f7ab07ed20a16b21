"""Where a number came from: every result file carries this record."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["provenance"]

_PACKAGES = ("torch", "numpy", "transformers", "aiohttp", "msgspec", "sglang")


def provenance(argv: Sequence[str], *, seed: int | None = None) -> dict[str, Any]:
    """Command line, commit, versions, processor and date, as plain JSON values."""
    return {
        "argv": [_portable(argument) for argument in argv],
        "git_sha": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "date_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "machine": platform.machine(),
        "processor": _processor(),
        "seed": seed,
    }


def _portable(argument: str) -> str:
    """Without the folders of this machine: they say nothing to who repeats it elsewhere."""
    name, is_option, value = argument.rpartition("=")
    scheme = "ipc://" if value.startswith("ipc://") else ""
    path = Path(value.removeprefix(scheme))
    return name + is_option + scheme + (path.name if path.is_absolute() else value.removeprefix(scheme))


def _git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
