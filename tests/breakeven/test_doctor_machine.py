"""Every check of the machine, once good and once bad, with what it advises."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from breakeven.doctor_machine import (
    check_compiler,
    check_kernels,
    check_packages,
    check_port,
    check_python,
    required_packages,
)
from gateway.config import GatewayConfig


@pytest.mark.parametrize(("version", "verdict"), [("3.11.0", "ok"), ("3.14.2", "ok"), ("3.10.13", "failed")])
def test_python(version: str, verdict: str) -> None:
    finding = check_python(version)
    assert (finding.verdict, finding.detail) == (verdict, version)
    assert ("install Python 3.11" in finding.remedy) is (verdict == "failed")


def test_this_environment_fits() -> None:
    assert check_python().verdict == "ok"
    wanted = required_packages()
    assert {"aiohttp", "torch", "llguidance"} <= {requirement.name for requirement in wanted}
    assert "sglang" not in {requirement.name for requirement in wanted}
    assert check_packages(wanted).verdict == "ok"


def test_packages_that_are_missing_or_old() -> None:
    there = {"aiohttp": "3.9.1", "orjson": "3.13.0", "torch": "2.13.0+cpu"}

    def version_of(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    wanted = [Requirement(text) for text in ("aiohttp>=3.14,<4", "orjson>=3.11", "uvloop", "torch>=2.9")]
    finding = check_packages(wanted, version_of)
    assert finding.verdict == "failed"
    assert "aiohttp is 3.9.1, wanted is <4,>=3.14" in finding.detail
    assert "uvloop is missing" in finding.detail
    assert not {"orjson", "torch"} & set(finding.detail.split())
    assert "requirements.lock" in finding.remedy


def test_compiler() -> None:
    assert check_compiler({"gcc": "/usr/bin/gcc"}.get).detail == "gcc"
    finding = check_compiler(lambda _: None)
    assert (finding.verdict, finding.remedy.startswith("install gcc or clang")) == ("warning", True)


@dataclass
class SomeKernels:
    """Only what the check reads."""

    name: str
    is_row_invariant: bool


def test_kernels() -> None:
    assert check_kernels(SomeKernels("native", is_row_invariant=True), []).verdict == "ok"
    finding = check_kernels(SomeKernels("torch", is_row_invariant=False), ["cc: not found"])
    assert (finding.verdict, "cc: not found" in finding.detail) == ("warning", True)
    assert "C compiler" in finding.remedy


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = check_port(GatewayConfig(port=port))
    assert finding.verdict == "failed"
    assert f"127.0.0.1:{port}" in finding.detail
    assert "gateway.port" in finding.remedy
    assert check_port(GatewayConfig(port=port)).verdict == "ok"


def test_an_address_that_is_not_ours() -> None:
    finding = check_port(GatewayConfig(host="203.0.113.7", port=0))
    assert (finding.verdict, "gateway.host" in finding.remedy) == ("failed", True)
