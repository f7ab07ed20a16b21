"""The all-reduce replacement: two real processes over gloo, each with a coordinator as SGLang's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from verifier.sglang.plugin.all_reduce import AllReduceGroup, AllReduceReplacement

MODULE = "tests.verifier.sglang.test_all_reduce"


class CountingProvider:
    """Sums by gathering, for float32 up to 64 bytes; counts."""

    def __init__(self, group: AllReduceGroup) -> None:
        self.group, self.count = group, 0

    def supports(self, num_bytes: int, dtype: Any, world_size: int) -> bool:
        return num_bytes <= 64 and dtype == torch.float32 and world_size == self.group.world_size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        parts = [torch.empty_like(tensor) for _ in range(self.group.world_size)]
        dist.all_gather(parts, tensor, group=self.group.device_group)
        return torch.stack(parts).sum(0)


def fails_on_rank_1(group: AllReduceGroup) -> CountingProvider:
    if group.rank == 1:
        raise RuntimeError("no such kernel here")
    return CountingProvider(group)


def coordinator(name: str = "tp:0", world_size: int = 1, rank: int = 0) -> Any:
    group = dist.group.WORLD if dist.is_initialized() else None
    return SimpleNamespace(
        unique_name=name,
        world_size=world_size,
        rank_in_group=rank,
        cpu_group=group,
        device_group=group,
        device=torch.device("cpu"),
    )


def test_other_groups_and_single_ranks_keep_the_engines_own() -> None:
    replacement = AllReduceReplacement(f"{MODULE}:CountingProvider")
    for own in (coordinator("pp:0", world_size=2), coordinator("tp:0", world_size=1)):
        replacement.after_group_init(None, own)
        assert replacement.around_all_reduce(lambda group, tensor: "own", own, torch.zeros(2)) == "own"


def test_a_tensor_that_is_not_contiguous_is_the_engines() -> None:
    replacement, own = AllReduceReplacement(""), coordinator(world_size=2)
    provider = CountingProvider(AllReduceGroup(rank=0, world_size=2, cpu_group=None, device_group=None, device=None))
    replacement._providers[id(own)] = provider
    assert replacement.around_all_reduce(lambda group, tensor: "own", own, torch.zeros(2, 2)[:, 0]) == "own"


@pytest.mark.integration
@pytest.mark.slow
def test_two_ranks_agree_on_the_provider_and_the_sum_is_right() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = Path(__file__).parents[3]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(rank)],
            cwd=root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    said = [[line for line in output.splitlines() if "replaced" in line] for output in outputs]
    assert said == [["CountingProvider replaced 2", "fails_on_rank_1 replaced 0", "not_there replaced 0"]] * 2


def _run_rank(factory: str, rank: int) -> None:
    replacement = AllReduceReplacement(f"{MODULE}:{factory}")
    own = coordinator(world_size=2, rank=rank)
    replacement.after_group_init(None, own)

    def engines(group: Any, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=group.device_group)
        return tensor

    for tensor in (
        torch.full((4,), float(rank + 1)),  # taken
        torch.full((2, 8), float(rank + 1)),  # taken: 64 bytes
        torch.full((17,), float(rank + 1)),  # too large
        torch.full((4,), float(rank + 1), dtype=torch.float64),  # another type
    ):
        found = replacement.around_all_reduce(engines, own, tensor)
        assert found.shape == tensor.shape
        assert bool((found == 3.0).all()), (tensor, found)
    print(f"{factory} replaced {replacement.num_replaced}")  # noqa: T201


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2)
    for name in ("CountingProvider", "fails_on_rank_1", "not_there"):
        _run_rank(name, int(sys.argv[1]))
    dist.destroy_process_group()
