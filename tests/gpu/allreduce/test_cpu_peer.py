"""A CPU thread plays a rank over pinned memory: real PCIe between the ranks, and a receiver that is no GPU."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from tests.gpu.allreduce.rig import KIB, assert_reduced, payload, same_bits, tree_sum
from verifier.allreduce.errors import PeerTimeout
from verifier.allreduce.group import AllReduceGroup, virtual_group
from verifier.allreduce.library import Control, ErrorWord, KernelLibrary, RankBuffers
from verifier.allreduce.tactics import Tactic, Topology

CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class CpuRank:
    """Rank 1 of a world of two, its control block in host memory."""

    def __init__(self, library: KernelLibrary, group: AllReduceGroup, *, start_epoch: int = 1) -> None:
        self.library = library
        self.group = group
        self.error = ErrorWord()
        self.control = Control(
            epoch=start_epoch, aborted=0, arrived=0, timeout_ns=20_000_000_000, error=ctypes.addressof(self.error)
        )

    def run(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], tactic: Tactic, calls: int) -> None:
        """``calls`` calls one after the other, each over the same tensors unless there are as many of them."""
        for number in range(calls):
            x, y = inputs[number % len(inputs)], outputs[number % len(outputs)]
            call = self.group.describe(x.numel() * x.element_size(), tactic)
            call.first_rank, call.num_ranks, call.ctas = 1, 1, 1
            call.ranks[0] = RankBuffers(input=x.data_ptr(), output=y.data_ptr(), control=ctypes.addressof(self.control))
            self.library.run_on_cpu(
                call,
                dtype=CODES[x.dtype],
                shape=tactic.island_of(self.group.topology),
                bulk=tactic.family == "bulk",
            )


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def pair(library: KernelLibrary, bulk_bytes: int = 256 * KIB) -> AllReduceGroup:
    topology = Topology(world=2, island_size=2, peer_access=False)
    return virtual_group(library, topology, ll_bytes=64 * KIB, bulk_bytes=bulk_bytes, kind="pinned")


def exchange(
    library: KernelLibrary,
    group: AllReduceGroup,
    peer: CpuRank,
    tactic: Tactic,
    size: int,
    dtype: torch.dtype,
    calls: int,
    crowd: Callable[[], None] = lambda: None,
) -> int:
    """Run ``calls`` calls with fresh data each; how many were wrong on either side."""
    gpu_rank = group.member(0)
    batch = [payload(2, (size,), dtype, seed) for seed in range(calls)]
    theirs = [aligned((size,), dtype) for _ in range(calls)]
    for host, (_, device) in zip(theirs, batch, strict=True):
        host.copy_(device)
    answers = [torch.full_like(host, float("nan")) for host in theirs]
    results = [torch.full_like(x, float("nan")) for x, _ in batch]
    torch.cuda.synchronize()
    thread = threading.Thread(target=peer.run, args=(theirs, answers, tactic, calls))
    crowd()
    thread.start()
    for (x, _), y in zip(batch, results, strict=True):
        gpu_rank.all_reduce([x], [y], tactic=tactic)
    thread.join()
    torch.cuda.synchronize()
    wrong = 0
    for pair_, mine, other in zip(batch, results, answers, strict=True):
        expected = tree_sum(pair_, 2)
        wrong += not (same_bits(mine, expected) and torch.equal(mine.cpu(), other))
    return wrong


def test_a_cpu_peer_gets_the_same_bits(library: KernelLibrary) -> None:
    group = pair(library)
    peer = CpuRank(library, group)
    rng = random.Random(4)
    for _ in range(40):
        dtype = rng.choice(list(CODES))
        family, shape = rng.choice(("ll", "bulk")), rng.choice(("one-shot", "two-shot"))
        tactic = Tactic(family=family, shape=shape, num_ctas=rng.choice((1, 4, 8)))  # type: ignore[arg-type]
        size = rng.randrange(64, 16 * KIB)
        assert exchange(library, group, peer, tactic, size, dtype, 10) == 0, f"{tactic} {size} {dtype}"
    group.check()
    group.close()


@pytest.mark.parametrize("shape", ["one-shot", "two-shot"])
def test_the_pull_direction(library: KernelLibrary, shape: str) -> None:
    group = pair(library)
    peer = CpuRank(library, group)
    for family in ("ll", "bulk"):
        tactic = Tactic(family=family, shape=shape, num_ctas=4, direction="pull")  # type: ignore[arg-type]
        assert exchange(library, group, peer, tactic, 7168, torch.bfloat16, 50) == 0
    group.close()


def test_a_dead_cpu_peer_is_noticed(library: KernelLibrary) -> None:
    group = pair(library)
    group.set_timeout(0.3)
    gpu_rank = group.member(0)
    x = payload(1, (7168,), torch.bfloat16, 0)[0]
    y = torch.zeros_like(x)
    gpu_rank.all_reduce([x], [y])
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeout) as caught:
        gpu_rank.check()
    assert caught.value.peer == 1
    assert bool(y.isnan().all())
    group.close()


def test_the_flag_waits_for_the_payload_over_pcie(broken_library: KernelLibrary, fenced_library: KernelLibrary) -> None:
    """With the fence no call is wrong. Without it the flag may overtake; how often is reported, not demanded."""
    crowded = torch.zeros(1 << 18, dtype=torch.int32).pin_memory()
    side = torch.cuda.Stream()
    counts = {}
    for size, words in ((448 * 8, 1), (448 * 8, 7), (16 * KIB, 1), (16 * KIB, 64), (128 * KIB, 7)):
        tactic = Tactic(family="bulk", shape="one-shot", num_ctas=1)
        for name, library in (("with", fenced_library), ("without", broken_library)):
            group = pair(library)
            peer = CpuRank(library, group)

            def crowd(library: KernelLibrary = library, words: int = words) -> None:
                library.jam(crowded.data_ptr(), words=words, rounds=200, grid=120, stream=side.cuda_stream)

            counts[name, size, words] = sum(
                exchange(library, group, peer, tactic, size, torch.bfloat16, 50, crowd) for _ in range(6)
            )
            group.close()
    sys.stderr.write(f"wrong calls of 300 over PCIe by fence, elements, crowded lines: {counts}\n")
    assert not any(count for (name, *_), count in counts.items() if name == "with"), counts


def test_two_gpu_ranks_agree_with_a_lone_one(library: KernelLibrary) -> None:
    group = pair(library)
    inputs = payload(2, (7168,), torch.bfloat16, 0)
    outputs = [torch.empty_like(x) for x in inputs]
    group.all_reduce(inputs, outputs)
    assert_reduced(group, inputs, outputs, "both on the GPU, through host memory")
    group.close()
