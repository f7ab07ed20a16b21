"""One thread, one kernel library and tiny heads for all drafter tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cpukernels.choose import choose_kernels
from cpukernels.ports import Kernels
from tests.drafter.heads import LAYOUTS, TinyHead

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's native kernels are built."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def kernels(kernel_dir: Path) -> Kernels:
    """The best kernels of this machine."""
    return choose_kernels("auto", cache_dir=kernel_dir, warn=lambda _message: None)


@pytest.fixture(scope="session")
def tiny_heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyHead]:
    """A random tiny head in every layout."""
    return {name: write(tmp_path_factory.mktemp("head")) for name, write in LAYOUTS.items()}
