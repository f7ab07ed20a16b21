"""Random delays inside the kernels, thousands of calls; and the build without its fence, which must be caught."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import pytest
import torch

from tests.gpu.allreduce.rig import KIB, TOPOLOGIES, assert_reduced, name_of, payload, random_call, same_bits, tree_sum
from verifier.allreduce.group import virtual_group
from verifier.allreduce.library import KernelLibrary
from verifier.allreduce.slabs import SlabKind
from verifier.allreduce.tactics import Tactic, Topology


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name_of)
def test_torture(torture_library: KernelLibrary, topology: Topology, kind: str) -> None:
    group = virtual_group(torture_library, topology, ll_bytes=64 * KIB, bulk_bytes=256 * KIB, kind=kind)  # type: ignore[arg-type]
    group.set_epoch(2**32 - 1 - 150)
    rng = random.Random(11)
    for batch in range(8):
        group.delay_ns = rng.choice((0, 300, 3000, 30000))
        done = []
        for number in range(40):
            group.delay_seed = rng.getrandbits(32)
            tactic, dtype, shape = random_call(rng, group, 256 * KIB)
            inputs = payload(topology.world, shape, dtype, batch * 100 + number)
            outputs = [torch.full_like(each, float("nan")) for each in inputs]
            group.all_reduce(inputs, outputs, tactic=tactic)
            done.append((inputs, outputs, f"{tactic} {dtype} {shape}"))
        torch.cuda.synchronize()
        group.check()
        for inputs, outputs, what in done:
            assert_reduced(group, inputs, outputs, what)
    group.close()


@dataclass(frozen=True)
class Attempt:
    """A setting in which a flag without its fence may overtake the payload: memory and the crowd on the way to it."""

    kind: SlabKind
    num_bytes: int
    num_ctas: int
    jam_words: int
    jam_grid: int = 90


WORLD = Topology(world=2, island_size=2)
MOST_TELLING = Attempt("pinned", 64 * KIB, 4, jam_words=64)  # 5 and 2 of 200 wrong on an H200
ATTEMPTS = [
    Attempt("pinned", 256 * KIB, 16, jam_words=1),
    Attempt("pinned", 256 * KIB, 16, jam_words=7),
    MOST_TELLING,
    Attempt("device", 1024 * KIB, 16, jam_words=1),
    Attempt("device", 1024 * KIB, 16, jam_words=16),
]


def count_wrong_calls(library: KernelLibrary, attempt: Attempt, calls: int) -> int:
    group = virtual_group(library, WORLD, ll_bytes=16, bulk_bytes=attempt.num_bytes, kind=attempt.kind)
    crowded = torch.zeros(1 << 18, dtype=torch.int32, device="cuda" if attempt.kind == "device" else "cpu")
    crowded = crowded if attempt.kind == "device" else crowded.pin_memory()
    side = torch.cuda.Stream()
    tactic = Tactic(family="bulk", shape="one-shot", num_ctas=attempt.num_ctas)
    wrong = 0
    for first in range(0, calls, 25):
        done = []
        for number in range(25):
            inputs = payload(2, (attempt.num_bytes // 2,), torch.bfloat16, first + number)
            done.append((inputs, [torch.full_like(each, float("nan")) for each in inputs]))
        torch.cuda.synchronize()
        rounds = 4000 if attempt.kind == "device" else 200
        library.jam(
            crowded.data_ptr(), words=attempt.jam_words, rounds=rounds, grid=attempt.jam_grid, stream=side.cuda_stream
        )
        for inputs, outputs in done:
            group.all_reduce(inputs, outputs, tactic=tactic)
        torch.cuda.synchronize()
        group.check()
        for inputs, outputs in done:
            expected = tree_sum(inputs, 2)
            wrong += any(not same_bits(output, expected) for output in outputs)
    group.close()
    return wrong


def test_without_the_release_fence_results_are_wrong(
    broken_library: KernelLibrary, fenced_library: KernelLibrary
) -> None:
    """If this build passed, the torture above would prove nothing about the fence.

    It takes a crowd of foreign stores on the way to memory: an H200 with nothing else to do keeps the order by itself.
    """
    whole = [count_wrong_calls(fenced_library, attempt, 200) for attempt in ATTEMPTS]
    assert not any(whole), whole
    broken = [count_wrong_calls(broken_library, attempt, 200) for attempt in ATTEMPTS]
    broken.append(count_wrong_calls(broken_library, MOST_TELLING, 1000))
    sys.stderr.write(f"wrong calls without the fence, of 200 each and of 1,000: {broken}\n")
    assert any(broken), broken
