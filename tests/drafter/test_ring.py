"""The drafter's side of the ring: late, replaced, half-written, other dtypes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from drafter.ring import RingFeatures
from wire.errors import RingError, StaleTensor
from wire.tensor_ring import TensorRingWriter

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4) / 8


def test_the_ring_may_appear_later_and_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    features = RingFeatures(path)
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer:
        old = writer.write(ROWS)
        assert np.array_equal(features.read(old), ROWS)
    with pytest.raises(StaleTensor, match="not there"):
        features.read(msgspec.structs.replace(old, ring_id=old.ring_id + 1))
    path.write_bytes(b"")
    with pytest.raises(StaleTensor, match="not there"):
        features.read(old)
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer:
        with pytest.raises(StaleTensor, match="gone"):
            features.read(old)
        assert np.array_equal(features.read(writer.write(ROWS)), ROWS)
    features.close()


def test_overwritten_slots_are_stale(tmp_path: Path) -> None:
    with TensorRingWriter(tmp_path / "ring", num_slots=1, slot_bytes=64) as writer:
        features, ref = RingFeatures(tmp_path / "ring"), writer.write(ROWS)
        writer.write(ROWS)
        with pytest.raises(StaleTensor):
            features.read(ref)
        with pytest.raises(RingError):
            features.read(msgspec.structs.replace(ref, slot=9))
        features.close()


def test_half_precision_is_widened(tmp_path: Path) -> None:
    with TensorRingWriter(tmp_path / "ring", num_slots=4, slot_bytes=64) as writer:
        features = RingFeatures(tmp_path / "ring")
        assert np.array_equal(features.read(writer.write(ROWS.astype(np.float16))), ROWS)
        bfloat16 = (ROWS.view(np.uint32) >> 16).astype(np.uint16)
        assert np.array_equal(features.read(writer.write(bfloat16)), ROWS)
        features.close()


def test_without_a_ring_everything_is_stale(tmp_path: Path) -> None:
    with TensorRingWriter(tmp_path / "ring", num_slots=1, slot_bytes=64) as writer, pytest.raises(StaleTensor):
        RingFeatures(None).read(writer.write(ROWS))
