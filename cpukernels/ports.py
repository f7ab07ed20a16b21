"""The operations a transformer forward over ragged rows needs, and the record that describes the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cpukernels.kv_cache import KvCache

__all__ = ["AttentionShape", "Kernels", "PackedWeight", "RaggedRows", "WeightForm", "ragged_rows"]


WeightForm = Literal["full", "half", "grouped"]
"""float32; bfloat16; 8-bit codes with a scale and an offset per group. See rowwise.c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Head counts and size: Hq query heads share Hkv key/value heads of D numbers each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight matrix [N, K] in the layout its kernels want; ``data`` is opaque to everyone else."""

    data: torch.Tensor
    num_rows: int
    num_columns: int
    form: WeightForm = "full"

    @property
    def nbytes(self) -> int:
        """What a pass over all of it reads."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """Which request and position each of the M rows of a batch belongs to.

    Rows of one request are adjacent and in position order; ``caches[i]`` owns rows ``starts[i]:starts[i + 1]``.
    positions: [M] int64, RoPE position and cache slot of the row; it sees slots 0..position.
    key_ptrs, value_ptrs: [L, M] uint64 addresses of the row's cache at each layer.
    capacities: [M] int64, positions each row's cache holds.
    """

    caches: tuple[KvCache, ...]
    starts: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    capacities: npt.NDArray[np.int64]
    key_ptrs: npt.NDArray[np.uint64]
    value_ptrs: npt.NDArray[np.uint64]

    @property
    def num_rows(self) -> int:
        """M."""
        return len(self.positions)


def ragged_rows(caches: Sequence[KvCache], num_new: Sequence[int]) -> RaggedRows:
    """Describe ``num_new[i]`` new rows for each cache, starting at its current length; grows the caches to fit.

    The caches' lengths are not changed: the caller advances them when the rows' outcome is known.
    """
    for cache, count in zip(caches, num_new, strict=True):
        cache.reserve(cache.length + count)
    owner = np.repeat(np.arange(len(caches)), num_new)
    starts = np.concatenate(([0], np.cumsum(num_new))).astype(np.int64)
    base = np.array([cache.length for cache in caches], dtype=np.int64)
    positions = np.arange(len(owner), dtype=np.int64) - starts[owner] + base[owner]
    capacities = np.array([cache.capacity for cache in caches], dtype=np.int64)[owner]
    num_layers = caches[0].num_layers if caches else 0
    layers = np.arange(num_layers, dtype=np.uint64)[:, None]
    key_base = np.array([cache.keys.data_ptr() for cache in caches], dtype=np.uint64)[owner]
    value_base = np.array([cache.values.data_ptr() for cache in caches], dtype=np.uint64)[owner]
    layer_bytes = np.array([cache.layer_bytes for cache in caches], dtype=np.uint64)[owner]
    return RaggedRows(
        caches=tuple(caches),
        starts=tuple(int(s) for s in starts),
        positions=positions,
        lengths=positions + 1,
        capacities=capacities,
        key_ptrs=key_base[None, :] + layers * layer_bytes[None, :],
        value_ptrs=value_base[None, :] + layers * layer_bytes[None, :],
    )


class Kernels(Protocol):
    """One implementation of the operations. All tensors are fp32, contiguous, on the CPU.

    ``is_row_invariant``: a row's result is bit for bit the same in any batch.
    """

    name: str
    is_row_invariant: bool

    def pack(self, weight: torch.Tensor) -> PackedWeight:  # [N, K]
        """Bring a weight into this implementation's layout; done once, at load."""
        ...

    def linear(self, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:  # [M, K] -> [M, N]
        """``x @ weight.T`` into a new tensor."""
        ...

    def linear_add(self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor) -> None:  # [M, K], [M, N]
        """``residual += x @ weight.T`` in place."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:  # [M, H], [H] -> [M, H]
        """Root-mean-square normalisation times ``weight``."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # [M, 2I] -> [M, I]
        """``silu(gate) * up`` of the two halves."""
        ...

    def rope_append(
        self,
        qkv: torch.Tensor,  # [M, (Hq + 2 Hkv) * D], q and k are rotated in place
        rows: RaggedRows,
        layer: int,
        shape: AttentionShape,
        cos: torch.Tensor,  # [max positions, D / 2]
        sin: torch.Tensor,
    ) -> None:
        """Rotate q and k (half-split convention) and write k and v into the rows' caches."""
        ...

    def attention(
        self, qkv: torch.Tensor, rows: RaggedRows, layer: int, shape: AttentionShape
    ) -> torch.Tensor:  # [M, Hq * D]
        """Causal attention of every row over its own request's cache, scale 1/sqrt(D)."""
        ...
