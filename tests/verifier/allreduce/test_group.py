"""What a group refuses before it launches anything, how it describes a call, how it tells of a lost peer. No GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tests.verifier.allreduce.memory import Block, aligned_zeros
from verifier.allreduce.errors import CallRefused, PeerTimeout
from verifier.allreduce.group import AllReduceGroup, Norm, virtual_group
from verifier.allreduce.library import Call, Control, ErrorWord
from verifier.allreduce.tactics import Tactic, Topology


class Library:
    """CUDA's memory calls over plain memory; launches are kept, not run."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.launches: list[tuple[Call, dict[str, Any]]] = []

    def slab_bytes(self, world: int, ll_bytes: int, bulk_bytes: int) -> int:
        assert ll_bytes % 16 == bulk_bytes % 16 == 0
        return 64

    def preload(self, world: int) -> None:
        pass

    def device_alloc(self, num_bytes: int) -> int:
        block = aligned_zeros(num_bytes)
        self.blocks[block.address] = block
        return block.address

    def device_free(self, address: int) -> None:
        del self.blocks[address]

    host_alloc, host_free = device_alloc, device_free

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def launch(self, call: Call, **options: Any) -> None:
        self.launches.append((call, options))


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def group(library: Library, monkeypatch: pytest.MonkeyPatch) -> AllReduceGroup:
    monkeypatch.setattr(AllReduceGroup, "_order_streams", lambda self: 7)
    topology = Topology(world=4, island_size=2)
    return virtual_group(library, topology, ll_bytes=1000, bulk_bytes=65536)  # type: ignore[arg-type]


def tensors(shape: tuple[int, ...] = (2, 64), dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype) for _ in range(4)]


def norms(x: list[torch.Tensor], weight: torch.Tensor | None = None) -> list[Norm]:
    weight = torch.ones(x[0].shape[-1], dtype=x[0].dtype) if weight is None else weight
    return [Norm(residual=each, residual_output=torch.empty_like(each), weight=weight, eps=1e-5) for each in x]


def test_a_call_is_described_whole(group: AllReduceGroup, library: Library) -> None:
    x, y = tensors((2, 4096)), tensors((2, 4096))
    tactic = Tactic(family="bulk", shape="island", num_ctas=3, num_threads=100, direction="pull-cross")
    group.all_reduce(x, y, tactic=tactic)
    call, options = library.launches[0]
    assert options == {"dtype": 0, "shape": 2, "bulk": True, "threads": 100, "stash_bytes": 0, "stream": 7}
    assert (call.num_bytes, call.slice_packs, call.num_slices, call.ctas) == (16384, 342, 3, 3)
    assert (call.first_rank, call.num_ranks, call.tree_opens, call.pull) == (0, 4, 0b101, 0b010)
    assert [call.ranks[r].input for r in range(4)] == [each.data_ptr() for each in x]
    assert [call.ranks[r].output for r in range(4)] == [each.data_ptr() for each in y]
    assert [call.ranks[r].control for r in range(4)] == group.controls
    assert [call.slabs[r] for r in range(4)] == group.slabs.addresses
    assert call.weight is None


def test_a_norm_makes_rows_slices_and_threads_a_matter_of_the_row(group: AllReduceGroup, library: Library) -> None:
    x = tensors((3, 1024))
    for shape in ("one-shot", "two-shot", "island"):
        group.all_reduce(x, tensors((3, 1024)), tactic=Tactic(family="bulk", shape=shape, num_ctas=8), norms=norms(x))  # type: ignore[arg-type]
    assert {(c.num_slices, c.slice_packs, c.ctas, c.row_elements) for c, _ in library.launches} == {(3, 128, 3, 1024)}
    assert {(options["threads"], options["stash_bytes"]) for _, options in library.launches} == {(128, 4096)}


def test_a_member_is_one_rank_over_the_same_memory(group: AllReduceGroup, library: Library) -> None:
    group.member(2).all_reduce([torch.ones(64)], [torch.ones(64)])
    call, _ = library.launches[0]
    assert (call.first_rank, call.num_ranks) == (2, 1)
    assert call.ranks[0].control == group.controls[2]
    assert [call.slabs[r] for r in range(4)] == group.slabs.addresses


@pytest.mark.parametrize(
    ("inputs", "outputs", "words"),
    [
        (tensors()[:3], tensors(), "plays 4 ranks"),
        (tensors(dtype=torch.float64), tensors(dtype=torch.float64), "float64 is not one of"),
        (tensors((0,)), tensors((0,)), "empty"),
        (tensors(), tensors((1, 64)), "shapes differ"),
        (tensors(), tensors(dtype=torch.float16), "beside"),
        (tensors(), [torch.ones(64, 2, dtype=torch.bfloat16).t() for _ in range(4)], "not contiguous"),
        ([each[1:] for each in tensors((65,))], tensors((64,)), "16-byte boundary"),
        (tensors((32769,)), tensors((32769,)), "more than this group's buffers hold"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(
    group: AllReduceGroup, library: Library, inputs: list[torch.Tensor], outputs: list[torch.Tensor], words: str
) -> None:
    with pytest.raises(CallRefused, match=words):
        group.all_reduce(inputs, outputs)
    assert not library.launches


def test_norms_that_are_refused(group: AllReduceGroup, library: Library) -> None:
    x = tensors()
    with pytest.raises(CallRefused, match=r"weight \(65,\) for rows of 64"):
        group.all_reduce(x, tensors(), norms=norms(x, torch.ones(65, dtype=torch.bfloat16)))
    wide = tensors((1, 32768))
    with pytest.raises(CallRefused, match="too long for the fused norm"):
        group.all_reduce(wide, tensors((1, 32768)), norms=norms(wide))
    assert not library.launches


def test_a_family_takes_what_its_buffers_hold(group: AllReduceGroup) -> None:
    assert group.ll_bytes == 1008  # whole packs
    ll = Tactic(family="ll", shape="one-shot", num_ctas=1)
    group.all_reduce(tensors((504,)), tensors((504,)), tactic=ll)
    with pytest.raises(CallRefused):
        group.all_reduce(tensors((505,)), tensors((505,)), tactic=ll)
    assert group.tactic_for(14336) is None  # the table says LL, which is too small here


def test_a_lost_peer_is_told_by_the_error_word(group: AllReduceGroup) -> None:
    group.check()
    for field, value in (("rank", 1), ("peer", 3), ("phase", 1), ("epoch", 99), ("slice", 5), ("code", 1)):
        setattr(ErrorWord.from_address(group.errors[1]), field, value)
    with pytest.raises(PeerTimeout, match="rank 1 waited in vain for rank 3: phase cross, call 99, slice 5") as caught:
        group.check()
    assert (caught.value.rank, caught.value.peer, caught.value.epoch) == (1, 3, 99)


def test_counter_and_timeout_are_set_in_the_ranks_memory(group: AllReduceGroup) -> None:
    assert [group.epoch(rank) for rank in range(4)] == [1] * 4
    group.set_epoch(2**40)
    group.set_timeout(0.5)
    for address in group.controls:
        control = Control.from_address(address)
        assert (control.epoch, control.timeout_ns, control.aborted) == (2**40, 500_000_000, 0)
        assert control.error in group.errors


def test_closing_frees_everything(group: AllReduceGroup, library: Library) -> None:
    group.close()
    assert not library.blocks
