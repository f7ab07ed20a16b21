"""How the ranks of a group tell each other where their memory is, once, at start."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Exchange", "GroupExchange", "StoreExchange", "share_trouble"]


class Exchange(Protocol):
    """A small all-gather over the host."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order. Blocks until all have called."""
        ...

    def barrier(self) -> None:
        """Block until all ranks are here."""
        ...


class GroupExchange:
    """Over a torch.distributed process group with a CPU backend (gloo)."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist  # only ranks inside torch.distributed need it

        self._dist = dist
        self._group = group

    def all_gather(self, payload: bytes) -> list[bytes]:
        """See Exchange."""
        found: list[bytes | None] = [None] * self._dist.get_world_size(self._group)
        self._dist.all_gather_object(found, payload, group=self._group)
        return [each for each in found if each is not None]

    def barrier(self) -> None:
        """See Exchange."""
        self._dist.barrier(group=self._group)


class StoreExchange:
    """Over a key-value store with ``set``, blocking ``get`` and ``wait`` (torch's TCPStore or FileStore)."""

    def __init__(self, store: Any, *, rank: int, world: int, prefix: str = "allreduce") -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._prefix = prefix
        self._turn = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        """See Exchange."""
        self._turn += 1
        keys = [f"{self._prefix}/{self._turn}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], payload.hex())
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def barrier(self) -> None:
        """See Exchange."""
        self.all_gather(b"")


def share_trouble(exchange: Exchange, trouble: str) -> str:
    """What went wrong on any rank, told to all; "" if nothing did. None goes on alone, none waits for one that left."""
    reports = [each.decode() for each in exchange.all_gather(trouble.encode())]
    return "; ".join(each for each in reports if each)
