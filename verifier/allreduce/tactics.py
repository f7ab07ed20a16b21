"""Which tactic a call takes: a pure function of its size and the machine, the same on every rank.

All ranks must come to the same answer, so nothing here may depend on a rank, a clock or the environment. The thresholds
are defaults before tuning (docs/allreduce.md says where each comes from); a tuner replaces the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verifier.allreduce.errors import CallRefused

__all__ = [
    "DTYPES",
    "MAX_SLICES",
    "PACK_BYTES",
    "WORLDS",
    "DType",
    "Direction",
    "Geometry",
    "Rule",
    "Tactic",
    "Topology",
    "candidate_tactics",
    "choose_tactic",
    "default_rules",
    "plan_geometry",
    "sent_bytes",
]

PACK_BYTES = 16  # kPackBytes in csrc/protocol.h
MAX_SLICES = 512  # kMaxSlices there
WORLDS = (2, 4, 8)

DType = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[DType, ...] = ("bfloat16", "float16", "float32")  # in the order of dispatch.h
ELEMENT_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_THREADS: dict[DType, int] = {"bfloat16": 448, "float16": 448, "float32": 384}  # kMaxThreads in allreduce.cu

Family = Literal["ll", "bulk"]
Shape = Literal["one-shot", "two-shot", "island"]
Direction = Literal["push", "pull-cross", "pull"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What the all-reduce needs to know of the machine.

    ``island_size``: ranks that share a switch or socket; ranks 0 .. island_size-1 form the first island and so on, so
    the caller orders its ranks accordingly. 1 or ``world`` where there is no boundary. Fixes the reduction tree.
    ``peer_access``: GPUs map each other's memory. False: buffers lie in pinned host memory.
    ``writes_collapse``: posted writes across islands fall far below reads (some PCIe switches do that).
    """

    world: int
    island_size: int
    peer_access: bool = True
    writes_collapse: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.world not in WORLDS:
            raise CallRefused(f"world {self.world} is not one of {WORLDS}")
        if self.island_size < 1 or self.world % self.island_size:
            raise CallRefused(f"islands of {self.island_size} ranks don't divide a world of {self.world}")

    @property
    def has_islands(self) -> bool:
        """There is more than one of more than one rank."""
        return 1 < self.island_size < self.world

    @property
    def tree_opens(self) -> int:
        """Bit r is set where an island of the reduction tree begins."""
        return sum(1 << rank for rank in range(0, self.world, self.island_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tactic:
    """How one call is carried out. ``num_ctas`` and ``num_threads`` shape speed only, never the result."""

    family: Family
    shape: Shape
    num_ctas: int
    num_threads: int = 448
    direction: Direction = "push"

    @property
    def pull_mask(self) -> int:
        """Bit per phase (scatter, cross, gather) that readers fetch."""
        return {"push": 0b000, "pull-cross": 0b010, "pull": 0b111}[self.direction]

    def island_of(self, topology: Topology) -> int:
        """The shape as the kernels number it: 0 one-shot, world = two-shot, less = islands of that size."""
        if self.shape == "one-shot":
            return 0
        return topology.island_size if self.shape == "island" else topology.world

    def owners(self, topology: Topology) -> int:
        """Into how many pieces a slice is cut."""
        return max(1, self.island_of(topology))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``tactic`` up to ``max_bytes``; rules are tried from the smallest up."""

    max_bytes: int
    tactic: Tactic


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a payload is cut: ``num_slices`` runs of ``slice_packs`` packs of 16 bytes, the last one perhaps shorter."""

    num_slices: int
    slice_packs: int


_KIB = 1024


def default_rules(topology: Topology) -> tuple[Rule, ...]:
    """The table before tuning (message bytes -> tactic)."""

    def rule(kib: int, family: Family, shape: Shape, ctas: int, direction: Direction = "push") -> Rule:
        tactic = Tactic(family=family, shape=shape, num_ctas=ctas, direction=direction)
        return Rule(max_bytes=kib * _KIB, tactic=tactic)

    if not topology.peer_access:
        # Words polled over PCIe cost more than a flag: 14 KiB at world 2 take 6.6 us in BULK and 9.7 in LL, 56 KiB 10.0
        # and 19.7 (benchmarks/results/allreduce/virtual-2-pinned.json).
        if topology.world == 2:
            return (rule(1024, "bulk", "one-shot", 8),)
        return (rule(28, "bulk", "one-shot", 8), rule(1024, "bulk", "two-shot", 16))
    if topology.world == 2:
        return (rule(28, "ll", "one-shot", 4), rule(112, "bulk", "one-shot", 8), rule(1024, "bulk", "two-shot", 16))
    if not topology.has_islands:
        wide = 14 if topology.world == 4 else 1
        return (rule(wide, "ll", "one-shot", 4), rule(56, "ll", "two-shot", 8), rule(1024, "bulk", "two-shot", 16))
    cross: Direction = "pull-cross" if topology.writes_collapse else "push"
    # On a collapsing fabric few CTAs keep the streams apart; elsewhere they hide latency.
    wide_ctas = 4 if topology.writes_collapse else 16
    return (
        rule(1, "ll", "one-shot", 1),
        rule(56, "ll", "island", 8, cross),
        rule(1024, "bulk", "island", wide_ctas, cross),
    )


def choose_tactic(topology: Topology, num_bytes: int, rules: tuple[Rule, ...]) -> Tactic | None:
    """The first rule that is wide enough; None = beyond the table (the caller falls back to NCCL).

    A payload with fewer packs than there are pieces goes one-shot whatever the rule says: the argument that buffers may
    be used again rests on a word from every peer in every call.
    """
    if num_bytes <= 0:
        return None
    for each in rules:
        if num_bytes <= each.max_bytes:
            tactic = each.tactic
            if -(-num_bytes // PACK_BYTES) < tactic.owners(topology):
                return Tactic(family=tactic.family, shape="one-shot", num_ctas=1, num_threads=tactic.num_threads)
            return tactic
    return None


def plan_geometry(topology: Topology, tactic: Tactic, num_bytes: int, row_bytes: int | None = None) -> Geometry:
    """Cut a payload: evenly over the CTAs, or by rows where a norm follows. The same on every rank.

    Raises:
        CallRefused: a row is no whole number of packs, or holds fewer packs than there are owners; too many rows.
    """
    num_packs = -(-num_bytes // PACK_BYTES)
    owners = tactic.owners(topology)
    if row_bytes is not None:
        if row_bytes % PACK_BYTES or num_bytes % row_bytes:
            raise CallRefused(
                f"rows of {row_bytes} bytes: not a multiple of {PACK_BYTES}, or no divisor of {num_bytes}"
            )
        geometry = Geometry(num_slices=num_bytes // row_bytes, slice_packs=row_bytes // PACK_BYTES)
    else:
        slice_packs = max(-(-num_packs // tactic.num_ctas), owners)
        geometry = Geometry(num_slices=-(-num_packs // slice_packs), slice_packs=slice_packs)
    if min(num_packs, geometry.slice_packs) < owners:
        raise CallRefused(f"{num_bytes} bytes are fewer packs than the {owners} owners of {tactic.shape}")
    if tactic.family == "bulk" and geometry.num_slices > MAX_SLICES:
        raise CallRefused(f"{geometry.num_slices} rows; one call carries up to {MAX_SLICES}")
    return geometry


def sent_bytes(topology: Topology, tactic: Tactic, num_bytes: int, dtype: DType) -> int:
    """Bytes one rank stores for its peers (in their slabs or, where they fetch, in its own), without flags."""
    on_wire = 2 if tactic.family == "ll" else 1
    world, island = topology.world, topology.island_size
    if tactic.shape == "one-shot":
        payload = num_bytes * (world - 1)
    elif tactic.shape == "two-shot":
        payload = 2 * num_bytes * (world - 1) // world
    else:
        fp32 = 4 // ELEMENT_BYTES[dtype]
        cross = num_bytes // island * fp32 * (world // island - 1)
        payload = 2 * num_bytes * (island - 1) // island + cross
    return payload * on_wire


def candidate_tactics(topology: Topology) -> tuple[Tactic, ...]:
    """Everything a tuner may try on this machine, 1 to 32 CTAs."""
    shapes: tuple[Shape, ...] = ("one-shot", "two-shot", "island") if topology.has_islands else ("one-shot", "two-shot")
    families: tuple[Family, ...] = ("ll", "bulk")
    found = []
    for family in families:
        for shape in shapes:
            directions: tuple[Direction, ...] = ("push", "pull") if topology.peer_access else ("push",)
            if shape == "island" and topology.peer_access:
                directions = ("push", "pull-cross", "pull")
            found += [
                Tactic(family=family, shape=shape, num_ctas=ctas, direction=direction)
                for direction in directions
                for ctas in (1, 2, 4, 8, 16, 32)
            ]
    return tuple(found)
