"""A reference either gives exactly what was written for it, or an error: never other data."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wire.errors import RingError, StaleTensor, TensorTooLarge
from wire.messages import TensorRef
from wire.tensor_ring import TensorRingReader, TensorRingWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def _array(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, dtype=np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 5), (2, 3, 4)])
def test_reads_back_what_was_written(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=128) as writer, TensorRingReader(path) as reader:
        array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
        ref = writer.write(array)
        copy = reader.read(ref)
        assert copy.dtype == array.dtype
        # numpy makes a contiguous scalar one-dimensional.
        assert copy.shape == (shape or (1,))
        assert (copy.reshape(shape) == array).all()


def test_a_strided_array_is_written_in_row_major_order(path: Path) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=256) as writer, TensorRingReader(path) as reader:
        array = np.arange(48, dtype=np.float32).reshape(6, 8)[::2, 1::3].T
        assert (reader.read(writer.write(array)) == array).all()


def test_the_copy_belongs_to_the_reader(path: Path) -> None:
    with TensorRingWriter(path, num_slots=1, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        copy = reader.read(writer.write(_array(1.0, 4)))
        writer.write(_array(2.0, 4))
        assert (copy == 1.0).all()
        copy[:] = 9.0


def test_an_overwritten_slot_is_stale_and_the_newest_is_not(path: Path) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        refs = [writer.write(_array(float(i), 2)) for i in range(5)]
        for ref in refs[:3]:
            with pytest.raises(StaleTensor):
                reader.read(ref)
        assert [reader.read(ref)[0] for ref in refs[3:]] == [3.0, 4.0]


@pytest.mark.parametrize("offset", [-2, -1, 1, 2, 2**63 - 10])
def test_any_other_generation_is_stale(path: Path, offset: int) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        ref = writer.write(_array(1.0, 2))
        with pytest.raises(StaleTensor):
            reader.read(msgspec.structs.replace(ref, generation=ref.generation + offset))


def test_a_slot_that_was_never_written_is_stale(path: Path) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        ref = writer.write(_array(1.0, 2))
        with pytest.raises(StaleTensor):
            reader.read(msgspec.structs.replace(ref, slot=1))


def test_a_slot_being_written_is_stale(path: Path) -> None:
    # An odd generation, as a reader sees it in the middle of a write; asking for it must not help either.
    with TensorRingWriter(path, num_slots=1, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        ref = writer.write(_array(1.0, 2))
        writer._map.generations[0] += np.uint64(1)
        with pytest.raises(StaleTensor):
            reader.read(ref)


def test_another_ring_is_stale(tmp_path: Path) -> None:
    with (
        TensorRingWriter(tmp_path / "a", num_slots=2, slot_bytes=64) as first,
        TensorRingWriter(tmp_path / "b", num_slots=2, slot_bytes=64) as second,
        TensorRingReader(tmp_path / "a") as reader,
    ):
        first.write(_array(1.0, 2))
        with pytest.raises(StaleTensor):
            reader.read(second.write(_array(2.0, 2)))


def test_a_restarted_writer_has_another_ring(path: Path) -> None:
    old = TensorRingWriter(path, num_slots=2, slot_bytes=64)
    reader = TensorRingReader(path)
    ref = old.write(_array(1.0, 2))
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as new:
        fresh = new.write(_array(2.0, 2))
        with pytest.raises(StaleTensor):
            reader.read(fresh)
        with TensorRingReader(path) as second:
            assert second.ring_id != reader.ring_id
            with pytest.raises(StaleTensor):
                second.read(ref)
            assert second.read(fresh)[0] == 2.0
    reader.close()


MALFORMED = {
    "dtype object": {"dtype": "object"},
    "dtype unknown": {"dtype": "nonsense"},
    "dtype wider than written": {"dtype": "float64"},
    "slot too large": {"slot": 2},
    "slot negative": {"slot": -1},
    "slot huge": {"slot": 2**62},
    "nbytes too small": {"nbytes": 4},
    "nbytes beyond the slot": {"shape": (17,), "nbytes": 68},
    "negative dimension": {"shape": (-2,)},
    "two negative dimensions": {"shape": (-1, -2)},
    "shape too large": {"shape": (3,)},
    "shape that overflows": {"shape": (2**62, 4, 2)},
    "shape beyond 64 bits": {"shape": (2**63, 2)},
    "shape of a zero and huge": {"shape": (0, 2**62), "nbytes": 8},
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_reference_is_an_error(path: Path, change: dict[str, object]) -> None:
    with TensorRingWriter(path, num_slots=2, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        ref = writer.write(_array(1.0, 2))
        with pytest.raises(RingError):
            reader.read(msgspec.structs.replace(ref, **change))
        assert reader.read(ref)[0] == 1.0


numbers = st.sampled_from([0, 1, 2, 3, 8, 16, 17, 2**31, 2**62, 2**63, -1, -4]) | st.integers(-(2**64), 2**64)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    ref=st.builds(
        TensorRef,
        ring_id=st.just(0),
        slot=numbers,
        generation=st.just(2) | numbers,
        shape=st.lists(numbers, max_size=4).map(tuple),
        dtype=st.sampled_from(["float32", "float16", "uint16", "int8", ""]),
        nbytes=numbers,
    )
)
def test_no_reference_whatever_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, ref: TensorRef) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    with TensorRingWriter(path, num_slots=3, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        writer.write(_array(1.0, 16))
        ref = msgspec.structs.replace(ref, ring_id=reader.ring_id)
        try:
            array = reader.read(ref)
        except RingError:
            return
        assert array.nbytes == ref.nbytes
        assert array.shape == ref.shape


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_slots=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["write", "read"]), st.integers(0, 30)), max_size=40),
)
def test_any_interleaving_gives_the_right_tensor_or_stale(
    tmp_path_factory: pytest.TempPathFactory, num_slots: int, steps: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "ring"
    with TensorRingWriter(path, num_slots=num_slots, slot_bytes=128) as writer, TensorRingReader(path) as reader:
        written: list[TensorRef] = []
        for action, number in steps:
            if action == "write":
                written.append(writer.write(_array(float(len(written)), number + 1)))
                continue
            if not written:
                continue
            index = number % len(written)
            if index < len(written) - num_slots:
                with pytest.raises(StaleTensor):
                    reader.read(written[index])
            else:
                copy = reader.read(written[index])
                assert copy.shape == written[index].shape
                assert (copy == float(index)).all()


def test_a_racing_writer_never_gives_torn_data(path: Path) -> None:
    # Every tensor is one value throughout; a torn read would hold two.
    rows, rounds = 4096, 1500
    latest: list[TensorRef] = []
    stop = threading.Event()
    with TensorRingWriter(path, num_slots=2, slot_bytes=rows * 4) as writer, TensorRingReader(path) as reader:
        latest.append(writer.write(_array(0.0, rows)))

        def write() -> None:
            for value in range(1, rounds):
                latest.append(writer.write(_array(float(value), rows)))
            stop.set()

        thread = threading.Thread(target=write)
        thread.start()
        complete = stale = 0
        while not stop.is_set():
            index = len(latest) - 1
            try:
                copy = reader.read(latest[index])
            except StaleTensor:
                stale += 1
                continue
            assert (copy == float(index)).all()
            complete += 1
        thread.join()
        assert (reader.read(latest[-1]) == float(rounds - 1)).all()
        assert complete + stale > 0


def test_too_many_bytes_are_refused_and_cost_no_slot(path: Path) -> None:
    with TensorRingWriter(path, num_slots=1, slot_bytes=64) as writer, TensorRingReader(path) as reader:
        ref = writer.write(_array(1.0, 16))
        with pytest.raises(TensorTooLarge):
            writer.write(_array(2.0, 17))
        assert (reader.read(ref) == 1.0).all()


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool", "complex64", "<U3"])
def test_other_dtypes_are_refused(path: Path, dtype: str) -> None:
    with TensorRingWriter(path, num_slots=1, slot_bytes=64) as writer, pytest.raises(RingError):
        writer.write(np.zeros(2, dtype=dtype))


def test_slots_are_rounded_up_to_cache_lines(path: Path) -> None:
    with TensorRingWriter(path, num_slots=1, slot_bytes=65) as writer:
        assert writer.slot_bytes == 128


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 64), (1, 0), (-1, 64)])
def test_an_empty_ring_is_refused(path: Path, num_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        TensorRingWriter(path, num_slots=num_slots, slot_bytes=slot_bytes)


def test_the_file_is_private_and_removed_at_the_end(path: Path) -> None:
    with TensorRingWriter(path, num_slots=1, slot_bytes=64):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@pytest.mark.parametrize("content", [b"BKRING99" + b"\0" * 184, b"BKRING01" + b"\0" * 56, b"x" * 64])
def test_a_file_that_is_no_ring_is_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content + b"\x01" * 64)
    with pytest.raises(RingError):
        TensorRingReader(path)


def test_a_ring_that_is_cut_short_is_an_error(path: Path) -> None:
    writer = TensorRingWriter(path, num_slots=4, slot_bytes=64)
    data = path.read_bytes()
    path.with_name("short").write_bytes(data[:-1])
    with pytest.raises(RingError):
        TensorRingReader(path.with_name("short"))
    writer.close()


@pytest.mark.parametrize("num_bytes", [1, 20, 31])
def test_a_file_shorter_than_its_header_is_an_error(path: Path, num_bytes: int) -> None:
    path.write_bytes(b"BKRING01" + b"\0" * 24)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(RingError):
        TensorRingReader(path)


def test_a_reader_outlives_its_writer(path: Path) -> None:
    writer = TensorRingWriter(path, num_slots=1, slot_bytes=64)
    reader = TensorRingReader(path)
    ref = writer.write(_array(3.0, 4))
    writer.close()
    assert (reader.read(ref) == 3.0).all()
    reader.close()
