"""The rows of one forward on the device: R of each of B requests, in a window over their keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PaddedRows", "padded_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Where each row is, all on the device.

    memory: [L, P, B, H, T, D], borrowed; the rows write into it.
    positions: [B, R] int64. A request with fewer rows is padded behind: those rows write where its next ones will.
    turns: [B, R, 1, rotary / 2] complex64, what positions rotate by.
    slots: [B * R * P * H] int64, where the rows' planes go in one layer's memory taken as a table of width D.
    is_hidden: [B, R, T] bool, positions a row doesn't see.
    num_seen: positions that any row may see, on the host; what is behind them need not be looked at.
    """

    memory: torch.Tensor
    positions: torch.Tensor
    turns: torch.Tensor
    slots: torch.Tensor
    is_hidden: torch.Tensor
    num_seen: int

    @property
    def num_rows(self) -> int:
        """R."""
        return self.positions.shape[1]

    def write(self, layer: int, planes: torch.Tensor) -> None:  # [B, R, P * H, D]
        """Put the rows' keys and values (or latents) into the memory."""
        width = self.memory.shape[-1]
        self.memory[layer].view(-1, width).index_copy_(0, self.slots, planes.reshape(-1, width))


def padded_rows(
    memory: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,  # [positions, rotary / 2] complex64
    *,
    num_seen: int,
) -> PaddedRows:
    """Describe the rows at ``positions`` [B, R]."""
    _, num_planes, num_requests, num_heads, capacity, _ = memory.shape
    lines = torch.arange(num_planes * num_requests * num_heads, device=memory.device)
    bases = lines.view(num_planes, num_requests, num_heads).transpose(0, 1).reshape(num_requests, 1, -1) * capacity
    return PaddedRows(
        memory=memory,
        positions=positions,
        turns=table[positions].unsqueeze(2),
        slots=(bases + positions.unsqueeze(2)).flatten(),
        is_hidden=torch.arange(capacity, device=memory.device) > positions.unsqueeze(2),
        num_seen=num_seen,
    )
