"""Reads features from the verifier's tensor ring, which may appear late or be replaced when the verifier restarts."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from wire.errors import RingError, StaleTensor
from wire.messages import TensorRef
from wire.tensor_ring import TensorRingReader

__all__ = ["RingFeatures"]


class RingFeatures:
    """Opens the ring when first needed, and again when a reference is of another ring."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._reader: TensorRingReader | None = None
        self._ring_id: int | None = None

    def read(self, ref: TensorRef) -> npt.NDArray[np.float32]:
        """A copy as float32; uint16 holds the bits of bfloat16.

        Raises:
            StaleTensor: overwritten, or its ring is not there (any more). RingError: malformed reference.
        """
        if self._reader is None or ref.ring_id != self._ring_id:
            self._reopen(ref)
        assert self._reader is not None
        raw = self._reader.read(ref)
        if raw.dtype == np.uint16:
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)

    def _reopen(self, ref: TensorRef) -> None:
        self.close()
        if self._path is None:
            raise StaleTensor("no tensor ring is configured")
        try:
            reader = TensorRingReader(self._path)
        except (OSError, ValueError, struct.error, RingError) as error:
            # ValueError and struct.error: the writer has created the file and not filled it yet.
            raise StaleTensor(f"the tensor ring is not there: {error}") from None
        self._reader, self._ring_id = reader, reader.ring_id
        if reader.ring_id != ref.ring_id:
            raise StaleTensor("the features are of a ring that is gone")

    def close(self) -> None:
        """Detach; the next read opens again."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._ring_id = None
