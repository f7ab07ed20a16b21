"""All ranks as co-resident CTAs of one launch on one GPU: every tactic, size, dtype and odd value."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.allreduce.rig import (
    DTYPES,
    KIB,
    TOPOLOGIES,
    assert_reduced,
    make_norms,
    name_of,
    payload,
    random_call,
    same_bits,
    tree_sum,
)
from verifier.allreduce.errors import CallRefused, PeerTimeout
from verifier.allreduce.group import AllReduceGroup, virtual_group
from verifier.allreduce.library import KernelLibrary
from verifier.allreduce.tactics import Tactic, Topology, candidate_tactics

LL_BYTES, BULK_BYTES = 256 * KIB, 1024 * KIB
WRAP = 2**32 - 1


@pytest.fixture(params=TOPOLOGIES, ids=name_of)
def group(request: pytest.FixtureRequest, library: KernelLibrary) -> Iterator[AllReduceGroup]:
    made = virtual_group(library, request.param, ll_bytes=LL_BYTES, bulk_bytes=BULK_BYTES)
    yield made
    made.close()


def reduce(group: AllReduceGroup, inputs: list[torch.Tensor], tactic: Tactic | None = None) -> list[torch.Tensor]:
    outputs = [torch.full_like(each, float("nan")) for each in inputs]
    group.all_reduce(inputs, outputs, tactic=tactic)
    return outputs


def test_random_calls_are_the_trees_sum(group: AllReduceGroup) -> None:
    rng = random.Random(1)
    world = group.topology.world
    done = []
    for number in range(150):
        tactic, dtype, shape = random_call(rng, group, BULK_BYTES)
        inputs = payload(world, shape, dtype, number)
        done.append((inputs, reduce(group, inputs, tactic), f"call {number} {tactic} {dtype} {shape}"))
    torch.cuda.synchronize()
    group.check()
    for inputs, outputs, what in done:
        assert_reduced(group, inputs, outputs, what)


@pytest.mark.parametrize("kind", ["device", "pinned"])
@pytest.mark.parametrize("num_bytes", [16, 14 * KIB, 56 * KIB, 256 * KIB])
def test_every_tactic_gives_the_same_bits(library: KernelLibrary, num_bytes: int, kind: str) -> None:
    for topology in TOPOLOGIES:
        group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=LL_BYTES, kind=kind)  # type: ignore[arg-type]
        inputs = payload(topology.world, (num_bytes // 2,), torch.bfloat16, 5)
        for tactic in candidate_tactics(topology):
            if num_bytes // 16 < tactic.owners(topology) or tactic.num_ctas * topology.world > 128:
                continue
            outputs = reduce(group, inputs, tactic)
            assert_reduced(group, inputs, outputs, f"{name_of(topology)} {tactic}")
        group.check()
        group.close()


def test_the_table_covers_one_mebibyte(group: AllReduceGroup) -> None:
    for num_bytes in (2, 16, 30, 1 * KIB, 14 * KIB, 28 * KIB, 56 * KIB, 112 * KIB, 448 * KIB, 1024 * KIB):
        inputs = payload(group.topology.world, (num_bytes // 2,), torch.bfloat16, num_bytes)
        assert_reduced(group, inputs, reduce(group, inputs), f"{num_bytes} bytes")
    with pytest.raises(CallRefused):
        reduce(group, payload(group.topology.world, (512 * KIB + 1,), torch.bfloat16, 0))


def test_odd_values(group: AllReduceGroup) -> None:
    special = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40, -1e-40, 3e38, -3e38, 65504.0, 6e-8, 1.0]
    world = group.topology.world
    for dtype in DTYPES:
        rng = random.Random(3)
        rows = [[rng.choice(special) for _ in range(4096)] for _ in range(world)]
        inputs = [torch.tensor(row, device="cuda").to(dtype) for row in rows]
        kind = torch.int32 if dtype == torch.float32 else torch.int16
        for rank, each in enumerate(inputs):  # NaN payloads of all sorts, and data that looks like an epoch
            each.view(kind)[rank::97] = torch.iinfo(kind).max - rank
            each.view(kind)[rank::101] = rank + 1
        for shape in ("one-shot", "two-shot"):
            for family in ("ll", "bulk"):
                tactic = Tactic(family=family, shape=shape, num_ctas=4)  # type: ignore[arg-type]
                outputs = reduce(group, inputs, tactic)
                expected = tree_sum(inputs, group.topology.island_size)
                for output in outputs:
                    assert same_bits(output, expected)
                    assert torch.equal(output.view(kind), outputs[0].view(kind))  # NaNs too
    zeros = [torch.full((512,), -0.0, device="cuda", dtype=torch.bfloat16) for _ in range(world)]
    assert all(bool(torch.signbit(output).all()) for output in reduce(group, zeros))
    group.check()


def test_in_place(group: AllReduceGroup) -> None:
    for number, tactic in enumerate(candidate_tactics(group.topology)):
        if tactic.num_ctas * group.topology.world > 128:
            continue
        inputs = payload(group.topology.world, (28 * KIB,), torch.bfloat16, number)
        kept = [each.clone() for each in inputs]
        group.all_reduce(inputs, inputs, tactic=tactic)
        assert_reduced(group, kept, inputs, str(tactic))


# ---------------------------------------------------------------- the fused norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 4096, 7168])
def test_fused_norm(group: AllReduceGroup, dtype: torch.dtype, hidden: int) -> None:
    world = group.topology.world
    weight = torch.randn(hidden, device="cuda").to(dtype)
    alone = None
    for rows in (1, 3, 16):
        size = torch.empty(0, dtype=dtype).element_size()
        everything = payload(world, (16, hidden), dtype, 9)
        residual = payload(1, (16, hidden), dtype, 10)[0]
        inputs = [each[:rows].contiguous() for each in everything]
        reduced = tree_sum(inputs, group.topology.island_size)
        summed = reduced.float() + residual[:rows].float()
        exact = summed.double()
        normed = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        for tactic in candidate_tactics(group.topology):
            if tactic.num_ctas not in (1, 8) or hidden * size // 16 < tactic.owners(group.topology):
                continue
            if rows * hidden * size > group.capacity(tactic):
                continue
            norms = make_norms(inputs, residual[:rows].contiguous(), weight)
            outputs = [torch.full_like(each, float("nan")) for each in inputs]
            group.all_reduce(inputs, outputs, tactic=tactic, norms=norms)
            unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
            for norm, output in zip(norms, outputs, strict=True):
                assert torch.equal(norm.residual_output, summed.to(dtype))
                assert torch.allclose(output.double(), normed, rtol=unit * 1.05, atol=1e-5), str(tactic)
                assert torch.equal(output, outputs[0])
            if alone is None:
                alone = outputs[0][0].clone()
            assert torch.equal(outputs[0][0], alone), f"{tactic}, {rows} rows: the first row depends on its company"
    group.check()


def test_norm_in_place(group: AllReduceGroup) -> None:
    world = group.topology.world
    inputs = payload(world, (4, 7168), torch.bfloat16, 1)
    residual = payload(1, (4, 7168), torch.bfloat16, 2)[0]
    weight = torch.ones(7168, device="cuda", dtype=torch.bfloat16)
    apart = make_norms(inputs, residual, weight)
    outputs = [torch.empty_like(each) for each in inputs]
    group.all_reduce(inputs, outputs, norms=apart)
    together = make_norms(inputs, residual, weight)
    for norm in together:
        object.__setattr__(norm, "residual_output", norm.residual)
    group.all_reduce(inputs, inputs, norms=together)
    for rank in range(world):
        assert torch.equal(inputs[rank], outputs[rank])
        assert torch.equal(together[rank].residual, apart[rank].residual_output)


# ---------------------------------------------------------------- graphs, epochs, grids


def test_graph_replays_between_eager_calls(group: AllReduceGroup) -> None:
    world = group.topology.world
    static = [payload(world, (size,), torch.bfloat16, 0) for size in (7168, 4 * 7168, 100)]
    outputs = [[torch.empty_like(each) for each in inputs] for inputs in static]
    graphs = []
    for first in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for inputs, results in list(zip(static, outputs, strict=True))[first:]:
                group.all_reduce(inputs, results)
        graphs.append(graph)
    start = group.epoch()
    calls = 0
    for replay in range(1100):
        if replay % 50 == 0:
            for inputs, fresh in zip(
                static, (payload(world, (n,), torch.bfloat16, replay) for n in (7168, 4 * 7168, 100)), strict=True
            ):
                for old, new in zip(inputs, fresh, strict=True):
                    old.copy_(new)
        graphs[replay % 2].replay()
        calls += 3 - replay % 2
        if replay % 50 == 49:
            for inputs, results in zip(static, outputs, strict=True):
                assert_reduced(group, inputs, results, f"replay {replay}")
            eager = payload(world, (replay,), torch.float16, replay)
            assert_reduced(group, eager, reduce(group, eager), f"eager call after replay {replay}")
            calls += 1
    torch.cuda.synchronize()
    group.check()
    assert group.epoch() == start + calls


@pytest.mark.parametrize("start", [WRAP - 7, 2 * WRAP - 7, 2**24 - 3, 2**32 - 7, 2**40])
def test_epochs_near_the_wrap(group: AllReduceGroup, start: int) -> None:
    torch.cuda.synchronize()
    group.set_epoch(start)
    rng = random.Random(start)
    done = []
    for number in range(24):
        tactic, dtype, shape = random_call(rng, group, 64 * KIB)
        inputs = payload(group.topology.world, shape, dtype, number)
        done.append((inputs, reduce(group, inputs, tactic), f"epoch {start + number} {tactic}"))
    torch.cuda.synchronize()
    group.check()
    for inputs, outputs, what in done:
        assert_reduced(group, inputs, outputs, what)
    assert group.epoch() == start + 24


def test_a_word_from_before_the_wrap_is_not_taken_for_current(library: KernelLibrary) -> None:
    """The wrap rule at work: a wide call's words wear the epoch of a later call; the sweep between them clears them."""
    topology = Topology(world=2, island_size=2)
    group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=LL_BYTES)
    tactic = Tactic(family="ll", shape="one-shot", num_ctas=4)
    wide = payload(2, (64 * KIB,), torch.bfloat16, 1)
    narrow = payload(2, (8,), torch.bfloat16, 2)
    group.set_epoch(300)
    reduce(group, wide, tactic)
    torch.cuda.synchronize()
    group.set_epoch(2**24)  # the three calls of the sweep
    for _ in range(3):
        reduce(group, narrow, tactic)
    torch.cuda.synchronize()
    group.set_timeout(0.2)
    group.set_epoch(300 + WRAP)  # the same wire epoch, the same buffer
    alone = group.member(0)
    output = torch.zeros_like(wide[0])
    alone.all_reduce([wide[0]], [output], tactic=tactic)  # rank 1 stays silent: nothing current can be there
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeout):
        group.check()
    assert bool(output.isnan().all())
    group.close()


def test_ranks_with_grids_and_streams_of_their_own(library: KernelLibrary) -> None:
    for topology in TOPOLOGIES:
        group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=LL_BYTES)
        members = [group.member(rank) for rank in range(topology.world)]
        streams = [torch.cuda.Stream() for _ in members]
        rng = random.Random(topology.world)
        shapes = ("one-shot", "two-shot", "island") if topology.has_islands else ("one-shot", "two-shot")
        done = []
        for number in range(40):
            shape = rng.choice(shapes)
            inputs = payload(topology.world, (rng.randrange(512, 32 * KIB),), torch.bfloat16, number)
            outputs = [torch.empty_like(each) for each in inputs]
            torch.cuda.synchronize()
            for rank in rng.sample(range(topology.world), topology.world):
                tactic = Tactic(
                    family="ll", shape=shape, num_ctas=rng.choice((1, 3, 7, 12)), num_threads=rng.choice((64, 448))
                )  # type: ignore[arg-type]
                with torch.cuda.stream(streams[rank]):
                    members[rank].all_reduce([inputs[rank]], [outputs[rank]], tactic=_slices_alike(tactic, shape))
            done.append((inputs, outputs))
        torch.cuda.synchronize()
        group.check()
        for inputs, outputs in done:
            assert_reduced(group, inputs, outputs, name_of(topology))
        group.close()


def _slices_alike(tactic: Tactic, shape: str) -> Tactic:
    # Pieces are cut per slice, so the two-hop shapes need the same slices on all ranks; one-shot does not.
    return (
        tactic
        if shape == "one-shot"
        else Tactic(family="ll", shape=tactic.shape, num_ctas=8, num_threads=tactic.num_threads)
    )


# ---------------------------------------------------------------- failure


@pytest.mark.parametrize("family", ["ll", "bulk"])
@pytest.mark.parametrize("shape", ["one-shot", "two-shot", "island"])
def test_a_missing_rank_is_an_error_in_bounded_time(library: KernelLibrary, family: str, shape: str) -> None:
    topology = Topology(world=4, island_size=2)
    group = virtual_group(library, topology, ll_bytes=LL_BYTES, bulk_bytes=LL_BYTES, timeout_s=0.3)
    tactic = Tactic(family=family, shape=shape, num_ctas=4)  # type: ignore[arg-type]
    inputs = payload(4, (7168,), torch.bfloat16, 1)
    assert_reduced(group, inputs, reduce(group, inputs, tactic), "all there")
    members = [group.member(rank) for rank in range(3)]  # rank 3 is dead
    streams = [torch.cuda.Stream() for _ in members]
    outputs = [torch.zeros_like(each) for each in inputs[:3]]
    torch.cuda.synchronize()
    start = time.monotonic()
    for _ in range(5):  # the later calls must not wait again
        for member, stream, x, y in zip(members, streams, inputs, outputs, strict=False):
            with torch.cuda.stream(stream):
                member.all_reduce([x], [y], tactic=tactic)
    torch.cuda.synchronize()
    assert time.monotonic() - start < 3.0
    for member, output in zip(members, outputs, strict=True):
        with pytest.raises(PeerTimeout):
            member.check()
        assert bool(output.isnan().all())
    with pytest.raises(PeerTimeout) as caught:
        members[2].check()
    if shape != "two-shot":
        assert caught.value.peer in (3, 0, 1)
    group.close()
