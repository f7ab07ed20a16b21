"""One process per rank on one GPU: CUDA IPC, or shared pinned memory.

Without MPS the processes take turns on the GPU, so calls are slow and the schedule is as adverse as it gets.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from tests.gpu.allreduce.conftest import CACHE
from tests.gpu.allreduce.rig import KIB, same_bits, tree_sum
from verifier.allreduce.errors import PeerTimeout
from verifier.allreduce.exchange import StoreExchange
from verifier.allreduce.group import join_group
from verifier.allreduce.library import KernelLibrary, build_library
from verifier.allreduce.tactics import Tactic, Topology

pytestmark = pytest.mark.slow
DIES = 3


def inputs_of(world: int, numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(torch.bfloat16) for _ in range(world)]


def run_rank(
    rank: int, world: int, island: int, peer_access: bool, calls: int, store_path: str, results: object
) -> None:
    """The body of each process: random calls, some of them in a graph; reports what was wrong."""
    torch.cuda.set_device(0)
    library = KernelLibrary(build_library(CACHE, compute_capability=torch.cuda.get_device_capability()))
    store = torch.distributed.FileStore(store_path, world)
    exchange = StoreExchange(store, rank=rank, world=world)
    topology = Topology(world=world, island_size=island, peer_access=peer_access)
    group = join_group(library, topology, exchange, rank=rank, ll_bytes=64 * KIB, bulk_bytes=128 * KIB, timeout_s=60.0)
    rng = random.Random(17)  # the same on all ranks
    wrong = []
    for number in range(calls):
        family, shape = rng.choice(("ll", "bulk")), rng.choice(("one-shot", "two-shot", "island"))
        if shape == "island" and not topology.has_islands:
            shape = "two-shot"
        numel = rng.randrange(256, 16 * KIB)
        tactic = Tactic(family=family, shape=shape, num_ctas=rng.choice((1, 4)), num_threads=256)  # type: ignore[arg-type]
        everyone = inputs_of(world, numel, number)
        x = everyone[rank].cuda()
        y = torch.full_like(x, float("nan"))
        group.all_reduce([x], [y], tactic=tactic)
        torch.cuda.synchronize()
        if not same_bits(y.cpu(), tree_sum(everyone, island)):
            wrong.append(f"rank {rank} call {number} {tactic}")
    x = inputs_of(world, 7168, 999)[rank].cuda()
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            group.all_reduce([x], [y])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    group.check()
    if not same_bits(y.cpu(), tree_sum(inputs_of(world, 7168, 999), island)):
        wrong.append(f"rank {rank} graph")
    exchange.barrier()
    group.close()
    results.put((rank, wrong))  # type: ignore[attr-defined]


def run_mortal(rank: int, world: int, store_path: str, results: object) -> None:
    """As above, until rank 1 is gone without a word."""
    torch.cuda.set_device(0)
    library = KernelLibrary(build_library(CACHE, compute_capability=torch.cuda.get_device_capability()))
    store = torch.distributed.FileStore(store_path, world)
    group = join_group(
        library,
        Topology(world=world, island_size=world),
        StoreExchange(store, rank=rank, world=world),
        rank=rank,
        ll_bytes=64 * KIB,
        bulk_bytes=64 * KIB,
        timeout_s=30.0,
    )
    x = torch.ones(7168, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    for number in range(DIES):
        group.all_reduce([x], [y])
        torch.cuda.synchronize()
        if rank == 1 and number == DIES - 1:
            os._exit(9)
    group.set_timeout(1.0)
    start = time.monotonic()
    for _ in range(10):
        group.all_reduce([x], [y])
    torch.cuda.synchronize()
    waited = time.monotonic() - start
    try:
        group.check()
        results.put((rank, waited, "no error", False))  # type: ignore[attr-defined]
    except PeerTimeout as error:
        results.put((rank, waited, f"peer {error.peer}", bool(y.isnan().all())))  # type: ignore[attr-defined]


@pytest.mark.parametrize("peer_access", [True, False], ids=["ipc", "pinned"])
@pytest.mark.parametrize(("world", "island"), [(2, 2), (4, 2), (8, 4)])
def test_processes_agree(library: KernelLibrary, tmp_path: Path, world: int, island: int, peer_access: bool) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    calls = 12 if world < 8 else 6
    arguments = (world, island, peer_access, calls, str(tmp_path / "store"), results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(world)]
    _run(processes)
    assert [process.exitcode for process in processes] == [0] * world
    assert sorted(results.get() for _ in range(world)) == [(rank, []) for rank in range(world)]


def test_a_killed_process_is_noticed_by_the_others(library: KernelLibrary, tmp_path: Path) -> None:
    world = 2
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=run_mortal, args=(rank, world, str(tmp_path / "store"), results))
        for rank in range(world)
    ]
    _run(processes)
    assert processes[1].exitcode == 9
    rank, waited, reason, poisoned = results.get()
    assert (rank, reason, poisoned) == (0, "peer 1", True)
    assert waited < 10.0


def _run(processes: list[multiprocessing.Process]) -> None:
    # Spawned children import this module by name: they need the project on their path.
    root = str(Path(__file__).parents[3])
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([root, *sys.path]))
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=150)
        if process.is_alive():
            process.kill()
            process.join()
