"""Runs a head on the CPU: a batch's rows in one ragged forward, then a row per request for each further token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cpukernels.kv_cache import KvCache
from cpukernels.ports import ragged_rows
from drafter.choice import choose_draft_index
from drafter.model import DraftModel
from drafter.ports import DraftWish, Stretch

__all__ = ["HostRunner"]

_NO_ROWS: npt.NDArray[np.int64] = np.empty(0, np.int64)


class HostRunner:
    """See DraftRunner."""

    def __init__(self, model: DraftModel) -> None:
        self.feature_size = model.feature_size
        self.num_positions = model.num_positions
        self._model = model

    @property
    def vocab_size(self) -> int:
        """See DraftRunner."""
        return self._model.vocab_size

    def new_cache(self) -> KvCache:
        """See DraftRunner."""
        return self._model.new_cache()

    def read(self, stretch: Stretch) -> None:
        """See DraftRunner."""
        self._extend([stretch], _NO_ROWS)

    def draft(self, stretches: Sequence[Stretch], wishes: Sequence[DraftWish]) -> list[list[int]]:
        """See DraftRunner."""
        states = self._extend(stretches, np.cumsum([len(stretch.token_ids) for stretch in stretches]) - 1)
        caches = [_cache_of(stretch) for stretch in stretches]
        lengths = [cache.length for cache in caches]
        try:
            return self._chain(caches, wishes, states)
        finally:
            for cache, length in zip(caches, lengths, strict=True):
                cache.length = length

    def _extend(self, stretches: Sequence[Stretch], wanted: npt.NDArray[np.int64]) -> torch.Tensor:  # [len(wanted), H]
        caches = [_cache_of(stretch) for stretch in stretches]
        counts = [len(stretch.token_ids) for stretch in stretches]
        hidden = self._model.fuse(torch.from_numpy(np.concatenate([stretch.features for stretch in stretches])))
        ids = torch.tensor([token_id for stretch in stretches for token_id in stretch.token_ids])
        states = self._model.forward(hidden, ids, ragged_rows(caches, counts), wanted)
        for cache, count in zip(caches, counts, strict=True):
            cache.length += count
        return states

    def _chain(
        self, caches: Sequence[KvCache], wishes: Sequence[DraftWish], states: torch.Tensor
    ) -> list[list[int]]:  # states: [N, H]
        """Guess from the last slots' states, then feed each guess back; who has enough drops out."""
        drafts: list[list[int]] = [[] for _ in wishes]
        active = list(range(len(wishes)))
        while True:
            logits, fed_back = self._model.guess(states)
            for row, index in enumerate(active):
                drafts[index].append(self._choose(wishes[index], len(drafts[index]), logits[row]))
            going = [row for row, index in enumerate(active) if len(drafts[index]) < wishes[index].num_draft_tokens]
            if not going:
                return drafts
            if len(going) < len(active):
                active, fed_back = [active[row] for row in going], fed_back[going]
            rows = ragged_rows([caches[index] for index in active], [1] * len(active))
            ids = torch.tensor([drafts[index][-1] for index in active])
            states = self._model.forward(fed_back, ids, rows, np.arange(len(active)))
            for index in active:
                caches[index].length += 1

    def _choose(self, wish: DraftWish, step: int, logits: torch.Tensor) -> int:  # [draft vocab]
        target_ids = self._model.target_ids
        position = wish.position + step
        return int(
            target_ids[choose_draft_index(logits, sampling=wish.sampling, position=position, target_ids=target_ids)]
        )


def _cache_of(stretch: Stretch) -> KvCache:
    assert isinstance(stretch.cache, KvCache)
    return stretch.cache
