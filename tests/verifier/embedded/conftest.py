"""One tiny model and one ring for the engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cpukernels.native import NativeKernels
from tests.verifier.embedded.tiny_models import CONFIGS, HIDDEN, load, write_model
from verifier.embedded.model import TargetModel
from wire.tensor_ring import TensorRingReader, TensorRingWriter


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of six layers."""
    return write_model(tmp_path_factory.mktemp("llama"), CONFIGS["llama"]())


@pytest.fixture(scope="session")
def llama(llama_dir: Path, native: NativeKernels) -> TargetModel:
    """The same, loaded."""
    return load(llama_dir, native)


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TensorRingWriter]:
    """A ring large enough that nothing in a test goes stale."""
    with TensorRingWriter(
        tmp_path_factory.mktemp("ring") / "ring", num_slots=512, slot_bytes=8 * 3 * HIDDEN * 4
    ) as writer:
        yield writer


@pytest.fixture(scope="session")
def ring_reader(ring: TensorRingWriter) -> Iterator[TensorRingReader]:
    """Reads that ring."""
    with TensorRingReader(ring.path) as reader:
        yield reader
