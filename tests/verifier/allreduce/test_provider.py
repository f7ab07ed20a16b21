"""The engine's view: what is taken, what goes to NCCL, and that ranks without a GPU refuse together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from verifier.allreduce import provider as provider_module
from verifier.allreduce.errors import PeerTimeout, SetupFailed
from verifier.allreduce.group import Norm
from verifier.allreduce.provider import KernelProvider, make_provider, verify_group
from verifier.allreduce.tactics import Tactic, Topology, choose_tactic, default_rules


@dataclass
class Group:
    """A group of ranks that all hold the same data, so that the sum is a product."""

    topology: Topology = field(default_factory=lambda: Topology(world=4, island_size=4))
    failed: bool = False
    first_rank: int = 0
    bulk_bytes: int = 4096
    closed: bool = False
    addresses: list[int] = field(default_factory=list)

    def tactic_for(self, num_bytes: int) -> Tactic | None:
        return choose_tactic(self.topology, num_bytes, default_rules(self.topology))

    def check(self) -> None:
        if self.failed:
            raise PeerTimeout(rank=0, peer=3, phase="gather", epoch=7, slice_index=0)

    def all_reduce(
        self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], norms: list[Norm] | None = None
    ) -> None:
        self.addresses.append(inputs[0].data_ptr())
        outputs[0].copy_(inputs[0] * self.topology.world)
        for norm in norms or ():
            norm.residual_output.copy_(outputs[0] + norm.residual)
            scale = norm.residual_output.float().square().mean(-1, keepdim=True).add(norm.eps).rsqrt()
            outputs[0].copy_(norm.residual_output * scale * norm.weight)

    def close(self) -> None:
        self.closed = True


def make(group: Group) -> KernelProvider:
    return KernelProvider(group)  # type: ignore[arg-type]


def test_what_is_supported_depends_on_size_type_and_world_only() -> None:
    provider = make(Group())
    assert provider.supports(14336, torch.bfloat16, 4)
    assert provider.supports(1 << 20, torch.float32, 4)
    assert not provider.supports((1 << 20) + 2, torch.bfloat16, 4)
    assert not provider.supports(14336, torch.float64, 4)
    assert not provider.supports(14336, torch.bfloat16, 8)
    assert not provider.supports(0, torch.bfloat16, 4)


def test_the_input_is_left_alone() -> None:
    x = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    kept = x.clone()
    assert torch.equal(make(Group()).all_reduce(x), kept * 4)
    assert torch.equal(x, kept)


def test_views_that_start_anywhere_are_moved_not_refused() -> None:
    group = Group()
    x = torch.arange(40, dtype=torch.bfloat16)
    assert torch.equal(make(group).all_reduce(x[1:33]), x[1:33] * 4)
    assert torch.equal(make(group).all_reduce(x.view(4, 10).t()), x.view(4, 10).t() * 4)
    assert all(address % 16 == 0 for address in group.addresses)


def test_beyond_the_kernels_the_device_group_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[tuple[int, object]] = []

    def all_reduce(tensor: torch.Tensor, group: object) -> None:
        reduced.append((tensor.numel(), group))
        tensor.mul_(4)

    monkeypatch.setattr(provider_module.dist, "all_reduce", all_reduce)
    x = torch.ones((1 << 19) + 1, dtype=torch.bfloat16)
    provider = KernelProvider(Group(), device_group="nccl")  # type: ignore[arg-type]
    assert torch.equal(provider.all_reduce(x), x * 4)
    assert reduced == [((1 << 19) + 1, "nccl")]
    assert bool((x == 1).all())


def test_the_fused_norm_returns_both() -> None:
    x, residual = torch.ones(2, 8), torch.full((2, 8), 3.0)
    normed, summed = make(Group()).all_reduce_norm(x, residual, torch.full((8,), 2.0), 0.0)
    assert torch.equal(summed, torch.full((2, 8), 7.0))
    assert torch.allclose(normed, torch.full((2, 8), 2.0))


def test_after_a_timeout_every_call_raises() -> None:
    provider = make(Group(failed=True))
    with pytest.raises(PeerTimeout, match="rank 0 waited in vain for rank 3: phase gather, call 7"):
        provider.all_reduce(torch.ones(8))


# ---------------------------------------------------------------- set-up


class Exchange:
    def __init__(self, rank: int, board: list[bytes], barrier: threading.Barrier) -> None:
        self._rank, self._board, self._barrier = rank, board, barrier

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._board[self._rank] = payload
        self._barrier.wait(10)
        found = list(self._board)
        self._barrier.wait(10)
        return found

    def barrier(self) -> None:
        self._barrier.wait(10)


def on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    board, barrier = [b""] * 2, threading.Barrier(2)
    monkeypatch.setattr(provider_module, "GroupExchange", lambda rank: Exchange(rank, board, barrier))

    def attempt(rank: int) -> str:
        group = SimpleNamespace(rank=rank, world_size=2, cpu_group=rank, device_group=None, device="cuda:0")
        try:
            make_provider(group)  # type: ignore[arg-type]
        except SetupFailed as error:
            return str(error)
        return "made"

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(attempt, range(2)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_all_ranks_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_two_ranks(monkeypatch) == ["rank 0: no CUDA device"] * 2


def test_a_bad_setting_is_heard_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKEVEN_ALLREDUCE_ISLAND_SIZE", "3")
    monkeypatch.setattr(provider_module, "read_config", lambda: provider_module.AllReduceConfig(island_size=3))
    found = on_two_ranks(monkeypatch)
    assert found == ["rank 0: islands of 3 ranks don't divide a world of 2"] * 2


def test_a_group_that_adds_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda *a, device=None, **k: arange(*a, **k))
    board = [b""]
    group = Group()  # multiplies instead of adding what the other ranks hold
    with pytest.raises(SetupFailed, match="rank 0 got wrong sums"):
        verify_group(group, Exchange(0, board, threading.Barrier(1)))  # type: ignore[arg-type]
    assert group.closed
