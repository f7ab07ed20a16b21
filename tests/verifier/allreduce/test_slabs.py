"""Ranks find each other's memory, and one rank's trouble is everybody's error, at once."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.verifier.allreduce.memory import aligned_zeros
from verifier.allreduce.errors import SetupFailed
from verifier.allreduce.exchange import StoreExchange, share_trouble
from verifier.allreduce.slabs import Slabs, local_slabs, shared_device_slabs, shared_pinned_slabs


class Exchange:
    """All ranks are threads."""

    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self._rank] = payload
        self._barrier.wait(10)
        found = list(self._board)
        self._barrier.wait(10)
        return found

    def barrier(self) -> None:
        self._barrier.wait(10)


class Library:
    """CUDA's memory calls over plain memory; ``refuses`` names what fails."""

    def __init__(self, refuses: str = "") -> None:
        self._refuses = refuses
        self.live: dict[int, object] = {}
        self.open: list[int] = []

    def _maybe(self, name: str) -> None:
        if self._refuses == name:
            raise SetupFailed(f"{name}: refused")

    def device_alloc(self, num_bytes: int) -> int:
        block = aligned_zeros(num_bytes)
        self.live[block.address] = block
        return block.address

    def device_free(self, address: int) -> None:
        del self.live[address]

    host_alloc, host_free = device_alloc, device_free

    def ipc_export(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def ipc_open(self, handle: bytes) -> int:
        self._maybe("ipc_open")
        self.open.append(int.from_bytes(handle, "little"))
        return self.open[-1]

    def ipc_close(self, address: int) -> None:
        self.open.remove(address)

    def host_register(self, address: int, num_bytes: int) -> int:
        self._maybe("host_register")
        self.open.append(address)
        return address

    def host_unregister(self, address: int) -> None:
        self.open.remove(address)


def run_ranks(count: int, body: Callable[[int, Exchange], Any]) -> list[Any]:
    board, barrier = [b""] * count, threading.Barrier(count)

    def attempt(rank: int) -> Any:
        try:
            return body(rank, Exchange(rank, board, barrier))
        except SetupFailed as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(attempt, range(count)))


@pytest.mark.parametrize("share", [shared_device_slabs, shared_pinned_slabs])
def test_every_rank_reaches_every_slab(share: Callable[..., Slabs]) -> None:
    libraries = [Library() for _ in range(3)]
    before = set(Path("/dev/shm").glob("breakeven-allreduce-*"))
    found = run_ranks(
        3,
        lambda rank, exchange: share(libraries[rank], exchange, rank=rank, num_bytes=5000),  # type: ignore[arg-type]
    )
    for writer in range(3):
        for holder in range(3):  # what the writer stores into the holder's slab, the holder reads there
            ctypes.c_uint64.from_address(found[writer].addresses[holder] + 8 * writer).value = 100 * writer + holder
    for holder in range(3):
        mine = found[holder].addresses[holder]
        assert [ctypes.c_uint64.from_address(mine + 8 * w).value for w in range(3)] == [
            100 * w + holder for w in range(3)
        ]
    for slabs in found:
        slabs.close()
    assert not any(library.open or library.live for library in libraries)
    assert set(Path("/dev/shm").glob("breakeven-allreduce-*")) == before  # nothing outlives the group


@pytest.mark.parametrize(
    ("share", "refuses"), [(shared_device_slabs, "ipc_open"), (shared_pinned_slabs, "host_register")]
)
def test_one_ranks_trouble_is_every_ranks_error(share: Callable[..., Slabs], refuses: str) -> None:
    libraries = [Library(refuses if rank == 1 else "") for rank in range(3)]
    found = run_ranks(
        3,
        lambda rank, exchange: share(libraries[rank], exchange, rank=rank, num_bytes=5000),  # type: ignore[arg-type]
    )
    assert [str(error) for error in found] == [f"rank 1: {refuses}: refused"] * 3
    assert not any(library.open or library.live for library in libraries)


def test_local_slabs_are_apart_and_freed() -> None:
    library = Library()
    slabs = local_slabs(library, world=4, num_bytes=64, kind="device")  # type: ignore[arg-type]
    assert len(set(slabs.addresses)) == 4
    slabs.close()
    assert not library.live


def test_the_store_exchange_gathers_in_rank_order(tmp_path: Path) -> None:
    def body(rank: int) -> list[list[bytes]]:
        store = FileStore(str(tmp_path / "store"), 3)
        exchange = StoreExchange(store, rank=rank, world=3)
        exchange.barrier()
        return [exchange.all_gather(bytes([rank, turn, 255])) for turn in range(2)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(body, range(3)))
    assert found == [[[bytes([rank, turn, 255]) for rank in range(3)] for turn in range(2)]] * 3


def test_trouble_is_joined() -> None:
    found = run_ranks(3, lambda rank, exchange: share_trouble(exchange, "" if rank == 1 else f"rank {rank}: no"))
    assert found == ["rank 0: no; rank 2: no"] * 3
