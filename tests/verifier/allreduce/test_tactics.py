"""The tables cover what they promise, cuts are whole, and bad requests are refused."""

from __future__ import annotations

import itertools

import pytest

from verifier.allreduce.errors import CallRefused
from verifier.allreduce.tactics import (
    MAX_SLICES,
    Tactic,
    Topology,
    candidate_tactics,
    choose_tactic,
    default_rules,
    plan_geometry,
    sent_bytes,
)

TOPOLOGIES = [
    Topology(world=world, island_size=island, peer_access=peer_access, writes_collapse=collapse)
    for world, island in ((2, 2), (4, 4), (4, 2), (8, 8), (8, 4), (8, 2))
    for peer_access, collapse in itertools.product((True, False), (True, False))
]
MIB = 1024 * 1024


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_size_up_to_a_mebibyte_has_a_tactic_that_can_be_cut(topology: Topology) -> None:
    rules = default_rules(topology)
    assert [rule.max_bytes for rule in rules] == sorted(rule.max_bytes for rule in rules)
    for num_bytes in (1, 2, 15, 16, 17, 100, 127, 1024, 1025, 14336, 57344, 57345, 114688, MIB - 2, MIB):
        tactic = choose_tactic(topology, num_bytes, rules)
        assert tactic is not None
        geometry = plan_geometry(topology, tactic, num_bytes)
        packs = -(-num_bytes // 16)
        assert (geometry.num_slices - 1) * geometry.slice_packs < packs <= geometry.num_slices * geometry.slice_packs
        assert min(packs, geometry.slice_packs) >= tactic.owners(topology)
        assert geometry.num_slices <= tactic.num_ctas
        assert tactic.num_ctas * topology.world <= 128  # also as virtual ranks on one GPU


def test_beyond_the_table_there_is_none() -> None:
    topology = TOPOLOGIES[0]
    assert choose_tactic(topology, MIB + 1, default_rules(topology)) is None
    assert choose_tactic(topology, 0, default_rules(topology)) is None


def test_fewer_packs_than_owners_go_one_shot() -> None:
    topology = Topology(world=8, island_size=8)
    two_shot = default_rules(topology)[1]
    assert two_shot.tactic.shape == "two-shot"
    for num_bytes, shape in ((7 * 16, "one-shot"), (7 * 16 + 1, "two-shot")):
        tactic = choose_tactic(topology, num_bytes, (two_shot,))
        assert tactic is not None
        assert tactic.shape == shape


def test_islands_are_used_where_there_are_some() -> None:
    def shapes(topology: Topology) -> set[str]:
        return {rule.tactic.shape for rule in default_rules(topology)}

    assert "island" in shapes(Topology(world=8, island_size=4))
    assert "island" not in shapes(Topology(world=8, island_size=8))
    assert "island" not in shapes(Topology(world=8, island_size=1))


def test_host_memory_is_flagged_not_polled_by_the_word() -> None:
    rules = default_rules(Topology(world=2, island_size=2, peer_access=False))
    assert [(rule.tactic.family, rule.tactic.shape) for rule in rules] == [("bulk", "one-shot")]
    rules = default_rules(Topology(world=8, island_size=4, peer_access=False))
    assert [(rule.tactic.family, rule.tactic.shape) for rule in rules] == [("bulk", "one-shot"), ("bulk", "two-shot")]


def test_a_collapsing_fabric_fetches_across() -> None:
    wide = {r.tactic.direction for r in default_rules(Topology(world=8, island_size=4, writes_collapse=True))}
    assert wide == {"push", "pull-cross"}
    assert {r.tactic.direction for r in default_rules(Topology(world=8, island_size=4))} == {"push"}


@pytest.mark.parametrize(
    ("world", "island", "opens"), [(2, 2, 0b1), (4, 2, 0b101), (8, 4, 0b10001), (8, 2, 0b1010101), (8, 1, 0xFF)]
)
def test_the_tree(world: int, island: int, opens: int) -> None:
    assert Topology(world=world, island_size=island).tree_opens == opens


@pytest.mark.parametrize(("world", "island"), [(3, 3), (16, 8), (8, 3), (8, 0), (4, 8)])
def test_worlds_that_are_refused(world: int, island: int) -> None:
    with pytest.raises(CallRefused):
        Topology(world=world, island_size=island)


def test_numbers_for_the_kernels() -> None:
    topology = Topology(world=8, island_size=4)
    numbers = {
        shape: Tactic(family="ll", shape=shape, num_ctas=1).island_of(topology)  # type: ignore[arg-type]
        for shape in ("one-shot", "two-shot", "island")
    }
    assert numbers == {"one-shot": 0, "two-shot": 8, "island": 4}
    masks = {
        d: Tactic(family="ll", shape="island", num_ctas=1, direction=d).pull_mask
        for d in ("push", "pull-cross", "pull")
    }  # type: ignore[arg-type]
    assert masks == {"push": 0, "pull-cross": 2, "pull": 7}


def test_rows_are_slices() -> None:
    topology = Topology(world=8, island_size=4)
    tactic = Tactic(family="bulk", shape="two-shot", num_ctas=4)
    geometry = plan_geometry(topology, tactic, 3 * 14336, 14336)
    assert (geometry.num_slices, geometry.slice_packs) == (3, 896)


@pytest.mark.parametrize(
    ("num_bytes", "row_bytes"),
    [(14336 + 16, 14336), (40, 20), (7 * 16, 7 * 16), ((MAX_SLICES + 1) * 128, 128)],
    ids=["ragged", "odd rows", "rows too short", "too many rows"],
)
def test_rows_that_are_refused(num_bytes: int, row_bytes: int) -> None:
    topology = Topology(world=8, island_size=4)
    tactic = Tactic(family="bulk", shape="two-shot", num_ctas=4)
    with pytest.raises(CallRefused):
        plan_geometry(topology, tactic, num_bytes, row_bytes)


def test_sent_bytes_are_those_of_the_papers() -> None:
    topology = Topology(world=8, island_size=4)

    def sent(family: str, shape: str, dtype: str = "bfloat16") -> float:
        return sent_bytes(topology, Tactic(family=family, shape=shape, num_ctas=1), 1 << 20, dtype) / (1 << 20)  # type: ignore[arg-type]

    assert sent("bulk", "one-shot") == 7
    assert sent("bulk", "two-shot") == 1.75
    assert sent("bulk", "island") == 1.5 + 0.5  # fp32 partials cross
    assert sent("bulk", "island", "float32") == 1.75
    assert sent("ll", "two-shot") == 3.5


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_candidates_differ_and_name_islands_only_where_there_are_some(topology: Topology) -> None:
    found = candidate_tactics(topology)
    assert len(found) == len(set(found))
    assert any(tactic.shape == "island" for tactic in found) == topology.has_islands
    if not topology.peer_access:
        assert {tactic.direction for tactic in found} == {"push"}
