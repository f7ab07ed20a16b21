"""Counter-based Gumbel noise: the same (seed, position, token) always draws the same number, on any device.

Eval samples with it, so that a draft can be made with the very noise the target will use (shared-noise drafting).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["counter_gumbel"]

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A 32-bit avalanche (lowbias32) on int64 tensors holding 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def counter_gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel draws keyed by seed, position and token id; the arguments broadcast.

    Args:
        seeds, positions, token_ids: int64, each under 2**31.

    Returns:
        float32 of the broadcast shape.
    """
    key = _mix(_mix(seeds & _MASK) ^ (positions * 0x9E3779B1 & _MASK))
    bits = _mix(key ^ (token_ids * 0x85EBCA77 & _MASK))
    uniform = (bits.to(torch.float32) + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform.clamp(1e-10, 1.0 - 1e-7)))
