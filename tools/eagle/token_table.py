"""All training conversations as flat arrays, and batches cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Batch", "TokenTable", "load_table"]


@dataclass(slots=True, kw_only=True)
class Batch:
    """One padded training batch.

    Attributes:
        ids: [B, T] int64, zero-padded on the right.
        rows, ends: [R] int64; each pair (row, y) is an answer token that some draft step learns to predict.
        offsets: [R] int64, how many answer tokens stand before y in its answer: step j may learn it if offset > j.
        num_tokens: Real tokens in ``ids``.
    """

    ids: Tensor
    rows: Tensor
    ends: Tensor
    offsets: Tensor
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class TokenTable:
    """Flat storage: conversation c is ``ids[starts[c] : starts[c] + lengths[c]]``.

    Attributes:
        ids: [S] uint16.
        offsets: [S] int16, index of the token within its answer, -1 for tokens the target didn't write.
        starts, lengths: [C] int64.
    """

    ids: NDArray[np.uint16]
    offsets: NDArray[np.int16]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens the target wrote."""
        return int((self.offsets >= 0).sum())

    def answer_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """[vocab_size] how often the target wrote each token."""
        return np.bincount(self.ids[self.offsets >= 0], minlength=vocab_size)

    def batch(self, conversations: NDArray[np.int64], device: torch.device) -> Batch:
        """Pads the conversations to the longest and moves them to ``device``."""
        lengths = self.lengths[conversations]
        columns = np.arange(int(lengths.max()))
        inside = columns[None, :] < lengths[:, None]
        index = np.where(inside, self.starts[conversations][:, None] + columns[None, :], 0)
        ids = np.where(inside, self.ids[index], 0).astype(np.int64)
        offsets = np.where(inside, self.offsets[index], -1)
        rows, ends = np.nonzero(offsets >= 1)

        def move(array: NDArray[np.int64]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        return Batch(
            ids=move(ids), rows=move(rows), ends=move(ends), offsets=move(offsets[rows, ends].astype(np.int64)),
            num_tokens=int(lengths.sum()),
        )  # fmt: skip


def load_table(paths: Sequence[Path], *, max_answer_tokens: int | None = None, max_len: int = 1_024) -> TokenTable:
    """Reads shards in order, clips conversations to ``max_len``, and stops once there are ``max_answer_tokens``."""
    ids, offsets, lengths = [], [], []
    for path in paths:
        with np.load(path) as shard:
            flat, sizes, spans = shard["ids"], shard["lengths"].astype(np.int64), shard["spans"]
        firsts = np.cumsum(sizes) - sizes
        marks = np.full(len(flat), -1, dtype=np.int16)
        for row, start, end in spans.tolist():
            marks[firsts[row] + start : firsts[row] + end] = np.arange(end - start)
        ids.append(flat)
        offsets.append(marks)
        lengths.append(sizes)
    sizes = np.concatenate(lengths)
    table = TokenTable(
        ids=np.concatenate(ids), offsets=np.concatenate(offsets), starts=np.cumsum(sizes) - sizes,
        lengths=np.minimum(sizes, max_len),
    )  # fmt: skip
    if max_answer_tokens is not None:
        written = np.add.reduceat(table.offsets >= 0, table.starts, dtype=np.int64)
        keep = int(np.searchsorted(np.cumsum(written), max_answer_tokens)) + 1
        last = int(table.starts[keep - 1] + sizes[keep - 1]) if keep <= len(sizes) else len(table.ids)
        return TokenTable(
            ids=table.ids[:last], offsets=table.offsets[:last], starts=table.starts[:keep], lengths=table.lengths[:keep]
        )
    return table
