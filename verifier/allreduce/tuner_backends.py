"""All-reduce strategies as the tuner drives them, one class each. Loaded in rank processes only, which have torch.

The control group (gloo, over the host) exists in every rank and is for exchange and agreement; a backend makes what
else it needs. Those that need GPUs have not run on one yet.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["Backend", "GatherBackend", "GlooBackend", "NcclBackend", "OursBackend", "PcieIpcBackend", "make_backend"]


class Backend(Protocol):
    """One strategy in one rank.

    device: where its tensors live; a series on "cuda" is captured in one CUDA graph.
    """

    device: torch.device

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """Collective. Make communicators and buffers for messages of up to ``max_numel`` bfloat16."""
        ...

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:  # [rows, hidden] bfloat16
        """Enqueue one all-reduce; returns the sum, in ``data`` itself or in a buffer of the backend's own."""
        ...

    def close(self) -> None:
        """Collective. Free everything."""
        ...


def make_backend(path: str) -> Backend:
    """The class at "module:name".

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, name = path.partition(":")
    made: Backend = getattr(importlib.import_module(module), name)()
    return made


class GlooBackend:
    """torch.distributed over gloo on the CPU: lets the tuner run whole on a machine without GPUs."""

    device = torch.device("cpu")

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """See Backend."""
        self._group = dist.new_group(backend="gloo")

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        dist.all_reduce(data, group=self._group)
        return data

    def close(self) -> None:
        """See Backend."""
        dist.destroy_process_group(self._group)


class GatherBackend:
    """Every rank gathers all inputs and adds them in fp32 in rank order: one exchange, the same bits on every rank."""

    device = torch.device("cpu")

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """See Backend."""
        self._group = dist.new_group(backend="gloo")
        self._inputs = torch.empty(world, max_numel, dtype=torch.bfloat16)  # [world, max_numel]

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        numel = data.numel()
        parts = [row[:numel] for row in self._inputs]
        dist.all_gather(parts, data.view(-1), group=self._group)
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        result: torch.Tensor = total.to(torch.bfloat16).view_as(data)
        return result

    def close(self) -> None:
        """See Backend."""
        dist.destroy_process_group(self._group)


class NcclBackend:
    """NCCL; its environment is the candidate's."""

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """See Backend."""
        torch.cuda.set_device(rank)
        self.device = torch.device(f"cuda:{rank}")
        self._group = dist.new_group(backend="nccl")

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        dist.all_reduce(data, group=self._group)
        return data

    def close(self) -> None:
        """See Backend."""
        dist.destroy_process_group(self._group)


class PcieIpcBackend:
    """FlashInfer's PCIe all-reduce, as SGLang's pcie_ipc uses it."""

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """See Backend."""
        torch.cuda.set_device(rank)
        self.device = torch.device(f"cuda:{rank}")
        self._group = dist.new_group(backend="nccl")
        comm: Any = importlib.import_module("flashinfer.comm")
        hidden = int(options["hidden"])
        rows = tuple(rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows * hidden <= max_numel)
        self._workspace = comm.PcieIpcAllReduceWorkspace(
            group=self._group, max_numel=max_numel, dtype=torch.bfloat16, tune_batches=rows
        )
        if options.get("tune", 1):
            self._workspace.tune([hidden], dtype=torch.bfloat16, tune_group=dist.group.WORLD)
        self._output = torch.empty(max_numel, dtype=torch.bfloat16, device=self.device)

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        output = self._output[: data.numel()].view_as(data)
        self._workspace.all_reduce(data, out=output)
        return output

    def close(self) -> None:
        """See Backend."""
        self._workspace = None
        dist.destroy_process_group(self._group)


class OursBackend:
    """The kernels of this package: options "island_size", "peer_access", "writes_collapse" describe the machine."""

    def open(self, *, rank: int, world: int, max_numel: int, options: dict[str, str | int]) -> None:
        """See Backend."""
        torch.cuda.set_device(rank)
        self.device = torch.device(f"cuda:{rank}")
        # By name: they are compiled with nvcc on first use, and only a machine with GPUs has that.
        group, library, tactics, exchange = (
            importlib.import_module(f"verifier.allreduce.{name}")
            for name in ("group", "library", "tactics", "exchange")
        )
        built = library.build_library(
            Path(str(options["cache_dir"])), compute_capability=torch.cuda.get_device_capability(rank)
        )
        topology = tactics.Topology(
            world=world,
            island_size=int(options.get("island_size", world)),
            peer_access=bool(options.get("peer_access", 1)),
            writes_collapse=bool(options.get("writes_collapse", 0)),
        )
        self._group = group.join_group(
            library.KernelLibrary(built),
            topology,
            exchange.GroupExchange(dist.group.WORLD),
            rank=rank,
            ll_bytes=min(2 * max_numel, 128 * 1024),
            bulk_bytes=2 * max_numel,
        )

    def all_reduce(self, data: torch.Tensor) -> torch.Tensor:
        """See Backend."""
        self._group.all_reduce([data], [data])
        return data

    def close(self) -> None:
        """See Backend."""
        self._group.close()
