"""Keys and values on the device: one request's cache, and the window over a batch's caches that one round works in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["DeviceCache", "PlaneShape", "collect", "fill", "round_up", "share_out", "store"]

# From here on capacities are multiples of SPLIT, so that sums over positions can be cut into pieces of that many.
SPLIT = 1024
_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneShape:
    """What a cache holds of a position: L layers, P planes (keys and values: 2; latents: 1), H heads of D numbers."""

    num_layers: int
    num_planes: int
    num_heads: int
    width: int

    @property
    def num_numbers(self) -> int:
        """Numbers per position."""
        return self.num_layers * self.num_planes * self.num_heads * self.width


class DeviceCache:
    """One request's planes, ``data``: [L, P, H, capacity, D]; ``length`` positions are valid.

    Rolling back is setting ``length``; what lies beyond is overwritten later, and hidden until then.
    """

    def __init__(self, shape: PlaneShape, *, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.length = 0
        self._device, self._dtype = device, dtype
        self.data = self._allocate(0)

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return self.data.shape[3]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions; grows by a half and more, so appending is O(1) amortised."""
        if length <= self.capacity:
            return
        old = self.data
        self.data = self._allocate(round_up(max(length, self.capacity * 3 // 2)))
        self.data[..., : self.length, :] = old[..., : self.length, :]

    def _allocate(self, capacity: int) -> torch.Tensor:
        shape = self.shape
        # Zeros: a hidden position's probability is 0, and 0 times the NaN that lay there before would be NaN.
        return torch.zeros(
            (shape.num_layers, shape.num_planes, shape.num_heads, capacity, shape.width),
            dtype=self._dtype,
            device=self._device,
        )


def round_up(length: int) -> int:
    """The capacity for ``length`` positions."""
    step = _STEP if length <= 2 * SPLIT else SPLIT
    return max(1, -(-length // step)) * step


def share_out(lengths: Sequence[int], *, max_positions: int) -> list[list[int]]:
    """Group requests so that each group, padded to its longest, stays within ``max_positions``; alone if it must.

    Args:
        lengths: positions that each request needs.

    Returns:
        Indexes into ``lengths``; requests of similar length share a group.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # Longest first: the first of a group says how far it is padded.
        if groups and (len(groups[-1]) + 1) * round_up(lengths[groups[-1][0]]) <= max_positions:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def collect(caches: Sequence[DeviceCache], needed: int) -> torch.Tensor:  # [L, P, B, H, T, D]
    """A window in which every request of a batch has room for ``needed`` positions, with what the caches hold.

    A single cache is its own window; of several this is a copy.
    """
    if len(caches) == 1:
        caches[0].reserve(needed)
        return caches[0].data.unsqueeze(2)
    layers, planes, heads, _, width = caches[0].data.shape
    window = caches[0].data.new_empty((layers, planes, len(caches), heads, round_up(needed), width))
    fill(window, caches)
    return window


def fill(window: torch.Tensor, caches: Sequence[DeviceCache]) -> None:  # [L, P, B, H, T, D]
    """Copy what the caches hold into a window, zeros behind it: whatever lay there may have been NaN."""
    window.zero_()
    for index, cache in enumerate(caches):
        window[:, :, index, :, : cache.length] = cache.data[..., : cache.length, :]


def store(window: torch.Tensor, caches: Sequence[DeviceCache], counts: Sequence[int], *, is_copy: bool) -> None:
    """Count the ``counts[i]`` positions written behind each cache's length; out of a copy they are fetched first."""
    for index, (cache, count) in enumerate(zip(caches, counts, strict=True)):
        begin, end = cache.length, cache.length + count
        if is_copy:
            cache.reserve(end)
            cache.data[..., begin:end, :] = window[:, :, index, :, begin:end]
        cache.length = end
