"""The slabs of a group: one per rank, written by the peers. Allocated, zeroed, exchanged and mapped here.

device   GPU memory, mapped into the peers by CUDA IPC: where GPUs reach each other
pinned   shared host memory, registered with CUDA in every process: where they don't
local    all ranks in this process: tests and single-GPU measurements
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verifier.allreduce.errors import SetupFailed
from verifier.allreduce.exchange import Exchange, share_trouble
from verifier.allreduce.library import KernelLibrary

__all__ = ["SlabKind", "Slabs", "local_slabs", "shared_device_slabs", "shared_pinned_slabs"]

SlabKind = Literal["device", "pinned"]
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - names are random, files are unlinked once all ranks have mapped them


@dataclass(slots=True, kw_only=True)
class Slabs:
    """``addresses[r]``: rank r's slab as this process (and its GPU) sees it. ``close`` unmaps and frees."""

    addresses: list[int]
    close: Callable[[], None]


def local_slabs(library: KernelLibrary, *, world: int, num_bytes: int, kind: SlabKind) -> Slabs:
    """All slabs in this process."""
    allocate, free = (
        (library.device_alloc, library.device_free) if kind == "device" else (library.host_alloc, library.host_free)
    )
    addresses = [allocate(num_bytes) for _ in range(world)]

    def close() -> None:
        for address in addresses:
            free(address)

    return Slabs(addresses=addresses, close=close)


def shared_device_slabs(library: KernelLibrary, exchange: Exchange, *, rank: int, num_bytes: int) -> Slabs:
    """This rank's slab in GPU memory and the peers' through CUDA IPC.

    Raises:
        SetupFailed: no memory, or a peer's GPU can't be mapped (then use pinned slabs). All ranks raise together.
    """
    own = library.device_alloc(num_bytes)
    handles = exchange.all_gather(library.ipc_export(own))
    opened: dict[int, int] = {}
    trouble = ""
    try:
        for peer, handle in enumerate(handles):
            if peer != rank:
                opened[peer] = library.ipc_open(handle)
    except SetupFailed as error:
        trouble = f"rank {rank}: {error}"

    def close() -> None:
        for address in opened.values():
            library.ipc_close(address)
        library.device_free(own)

    _close_if_any(share_trouble(exchange, trouble), close)
    return Slabs(addresses=[own if peer == rank else opened[peer] for peer in range(len(handles))], close=close)


def shared_pinned_slabs(library: KernelLibrary, exchange: Exchange, *, rank: int, num_bytes: int) -> Slabs:
    """All slabs in shared host memory. Each rank touches its own first, so it lies on that rank's memory node.

    Raises:
        SetupFailed: shared memory or registration refused. All ranks raise together.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path = _SHARED_MEMORY / f"breakeven-allreduce-{secrets.token_hex(8)}"
    maps: list[tuple[mmap.mmap, int]] = []
    addresses: list[int] = []
    trouble = ""
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # zeroes, and fails now rather than by SIGBUS later
    except OSError as error:
        trouble = f"rank {rank}: {size} bytes of shared memory: {error}"
    names = exchange.all_gather(path.name.encode())
    try:
        if not trouble:
            for name in names:
                view, address = _map_file(_SHARED_MEMORY / name.decode(), size)
                maps.append((view, address))
                addresses.append(library.host_register(address, size))
    except (OSError, SetupFailed) as error:
        trouble = f"rank {rank}: {error}"

    def close() -> None:
        for _, address in maps[: len(addresses)]:
            library.host_unregister(address)
        addresses.clear()
        for view, _ in maps:
            with suppress(BufferError):  # a ctypes view may still live; the mapping then ends with the process
                view.close()

    try:
        _close_if_any(share_trouble(exchange, trouble), close)
    finally:
        path.unlink(missing_ok=True)
    return Slabs(addresses=list(addresses), close=close)


def _map_file(path: Path, size: int) -> tuple[mmap.mmap, int]:
    with path.open("r+b") as file:
        view = mmap.mmap(file.fileno(), size)
    return view, ctypes.addressof(ctypes.c_char.from_buffer(view))


def _close_if_any(trouble: str, close: Callable[[], None]) -> None:
    if trouble:
        close()
        raise SetupFailed(trouble)
