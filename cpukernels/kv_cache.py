"""The key/value cache of one request: contiguous, growing, rolled back in O(1)."""

from __future__ import annotations

import torch

__all__ = ["LANES", "KvCache"]

LANES = 16  # positions per key block; rowwise.c names the same number
_MIN_CAPACITY = 64


class KvCache:
    """Keys and values of one request over all layers, fp32 on the CPU.

    keys: [L, Hkv, capacity / LANES, D, LANES], blocks of LANES positions so that scores need no horizontal sum.
    values: [L, Hkv, capacity, D].
    ``length`` positions are valid. Rolling back is setting ``length``; what lies beyond is overwritten later.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int = 0) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.length = 0
        self.capacity = 0
        self._allocate(max(capacity, _MIN_CAPACITY))

    @property
    def layer_bytes(self) -> int:
        """Bytes from one layer's keys (or values) to the next's."""
        return self.num_kv_heads * self.capacity * self.head_dim * 4

    @property
    def num_bytes(self) -> int:
        """Memory held by keys and values together."""
        return 2 * self.num_layers * self.layer_bytes

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions; at least doubles, so appending is O(1) amortised."""
        if length <= self.capacity:
            return
        old_keys, old_values, old_capacity = self.keys, self.values, self.capacity
        self._allocate(max(length, 2 * self.capacity))
        self._copy_from(old_keys, old_values, min(self.length, old_capacity))

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` positions. O(1)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't truncate a cache of {self.length} positions to {length}")
        self.length = length

    def fork(self, length: int) -> KvCache:
        """A new cache with a copy of the first ``length`` positions."""
        if not 0 <= length <= self.length:
            raise ValueError(f"can't fork {length} positions of a cache of {self.length}")
        copy = KvCache(
            num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, capacity=length
        )
        copy._copy_from(self.keys, self.values, length)
        copy.length = length
        return copy

    def _allocate(self, capacity: int) -> None:
        capacity = -(-capacity // LANES) * LANES
        shape = (self.num_layers, self.num_kv_heads)
        self.keys = torch.empty(*shape, capacity // LANES, self.head_dim, LANES)
        self.values = torch.empty(*shape, capacity, self.head_dim)
        self.capacity = capacity

    def _copy_from(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        blocks = -(-length // LANES)
        self.keys[:, :, :blocks] = keys[:, :, :blocks]
        self.values[:, :, :length] = values[:, :, :length]
