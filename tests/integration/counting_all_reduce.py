"""An all-reduce provider that really reduces, and says in a file how often: for a real engine of several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verifier.sglang.plugin.all_reduce import AllReduceGroup

COUNTS = "BREAKEVEN_TEST_COUNTS"


class CountingAllReduce:
    """Sums in rank order, for up to ``MAX_BYTES``; larger ones stay the engine's."""

    MAX_BYTES = 1 << 16

    def __init__(self, group: AllReduceGroup) -> None:
        self._group = group
        self._file = Path(os.environ[COUNTS]) / f"rank-{group.rank}"
        self._count = 0

    def supports(self, num_bytes: int, dtype: Any, world_size: int) -> bool:
        return num_bytes <= self.MAX_BYTES

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self._group.world_size)]
        dist.all_gather(parts, tensor, group=self._group.device_group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        self._count += 1
        self._file.write_text(str(self._count))
        return total


def provider(group: AllReduceGroup) -> CountingAllReduce:
    return CountingAllReduce(group)
