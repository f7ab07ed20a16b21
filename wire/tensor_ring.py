"""A ring of fixed-size slots in shared memory: one writer, any number of readers, generations instead of locks.

Layout of the file: a 64-byte header (magic, ring id, number of slots, slot size), one 8-byte generation per slot, then
the slots. The writer makes a slot's generation odd, copies, makes it even. A reader checks the generation before and
after its copy, so a slot that was overwritten meanwhile is a StaleTensor, never wrong data. The writer never waits: a
reader that is too late asks the owner of the data again.

The seqlock relies on stores becoming visible in order, as on x86-64; on weakly ordered processors the interpreter's
own atomics between the statements act as the fences.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import secrets
import struct
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from wire.errors import RingError, StaleTensor, TensorTooLarge
from wire.messages import TensorRef

__all__ = ["TensorRingReader", "TensorRingWriter"]

_MAGIC = b"BKRING01"
_HEADER = struct.Struct("<8sQQQ")
_HEADER_BYTES = 64
_DTYPES = {"float32", "float16", "uint16"}


class _Mapping:
    """The mapped file with views of its generations and slots."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size < _HEADER_BYTES:
            raise RingError("not a tensor ring of this version")
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        magic, self.ring_id, self.num_slots, self.slot_bytes = _HEADER.unpack_from(self.memory, 0)
        expected = _HEADER_BYTES + self.num_slots * (8 + self.slot_bytes)
        if magic != _MAGIC or len(self.memory) != expected:
            self.memory.close()
            raise RingError("not a tensor ring of this version")
        self.generations = np.frombuffer(self.memory, np.uint64, self.num_slots, _HEADER_BYTES)
        data = np.frombuffer(self.memory, np.uint8, offset=_HEADER_BYTES + 8 * self.num_slots)
        self.slots = data.reshape(self.num_slots, self.slot_bytes)

    def close(self) -> None:
        """Unmap; views handed out keep the memory alive until they are gone."""
        del self.generations, self.slots
        # BufferError: a copy is in progress in another thread; the mapping goes with its last view.
        with contextlib.suppress(BufferError):
            self.memory.close()


class TensorRingWriter:
    """Creates and owns the ring; the only one that writes. Not thread-safe: one engine thread holds it."""

    def __init__(self, path: Path, *, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError("a ring needs at least one slot of at least one byte")
        slot_bytes = -(-slot_bytes // 64) * 64
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            path.chmod(0o600)
            file.write(_HEADER.pack(_MAGIC, secrets.randbits(63), num_slots, slot_bytes))
            file.truncate(_HEADER_BYTES + num_slots * (8 + slot_bytes))
        self.path = path
        self._map = _Mapping(path)
        self._next = 0

    @property
    def slot_bytes(self) -> int:
        """Most bytes one tensor may have."""
        return int(self._map.slot_bytes)

    def write(self, array: npt.NDArray[np.generic]) -> TensorRef:
        """Copy ``array`` into the next slot, overwriting what was there.

        Raises:
            TensorTooLarge: it doesn't fit a slot. RingError: its dtype is not one of the ring's.
        """
        array = np.ascontiguousarray(array)
        if str(array.dtype) not in _DTYPES:
            raise RingError(f"dtype {array.dtype} is not one of {sorted(_DTYPES)}")
        if array.nbytes > self._map.slot_bytes:
            raise TensorTooLarge(f"{array.nbytes} bytes don't fit a slot of {self._map.slot_bytes}")
        slot = self._next
        self._next = (slot + 1) % self._map.num_slots
        generation = int(self._map.generations[slot])
        self._map.generations[slot] = generation + 1
        self._map.slots[slot, : array.nbytes] = array.reshape(-1).view(np.uint8)
        self._map.generations[slot] = generation + 2
        return TensorRef(
            ring_id=self._map.ring_id,
            slot=slot,
            generation=generation + 2,
            shape=array.shape,
            dtype=str(array.dtype),
            nbytes=array.nbytes,
        )

    def close(self) -> None:
        """Unmap and remove the file."""
        self._map.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> TensorRingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TensorRingReader:
    """Attaches to a ring and copies tensors out of it."""

    def __init__(self, path: Path) -> None:
        self._map = _Mapping(path)

    @property
    def ring_id(self) -> int:
        """Which writing of the ring this is attached to."""
        return int(self._map.ring_id)

    def read(self, ref: TensorRef) -> npt.NDArray[np.generic]:
        """A copy of the tensor, owned by the caller.

        Raises:
            StaleTensor: the slot was written again, or the ring is another one.
            RingError: the reference is malformed.
        """
        if ref.ring_id != self._map.ring_id:
            raise StaleTensor("the ring was replaced by another one")
        if ref.dtype not in _DTYPES or not 0 <= ref.slot < self._map.num_slots:
            raise RingError(f"malformed tensor reference {ref}")
        dtype = np.dtype(ref.dtype)
        count = math.prod(ref.shape)  # of any size: a forged shape must not wrap around
        if min(ref.shape, default=1) < 0 or count * dtype.itemsize != ref.nbytes or ref.nbytes > self._map.slot_bytes:
            raise RingError(f"malformed tensor reference {ref}")
        if int(self._map.generations[ref.slot]) != ref.generation:
            raise StaleTensor(f"slot {ref.slot} was written again")
        copy = self._map.slots[ref.slot, : ref.nbytes].copy()
        if int(self._map.generations[ref.slot]) != ref.generation:
            raise StaleTensor(f"slot {ref.slot} was written while it was read")
        return copy.view(dtype).reshape(ref.shape)

    def close(self) -> None:
        """Unmap; the file stays, it is the writer's."""
        self._map.close()

    def __enter__(self) -> TensorRingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
