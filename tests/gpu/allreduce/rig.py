"""Make payloads, run calls on virtual ranks, say what is right."""

from __future__ import annotations

import random

import torch

from verifier.allreduce.group import AllReduceGroup, Norm
from verifier.allreduce.tactics import Tactic, Topology, candidate_tactics

KIB = 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TOPOLOGIES = (
    Topology(world=2, island_size=2),
    Topology(world=4, island_size=4),
    Topology(world=4, island_size=2),
    Topology(world=8, island_size=8),
    Topology(world=8, island_size=4),
    Topology(world=8, island_size=2),
)


def name_of(topology: Topology) -> str:
    return f"{topology.world}x{topology.island_size}"


def payload(world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    everything = torch.randn(world, *shape, generator=generator, device="cuda") * 3
    return [each.to(dtype).clone() for each in everything]


def tree_sum(inputs: list[torch.Tensor], island_size: int) -> torch.Tensor:
    """The contract in plain torch: fp32, islands from the lowest rank up, then the islands in order, rounded once."""
    parts = []
    for first in range(0, len(inputs), island_size):
        part = inputs[first].float()
        for each in inputs[first + 1 : first + island_size]:
            part = part + each.float()
        parts.append(part)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(inputs[0].dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; every NaN counts as the same NaN."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    equal = a.view(kind) == b.view(kind)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_reduced(group: AllReduceGroup, inputs: list[torch.Tensor], outputs: list[torch.Tensor], what: str) -> None:
    expected = tree_sum(inputs, group.topology.island_size)
    for rank, output in enumerate(outputs):
        assert same_bits(output, expected), f"{what}: rank {rank} is not the tree's sum"
    exact = torch.stack([each.double() for each in inputs]).sum(0)
    scale = torch.stack([each.double().abs() for each in inputs]).sum(0)
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}[expected.dtype]
    bound = unit * exact.abs() * 1.01 + scale * 2**-21 + 2**-25
    off = (expected.double() - exact).abs()
    assert bool((off <= bound).all()), f"{what}: off float64 by {float((off - bound).max())} beyond the bound"


def random_call(
    rng: random.Random, group: AllReduceGroup, max_bytes: int
) -> tuple[Tactic, torch.dtype, tuple[int, ...]]:
    """A tactic, a dtype and a shape that it can carry."""
    dtype = rng.choice(DTYPES)
    size = torch.empty(0, dtype=dtype).element_size()
    numel = rng.choice((rng.randrange(1, 64), rng.randrange(1, 4 * KIB), rng.randrange(1, max_bytes // size + 1)))
    tactics = [
        tactic
        for tactic in candidate_tactics(group.topology)
        if numel * size <= group.capacity(tactic)
        and -(-numel * size // 16) >= tactic.owners(group.topology)
        and tactic.num_ctas * group.num_ranks_here <= 128
    ]
    tactic = rng.choice(tactics)
    threads = rng.choice((32, 128, 256, 448))
    return (
        Tactic(
            family=tactic.family,
            shape=tactic.shape,
            num_ctas=tactic.num_ctas,
            num_threads=threads,
            direction=tactic.direction,
        ),
        dtype,
        (numel,),
    )


def make_norms(
    inputs: list[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> list[Norm]:
    return [
        Norm(residual=residual.clone(), residual_output=torch.empty_like(each), weight=weight, eps=eps)
        for each in inputs
    ]
