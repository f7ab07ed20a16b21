"""All-reduces that must not be chosen."""

from __future__ import annotations

import os
import time

import torch

from verifier.allreduce.tuner_backends import GatherBackend, GlooBackend


class Wrong(GlooBackend):
    """Forgets a rank's share of the last element."""

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        own = data.view(-1)[-1].clone()
        super().all_reduce(data)
        data.view(-1)[-1] -= own
        return data


class Hanging(GlooBackend):
    """Rank 1 never comes to the second size."""

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        if data.shape[0] > 1 and self._rank == 1:
            time.sleep(3600)
        return super().all_reduce(data)

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        self._rank = rank
        super().open(rank=rank, world=world, max_numel=max_numel, options=options)


class Dying(Hanging):
    """Rank 1's process ends in the middle."""

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        if data.shape[0] > 1 and self._rank == 1:
            os.abort()
        return GlooBackend.all_reduce(self, data)


class Slow(GatherBackend):
    """Right, and two milliseconds late."""

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return super().all_reduce(data)
