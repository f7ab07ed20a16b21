"""Compile requirements.in and requirements-dev.in into lock files with hashes, without torch or index names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

_OPTIONS = (
    *("--quiet", "--generate-hashes", "--strip-extras", "--allow-unsafe", "--no-header", "--unsafe-package", "torch"),
    *("--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"),
)
_UNSAFE = "# The following packages are considered to be unsafe"


def main() -> None:
    """Write requirements.lock, then requirements-dev.lock constrained to it.

    A compile that fails leaves the old file: it works on a copy beside.
    """
    for name in ("requirements", "requirements-dev"):
        output = Path(f".{name}.lock.new")
        output.unlink(missing_ok=True)  # pip-tools would keep its versions
        command = [sys.executable, "-m", "piptools", "compile", *_OPTIONS, "-o", str(output), f"{name}.in"]
        subprocess.run(command, check=True)
        text = output.read_text().partition(_UNSAFE)[0].rstrip()
        output.write_text(
            f"# Compiled from {name}.in by `make lock`. Every file is checked against its hash.\n{text}\n"
        )
        output.replace(f"{name}.lock")


if __name__ == "__main__":
    main()
