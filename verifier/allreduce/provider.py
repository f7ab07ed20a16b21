"""The all-reduce as an engine uses it: made once per rank, then called for every tensor.

SGLang's plugin takes ``verifier.allreduce.provider:make_provider``.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verifier.allreduce.config import AllReduceConfig, read_config
from verifier.allreduce.errors import AllReduceError, PeerTimeout, SetupFailed
from verifier.allreduce.exchange import Exchange, GroupExchange, share_trouble
from verifier.allreduce.group import DTYPE_NAMES, AllReduceGroup, Norm, join_group
from verifier.allreduce.library import KernelLibrary, build_library
from verifier.allreduce.tactics import PACK_BYTES, Topology
from wire.settings import ConfigError

__all__ = ["KernelProvider", "RankGroup", "make_provider", "verify_group"]

log = logging.getLogger("breakeven.allreduce")

_LL_BYTES = 128 * 1024  # the tables use flag-in-data up to 56 KiB; the rest is room for tuning


class RankGroup(Protocol):
    """What an engine tells of its group: rank, world_size, torch's CPU and device process groups, a torch.device."""

    rank: int
    world_size: int
    cpu_group: Any
    device_group: Any
    device: Any


class KernelProvider:
    """Sums tensors over the ranks of a group. Calls must be alike on all ranks; one stream at a time."""

    def __init__(self, group: AllReduceGroup, *, device_group: Any = None) -> None:
        self._group = group
        self._device_group = device_group

    def supports(self, num_bytes: int, dtype: torch.dtype, world_size: int) -> bool:
        """The kernels take it; depends on nothing that differs between ranks."""
        return (
            world_size == self._group.topology.world
            and dtype in DTYPE_NAMES
            and self._group.tactic_for(num_bytes) is not None
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in a new tensor; ``tensor`` is left as it is. May be captured into a CUDA graph.

        Beyond the kernels' sizes and types NCCL does it, over the device group.

        Raises:
            PeerTimeout: an earlier call failed; the engine must end.
        """
        self._group.check()
        if not self.supports(tensor.numel() * tensor.element_size(), tensor.dtype, self._group.topology.world):
            total = tensor.clone()
            dist.all_reduce(total, group=self._device_group)
            return total
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._group.all_reduce([_aligned(tensor)], [output])
        return output

    def all_reduce_norm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, residual add and RMSNorm in one kernel; shapes as in group.Norm.

        Returns:
            (normed, sum + residual), new tensors.

        Raises:
            CallRefused: the fused kernel doesn't take this shape; the same on all ranks.
        """
        self._group.check()
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        norm = Norm(
            residual=_aligned(residual), residual_output=torch.empty_like(output), weight=_aligned(weight), eps=eps
        )
        self._group.all_reduce([_aligned(tensor)], [output], norms=[norm])
        return output, norm.residual_output

    def close(self) -> None:
        """Free the buffers; no rank may be in a call."""
        self._group.close()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A view may start anywhere: copy it rather than take another path than the other ranks."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % PACK_BYTES == 0 else tensor.clone()


def make_provider(group: RankGroup) -> KernelProvider:
    """Compile, allocate, exchange, verify. Collective: all ranks succeed or all raise.

    Raises:
        SetupFailed: saying which rank can't have it, and why.
    """
    exchange = GroupExchange(group.cpu_group)
    # Rank 0 first: it compiles, and the others load what it left (or compile too, if their disk is another).
    found = _prepare(group) if group.rank == 0 else None
    trouble = share_trouble(exchange, found if isinstance(found, str) else "")
    if not trouble:
        found = found or _prepare(group)
        trouble = share_trouble(exchange, found if isinstance(found, str) else "")
    if trouble or found is None or isinstance(found, str):
        raise SetupFailed(trouble)
    config, library = found
    while True:
        # Asked for or tried first: the GPUs' own memory. It is given up on all ranks together.
        peer_access = config.peer_access != "off"
        topology = Topology(
            world=group.world_size,
            island_size=config.island_size or group.world_size,
            peer_access=peer_access,
            writes_collapse=config.writes_collapse,
        )
        try:
            joined = join_group(
                library,
                topology,
                exchange,
                rank=group.rank,
                ll_bytes=min(_LL_BYTES, config.max_bytes),
                bulk_bytes=config.max_bytes,
                timeout_s=config.timeout_s,
            )
            verify_group(joined, exchange)
        except SetupFailed as error:
            if config.peer_access != "auto":
                raise
            log.warning("all-reduce: %s; through pinned host memory instead", error)
            config = replace(config, peer_access="off")
        else:
            log.info("all-reduce: rank %d of %d, peer access %s", group.rank, group.world_size, peer_access)
            return KernelProvider(joined, device_group=group.device_group)


def _prepare(group: RankGroup) -> tuple[AllReduceConfig, KernelLibrary] | str:
    """Settings and compiled kernels, or what is wrong on this rank."""
    try:
        config = read_config()
        Topology(world=group.world_size, island_size=config.island_size or group.world_size)
        if not torch.cuda.is_available():
            return f"rank {group.rank}: no CUDA device"
        torch.cuda.set_device(group.device)
        capability = torch.cuda.get_device_capability(group.device)
        return config, KernelLibrary(build_library(config.resolved_cache_dir, compute_capability=capability))
    except (AllReduceError, ConfigError, OSError) as error:
        return f"rank {group.rank}: {error}"


def verify_group(group: AllReduceGroup, exchange: Exchange) -> None:
    """Reduce known data in every family and look: some drivers map peers and then deliver nothing, or rubbish.

    Raises:
        SetupFailed: on all ranks, if one of them saw a wrong value or none in time. The group is closed.
    """
    world, rank = group.topology.world, group.first_rank
    trouble = ""
    for num_bytes in (4096, min(group.bulk_bytes, 256 * 1024)):
        index = torch.arange(num_bytes // 4, dtype=torch.float32, device="cuda")
        output = torch.full_like(index, float("nan"))
        group.all_reduce([index * (rank + 1) % 1021], [output])
        torch.cuda.synchronize()
        expected = sum(((index * (peer + 1)) % 1021 for peer in range(world)), torch.zeros_like(index))
        try:
            group.check()
        except PeerTimeout as error:
            trouble = str(error)
        if not trouble and not torch.equal(output, expected):
            trouble = f"rank {rank} got wrong sums of {num_bytes} bytes"
    trouble = share_trouble(exchange, trouble)
    if trouble:
        group.close()
        raise SetupFailed(trouble)
