"""What goes to the device each round: features and whole numbers, in two copies from pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafter.ports import Stretch

__all__ = ["RoundInput", "Staging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInput:
    """One round's input on the device.

    features: [B, R, F] float32, zeros behind a request's rows. token_ids: [B, R] int64, likewise.
    starts: [B] int64, first position. last: [B] int64, each request's last row that is no padding.
    """

    features: torch.Tensor
    token_ids: torch.Tensor
    starts: torch.Tensor
    last: torch.Tensor


class Staging:
    """Buffers that are used again; ``send`` returns as soon as the copies are queued."""

    def __init__(self, device: torch.device, *, feature_size: int) -> None:
        self._device = device
        self._feature_size = feature_size
        self._is_pinned = device.type == "cuda"
        self._features = self._empty(0, torch.float32)
        self._numbers = self._empty(0, torch.int64)
        self._copied: torch.cuda.Event | None = None

    def send(
        self,
        stretches: Sequence[Stretch],
        starts: Sequence[int],
        num_rows: int,
        *,
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> RoundInput:
        """The stretches padded to ``num_rows`` each; ``into``: buffers for features and whole numbers."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy out of these buffers, not what came after it
        batch = len(stretches)
        size, num_ids = batch * num_rows * self._feature_size, batch * num_rows
        if size > len(self._features):
            self._features = self._empty(size, torch.float32)
        if num_ids + 2 * batch > len(self._numbers):
            self._numbers = self._empty(2 * (num_ids + 2 * batch), torch.int64)
        features = self._features.numpy()[:size].reshape(batch, num_rows, -1)
        numbers = self._numbers.numpy()[: num_ids + 2 * batch]
        token_ids = numbers[:num_ids].reshape(batch, num_rows)
        for index, stretch in enumerate(stretches):
            count = len(stretch.token_ids)
            features[index, :count], features[index, count:] = stretch.features, 0
            token_ids[index, :count], token_ids[index, count:] = stretch.token_ids, 0
        numbers[num_ids : num_ids + batch] = starts
        numbers[num_ids + batch :] = [len(stretch.token_ids) - 1 for stretch in stretches]
        sent, sent_numbers = into or (
            torch.empty(size, dtype=torch.float32, device=self._device),
            torch.empty(len(numbers), dtype=torch.int64, device=self._device),
        )
        sent.copy_(self._features[:size], non_blocking=True)
        sent_numbers.copy_(self._numbers[: len(numbers)], non_blocking=True)
        if self._is_pinned:
            self._copied = torch.cuda.current_stream(self._device).record_event()
        return RoundInput(
            features=sent.view(batch, num_rows, -1),
            token_ids=sent_numbers[:num_ids].view(batch, num_rows),
            starts=sent_numbers[num_ids : num_ids + batch],
            last=sent_numbers[num_ids + batch :],
        )

    def send_ids(self, ids: Sequence[int]) -> torch.Tensor:  # [B] int64
        """A chain step's ids that were chosen on the host."""
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self._device)

    def _empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=self._is_pinned)
