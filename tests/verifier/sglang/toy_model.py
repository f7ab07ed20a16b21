"""A deterministic toy language model: the logits of a position are a hash of the last three ids."""

from __future__ import annotations

import functools

import numpy as np

VOCAB_SIZE = 48
HIDDEN_SIZE = 4


def logits(ids: list[int]) -> np.ndarray:
    """[V] float32 raw logits after ``ids``."""
    key = 17
    for token_id in ids[-3:]:
        key = (key * 1_000_003 + token_id + 1) % (1 << 31)
    return _row(key).copy()


@functools.lru_cache(4096)
def _row(key: int) -> np.ndarray:
    return np.random.default_rng(key).normal(0.0, 2.0, VOCAB_SIZE).astype(np.float32)


def logprobs(ids: list[int]) -> np.ndarray:
    """[V] float64 log-softmax of the raw logits."""
    row = logits(ids).astype(np.float64)
    row -= row.max()
    return row - np.log(np.exp(row).sum())


def greedy(ids: list[int], num: int) -> list[int]:
    """The next ``num`` ids of greedy decoding."""
    ids = list(ids)
    for _ in range(num):
        ids.append(int(logits(ids).argmax()))
    return ids[len(ids) - num :]


def features(ids: list[int], position: int) -> list[float]:
    """[3 * H] aux hidden states of the input at ``position``."""
    return [float(position), float(ids[position]), *(float(ids[position] * 3 + i) for i in range(3 * HIDDEN_SIZE - 2))]
