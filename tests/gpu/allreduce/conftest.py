"""A compiled library for this machine's GPU; without a GPU or nvcc everything here is skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verifier.allreduce.library import KernelLibrary, build_library, find_nvcc

CACHE = Path.home() / ".cache" / "breakeven" / "allreduce"


@pytest.fixture(scope="session")
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if find_nvcc() is None:
        pytest.skip("no nvcc")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    yield device
    torch.cuda.synchronize()


def _library(defines: tuple[str, ...]) -> KernelLibrary:
    capability = torch.cuda.get_device_capability()
    return KernelLibrary(build_library(CACHE, compute_capability=capability, defines=defines))


@pytest.fixture(scope="session")
def library(gpu: torch.device) -> KernelLibrary:
    return _library(())


@pytest.fixture(scope="session")
def torture_library(gpu: torch.device) -> KernelLibrary:
    """Random delays inside the kernels, and a sweep every 64 calls."""
    return _library(("AR_TORTURE", "AR_SWEEP_PERIOD=64"))


@pytest.fixture(scope="session")
def fenced_library(gpu: torch.device) -> KernelLibrary:
    """What broken_library is compared with."""
    return _library(("AR_TORTURE", "AR_SWEEP_PERIOD=64", "AR_ONLY_WORLD=2"))


@pytest.fixture(scope="session")
def broken_library(gpu: torch.device) -> KernelLibrary:
    """Without the release fence before BULK's flags, for a world of two: it must fail."""
    return _library(("AR_TORTURE", "AR_SWEEP_PERIOD=64", "AR_NO_RELEASE", "AR_ONLY_WORLD=2"))
