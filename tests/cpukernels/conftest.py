"""One torch thread and one kernel library for all tests here; Hypothesis repeats the same examples in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cpukernels.native import NativeKernels, build_library

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def kernel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's native kernels are built, once."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def native(kernel_dir: Path) -> NativeKernels:
    """The row-invariant kernels."""
    return NativeKernels(build_library(kernel_dir))
