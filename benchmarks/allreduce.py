"""Microseconds per all-reduce by message size: our tactics, with and without the fused norm, against floors and NCCL.

    python -m benchmarks.allreduce --ranks 8              as many GPUs: one process each, NCCL beside ours
    python -m benchmarks.allreduce --ranks 8 --virtual    one GPU: all ranks are CTAs of one launch

    python -m benchmarks.allreduce --cpu-peer             one GPU and one CPU thread, over pinned memory

Calls are never timed alone: a graph of 122 of them (one pass of a 61-layer model) is replayed, and the median replay
divided by 122. With several GPUs the slowest rank counts. Every configuration is checked bit for bit.

Virtual ranks share one memory instead of a bus, so their times show the protocol's own cost (hops, polls, barriers),
not PCIe; with --pinned their words do cross the bus to host memory and back. The floors beside them: an empty kernel of
the same grid, a copy of the bytes on the wire, and those bytes over the memory bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

from benchmarks.provenance import provenance
from verifier.allreduce.exchange import StoreExchange
from verifier.allreduce.group import AllReduceGroup, Norm, join_group, virtual_group
from verifier.allreduce.library import Control, ErrorWord, KernelLibrary, RankBuffers, build_library
from verifier.allreduce.slabs import SlabKind
from verifier.allreduce.tactics import Tactic, Topology, candidate_tactics, sent_bytes

__all__ = ["main"]

HIDDEN = 7168
ROWS = (1, 2, 4, 8, 16, 32, 64)  # 14 KiB each in bfloat16
CALLS = 122
LL_BYTES, BULK_BYTES = 224 * 1024, 1024 * 1024
CACHE = Path.home() / ".cache" / "breakeven" / "allreduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One row of the result."""

    what: str
    num_bytes: int
    us: float
    ctas: int = 0


def time_graph(enqueue: Callable[[], object], *, calls: int, replays: int) -> float:
    """Median microseconds per call of a graph that holds ``calls`` of them."""
    enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            enqueue()
    times: list[float] = []
    for replay in range(replays + 2):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 2:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def expected_sum(inputs: Sequence[torch.Tensor], island: int) -> torch.Tensor:
    """The reduction tree in plain torch."""
    parts = []
    for first in range(0, len(inputs), island):
        part = inputs[first].float()
        for each in inputs[first + 1 : first + island]:
            part = part + each.float()
        parts.append(part)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(inputs[0].dtype)


# ---------------------------------------------------------------- one GPU, virtual ranks


def virtual_timings(library: KernelLibrary, topology: Topology, kind: SlabKind, replays: int) -> Iterator[Timing]:
    """The best grid of every family and shape, per size."""
    group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=BULK_BYTES, kind=kind)
    world = topology.world
    weight = torch.rand(HIDDEN, device="cuda").to(torch.bfloat16)
    for rows in ROWS:
        inputs = [torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16) for _ in range(world)]
        outputs = [torch.empty_like(each) for each in inputs]
        residual = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        norms = [
            Norm(residual=residual, residual_output=torch.empty_like(each), weight=weight, eps=1e-6) for each in inputs
        ]
        expected = expected_sum(inputs, topology.island_size)
        num_bytes = rows * HIDDEN * 2
        best: dict[str, Timing] = {}
        for tactic in candidate_tactics(topology):
            if num_bytes > group.capacity(tactic) or tactic.num_ctas * world > 128 or tactic.direction != "push":
                continue
            for fused in (False, True):
                if fused and tactic.num_ctas > max(rows, 1):
                    continue  # one CTA per row: more would idle
                if not fused and tactic.num_ctas * 448 * 16 > 4 * num_bytes:
                    continue
                name = f"{tactic.family} {tactic.shape}{' + norm' if fused else ''}"
                us = _time_virtual(group, inputs, outputs, norms if fused else None, tactic, expected, replays)
                if name not in best or us < best[name].us:
                    best[name] = Timing(what=name, num_bytes=num_bytes, us=us, ctas=tactic.num_ctas)
        yield from best.values()
    group.check()
    group.close()


def _time_virtual(
    group: AllReduceGroup,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    norms: list[Norm] | None,
    tactic: Tactic,
    expected: torch.Tensor,
    replays: int,
) -> float:
    us = time_graph(lambda: group.all_reduce(inputs, outputs, tactic=tactic, norms=norms), calls=CALLS, replays=replays)
    if norms is None and not all(torch.equal(each, expected) for each in outputs):
        raise RuntimeError(f"{tactic} is wrong")
    return us


def floors(library: KernelLibrary, topology: Topology, replays: int) -> Iterator[Timing]:
    """What no version can beat on this GPU, per size."""
    big = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    copy_us = time_graph(partial(other.copy_, big), calls=2, replays=5)
    bytes_per_us = 2 * big.numel() / copy_us
    yield Timing(what="memory bandwidth, GB/s read + written", num_bytes=big.numel(), us=bytes_per_us / 1000)
    del big, other

    def empty() -> None:
        stream = int(torch.cuda.current_stream().cuda_stream)
        library.launch_empty(grid=8 * topology.world, threads=448, stream=stream)

    yield Timing(what="empty kernel", num_bytes=0, us=time_graph(empty, calls=CALLS, replays=replays))
    for rows in ROWS:
        num_bytes = rows * HIDDEN * 2
        for tactic in candidate_tactics(topology):
            if tactic.num_ctas != 1 or tactic.direction != "push":
                continue
            if num_bytes > (LL_BYTES if tactic.family == "ll" else BULK_BYTES):
                continue
            wire = topology.world * sent_bytes(topology, tactic, num_bytes, "bfloat16")
            source = torch.empty(wire, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            us = time_graph(partial(target.copy_, source), calls=CALLS, replays=replays)
            name = f"{tactic.family} {tactic.shape}"
            yield Timing(what=f"copy of the wire bytes of {name}", num_bytes=num_bytes, us=us)
            yield Timing(what=f"wire bytes of {name} over bandwidth", num_bytes=num_bytes, us=2 * wire / bytes_per_us)


# ---------------------------------------------------------------- one GPU and one CPU thread


def cpu_peer_timings(library: KernelLibrary, replays: int) -> Iterator[Timing]:
    """World of two: rank 0 the GPU, rank 1 a CPU thread, every word over PCIe."""
    topology = Topology(world=2, island_size=2, peer_access=False)
    group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=LL_BYTES, kind="pinned")
    on_gpu = group.member(0)
    error = ErrorWord()
    control = Control(epoch=1, timeout_ns=20_000_000_000, error=ctypes.addressof(error))
    for rows in ROWS[:4]:
        x = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        theirs = torch.randn(rows, HIDDEN).to(torch.bfloat16).pin_memory()
        y, answer = torch.empty_like(x), torch.empty_like(theirs)
        num_bytes = x.numel() * 2
        for tactic in candidate_tactics(topology):
            if tactic.num_ctas not in (1, 4):
                continue
            call = group.describe(num_bytes, tactic)
            call.first_rank, call.num_ranks, call.ctas = 1, 1, 1
            call.ranks[0] = RankBuffers(
                input=theirs.data_ptr(), output=answer.data_ptr(), control=ctypes.addressof(control)
            )
            peer = threading.Thread(
                target=library.run_on_cpu,
                args=(call,),
                kwargs={
                    "dtype": 0,
                    "shape": tactic.island_of(topology),
                    "bulk": tactic.family == "bulk",
                    "times": 1 + CALLS * (replays + 2),
                },
            )
            peer.start()
            us = time_graph(partial(on_gpu.all_reduce, [x], [y], tactic=tactic), calls=CALLS, replays=replays)
            peer.join()
            if not torch.equal(y.cpu(), expected_sum([x.cpu(), theirs], 2)) or not torch.equal(y.cpu(), answer):
                raise RuntimeError(f"{tactic} is wrong with a CPU peer")
            name = f"{tactic.family} {tactic.shape}, CPU peer"
            yield Timing(what=name, num_bytes=num_bytes, us=us, ctas=tactic.num_ctas)
    group.check()


# ---------------------------------------------------------------- several GPUs, one process each


def _run_rank(rank: int, topology: Topology, store_path: str, what: str, replays: int, results: Any) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = FileStore(store_path, topology.world)
    exchange = StoreExchange(store, rank=rank, world=topology.world, prefix=what)
    timings: list[Timing] = []
    if what.startswith("nccl"):
        torch.distributed.init_process_group(
            "nccl", store=PrefixStore("nccl", store), rank=rank, world_size=topology.world
        )
        for rows in ROWS:
            x = torch.ones(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            us = time_graph(partial(torch.distributed.all_reduce, x), calls=CALLS, replays=replays)
            timings.append(Timing(what=what, num_bytes=x.numel() * 2, us=us))
        torch.distributed.destroy_process_group()
    else:
        timings += _our_timings(rank, replace(topology, peer_access=what == "ours"), exchange, what, replays)
    everyone = [json.loads(each) for each in exchange.all_gather(json.dumps([each.us for each in timings]).encode())]
    if rank == 0:
        slowest = [max(column) for column in zip(*everyone, strict=True)]
        results.put([replace(each, us=us) for each, us in zip(timings, slowest, strict=True)])


def _our_timings(rank: int, topology: Topology, exchange: StoreExchange, what: str, replays: int) -> Iterator[Timing]:
    library = KernelLibrary(build_library(CACHE, compute_capability=torch.cuda.get_device_capability()))
    group = join_group(library, topology, exchange, rank=rank, ll_bytes=LL_BYTES, bulk_bytes=BULK_BYTES, timeout_s=30.0)
    generator = torch.Generator().manual_seed(0)
    # Processes that share a GPU must all be resident at once.
    ctas = (1, 2, 4, 8, 16) if torch.cuda.device_count() >= topology.world else (1, 8)
    weight = torch.rand(HIDDEN, generator=generator).cuda().to(torch.bfloat16)
    for rows in ROWS:
        everyone = [torch.randn(rows, HIDDEN, generator=generator).to(torch.bfloat16) for _ in range(topology.world)]
        x = everyone[rank].cuda()
        y = torch.empty_like(x)
        norm = Norm(residual=torch.zeros_like(x), residual_output=torch.empty_like(x), weight=weight, eps=1e-6)
        expected = expected_sum(everyone, topology.island_size).cuda()
        num_bytes = x.numel() * 2
        for tactic in candidate_tactics(topology):
            if num_bytes > group.capacity(tactic) or tactic.num_ctas not in ctas:
                continue
            for fused in (False, True):
                if fused and tactic.num_ctas > rows:
                    continue
                exchange.barrier()
                norms = [norm] if fused else None
                us = time_graph(
                    partial(group.all_reduce, [x], [y], tactic=tactic, norms=norms), calls=CALLS, replays=replays
                )
                group.check()
                if not fused and not torch.equal(y, expected):
                    raise RuntimeError(f"rank {rank}: {tactic} is wrong")
                name = f"{what} {tactic.family} {tactic.shape} {tactic.direction}{' + norm' if fused else ''}"
                yield Timing(what=name, num_bytes=num_bytes, us=us, ctas=tactic.num_ctas)
    exchange.barrier()
    group.close()


def process_timings(topology: Topology, replays: int, *, with_nccl: bool) -> list[Timing]:
    """NCCL as it comes, NCCL without peer access, ours, and ours through pinned memory; each in fresh processes."""
    context = torch.multiprocessing.get_context("spawn")
    found: list[Timing] = []
    everything: list[tuple[str, dict[str, str]]] = [
        ("nccl", {}),
        ("nccl NCCL_P2P_DISABLE=1", {"NCCL_P2P_DISABLE": "1"}),
        ("ours", {}),
        ("ours pinned", {}),
    ]
    for what, environment in everything if with_nccl else everything[2:]:
        os.environ.update(environment)
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as directory:
            arguments = (topology, str(Path(directory) / "store"), what, replays, results)
            ranks = [context.Process(target=_run_rank, args=(rank, *arguments)) for rank in range(topology.world)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(timeout=600)
                if process.is_alive():
                    process.kill()
            if all(process.exitcode == 0 for process in ranks):
                found += results.get()
            else:
                print(f"{what}: failed, exit codes {[process.exitcode for process in ranks]}", file=sys.stderr)
        for name in environment:
            del os.environ[name]
    return found


# ---------------------------------------------------------------- report


def print_table(timings: Sequence[Timing]) -> None:
    """Rows: what; columns: message size in KiB; the fastest grid."""
    sizes = sorted({each.num_bytes for each in timings if each.what.startswith(("ll", "bulk", "ours", "nccl"))})
    print(f"{'us per call':42}" + "".join(f"{size // 1024:>8} K" for size in sizes))
    for what in dict.fromkeys(each.what for each in timings):
        row = [[each.us for each in timings if each.what == what and each.num_bytes == size] for size in sizes]
        if any(row):
            print(f"{what:42}" + "".join(f"{min(cell):>10.2f}" if cell else " " * 10 for cell in row))
    for each in timings:
        if each.num_bytes not in sizes:
            print(f"{each.what}: {each.us:.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, choices=(2, 4, 8))
    parser.add_argument(
        "--island", type=int, default=0, help="ranks per island; 0 = half the ranks from 4 on, else all"
    )
    parser.add_argument("--virtual", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--cpu-peer", action="store_true", help="one GPU and a CPU thread over pinned memory")
    parser.add_argument("--share-gpu", action="store_true", help="more processes than GPUs (under MPS); without NCCL")
    parser.add_argument("--pinned", action="store_true", help="with --virtual: slabs in pinned host memory")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/allreduce"))
    options = parser.parse_args(argv)
    topology = Topology(
        world=options.ranks,
        island_size=options.island or (options.ranks // 2 if options.ranks > 2 else 2),
        peer_access=not options.pinned,
    )
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    timings: list[Timing] = []
    if options.virtual or options.cpu_peer:
        library = KernelLibrary(build_library(CACHE, compute_capability=torch.cuda.get_device_capability()))
        if options.cpu_peer:
            timings += cpu_peer_timings(library, options.replays)
        else:
            timings += virtual_timings(library, topology, "pinned" if options.pinned else "device", options.replays)
            if not options.pinned:
                timings += floors(library, topology, options.replays)
    elif torch.cuda.device_count() < options.ranks and not options.share_gpu:
        print(
            f"{options.ranks} ranks need as many GPUs (or --virtual); here: {torch.cuda.device_count()}",
            file=sys.stderr,
        )
        return 1
    else:
        timings += process_timings(topology, options.replays, with_nccl=not options.share_gpu)
    print_table(timings)
    mode = "virtual" if options.virtual else "shared-gpu" if options.share_gpu else "gpus"
    name = "cpu-peer.json" if options.cpu_peer else f"{mode}-{options.ranks}{'-pinned' if options.pinned else ''}.json"
    result = {
        "provenance": provenance(sys.argv if argv is None else argv, seed=0),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "calls_per_graph": CALLS,
        "island_size": topology.island_size,
        "timings": [
            {"what": each.what, "bytes": each.num_bytes, "us": round(each.us, 3), "ctas": each.ctas} for each in timings
        ],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / name).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"result": str(options.output / name), "timings": len(timings)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
