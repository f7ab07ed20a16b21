"""What ``breakeven doctor`` looks at before any model is loaded: interpreter, packages, compiler, kernels, port."""

from __future__ import annotations

import platform
import shutil
import socket
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from breakeven.finding import Finding
from cpukernels.ports import Kernels
from gateway.config import GatewayConfig

__all__ = ["check_compiler", "check_kernels", "check_packages", "check_port", "check_python", "required_packages"]

_OLDEST_PYTHON = "3.11"
_COMPILERS = ("cc", "gcc", "clang")


def check_python(version: str | None = None) -> Finding:
    """The interpreter is new enough."""
    found = version or platform.python_version()
    is_ok = Version(found) >= Version(_OLDEST_PYTHON)
    return Finding(
        subject="python",
        verdict="ok" if is_ok else "failed",
        detail=found,
        remedy="" if is_ok else f"install Python {_OLDEST_PYTHON} or newer and make the environment anew",
    )


def required_packages(extra: str = "embedded") -> list[Requirement]:
    """What the installed distribution asks for, with one of its extras."""
    wanted = [Requirement(text) for text in metadata.requires("breakeven") or []]
    return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]


def check_packages(wanted: Iterable[Requirement], version_of: Callable[[str], str] = metadata.version) -> Finding:
    """Every package is there in a version that fits.

    Args:
        version_of: raises PackageNotFoundError for what is not installed.
    """
    problems = []
    count = 0
    for requirement in wanted:
        count += 1
        try:
            found = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{requirement.name} is {found}, wanted is {requirement.specifier}")
    return Finding(
        subject="packages",
        verdict="failed" if problems else "ok",
        detail="; ".join(problems) or f"{count} packages fit",
        remedy="make install, or pip install -r requirements-torch.txt and -r requirements.lock" if problems else "",
    )


def check_compiler(find: Callable[[str], str | None] = shutil.which) -> Finding:
    """There is a C compiler for the kernels."""
    found = next((path for name in _COMPILERS if (path := find(name))), None)
    return Finding(
        subject="C compiler",
        verdict="ok" if found else "warning",
        detail=Path(found).name if found else "none found",
        remedy="" if found else "install gcc or clang for the fast, row-invariant kernels",
    )


def check_kernels(kernels: Kernels, warnings: list[str]) -> Finding:
    """The kernels that were chosen make speculation exact bit for bit.

    Args:
        warnings: what choosing them said.
    """
    detail = f"{kernels.name}, row-invariant: lossless bit for bit"
    if not kernels.is_row_invariant:
        detail = f"{kernels.name}, not row-invariant: near ties may flip"
    return Finding(
        subject="kernels",
        verdict="ok" if kernels.is_row_invariant else "warning",
        detail="; ".join([detail, *warnings]),
        remedy="" if kernels.is_row_invariant else "install a C compiler, and leave verifier.kernels at auto",
    )


def check_port(config: GatewayConfig) -> Finding:
    """The gateway could listen where it is told to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            return Finding(
                subject="port",
                verdict="failed",
                detail=f"{config.host}:{config.port}: {error.strerror}",
                remedy="stop what listens there, or set gateway.port (and gateway.host)",
            )
    return Finding(subject="port", verdict="ok", detail=f"{config.host}:{config.port} is free")
