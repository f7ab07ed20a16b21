"""Runs a head on a GPU: a round of a whole batch is queued at once and waited for once, unless a request samples.

A greedy chain stays on the device: argmax, the map to the target's ids and the embedding of each guess need no host. A
chain with shared noise brings its most likely ids back after every step, because the noise is the host's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from drafter.choice import MAX_CANDIDATES, choose_candidate
from drafter.device.attention import MAX_SHORT_ROWS
from drafter.device.graphs import GraphRounds
from drafter.device.memory import DeviceCache, collect, fill, share_out, store
from drafter.device.model import DeviceModel
from drafter.device.opening import named_errors
from drafter.device.rows import PaddedRows
from drafter.device.staging import RoundInput, Staging
from drafter.errors import OutOfDeviceMemory
from drafter.ports import DraftWish, Stretch
from wire.sampling import SamplingParams

__all__ = ["DeviceRunner"]

# Of copies of several requests' caches, padded: more requests than fit are drafted for group by group.
_MAX_WINDOW_BYTES = 1 << 30
# Masks whose rows are no multiple of this are copied by the attention kernels. Capacities are.
_ALIGNMENT = 64


class DeviceRunner:
    """See DraftRunner."""

    def __init__(
        self, model: DeviceModel, *, max_window_bytes: int = _MAX_WINDOW_BYTES, uses_graphs: bool = True
    ) -> None:
        self.feature_size = model.feature_size
        self.num_positions = model.num_positions
        self._model = model
        self._staging = Staging(model.device, feature_size=model.feature_size)
        self._max_positions = max_window_bytes // (model.plane_shape.num_numbers * model.dtype.itemsize)
        self._graphs: GraphRounds | None = None
        if uses_graphs:
            self._graphs = GraphRounds(
                self._greedy,
                model.plane_shape,
                feature_size=model.feature_size,
                device=model.device,
                dtype=model.dtype,
            )
        self._was_full = False

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._model.device

    @property
    def vocab_size(self) -> int:
        """See DraftRunner."""
        return self._model.vocab_size

    def new_cache(self) -> DeviceCache:
        """See DraftRunner."""
        return DeviceCache(self._model.plane_shape, device=self._model.device, dtype=self._model.dtype)

    def warm_up(self, num_draft_tokens: int) -> None:
        """Read and draft once, so that the first request does not pay for loading the GPU's libraries."""
        cache, count = self.new_cache(), MAX_SHORT_ROWS + 2
        features = np.zeros((count, self.feature_size), np.float32)
        wish = DraftWish(
            num_draft_tokens=num_draft_tokens, position=count + 1, sampling=SamplingParams(temperature=0.0)
        )
        with torch.inference_mode():
            self.draft([Stretch(cache=cache, features=features, token_ids=[0] * count)], [wish])

    def read(self, stretch: Stretch) -> None:
        """See DraftRunner."""
        with self._device_errors():
            self._read(stretch)

    def draft(self, stretches: Sequence[Stretch], wishes: Sequence[DraftWish]) -> list[list[int]]:
        """See DraftRunner."""
        drafts: list[list[int]] = [[] for _ in wishes]
        with self._device_errors():
            short = [self._shorten(stretch) for stretch in stretches]
            longest = max(wish.num_draft_tokens for wish in wishes)
            needed = [_cache_of(stretch).length + MAX_SHORT_ROWS + longest for stretch in short]
            queued = [
                (group, self._round([short[index] for index in group], [wishes[index] for index in group]))
                for group in share_out(needed, max_positions=self._max_positions)
            ]
            for group, ids in queued:
                for index, chain in zip(group, ids.tolist(), strict=True):
                    drafts[index] = chain[: wishes[index].num_draft_tokens]
        return drafts

    def _shorten(self, stretch: Stretch) -> Stretch:
        """Read all but the last slot of a long stretch by itself: padding a batch to it would cost more."""
        count = len(stretch.token_ids)
        if count <= MAX_SHORT_ROWS:
            return stretch
        self._read(Stretch(cache=stretch.cache, features=stretch.features[:-1], token_ids=stretch.token_ids[:-1]))
        return Stretch(cache=stretch.cache, features=stretch.features[-1:], token_ids=stretch.token_ids[-1:])

    def _read(self, stretch: Stretch) -> None:
        cache, count = _cache_of(stretch), len(stretch.token_ids)
        begin = cache.length
        memory = collect([cache], begin + count)
        given = self._staging.send([stretch], [begin], count)
        rows = self._rows(memory, given, num_seen=-(-(begin + count) // _ALIGNMENT) * _ALIGNMENT)
        self._model.read(self._model.fuse(given.features), given.token_ids, rows)
        store(memory, [cache], [count], is_copy=False)

    def _round(self, stretches: Sequence[Stretch], wishes: Sequence[DraftWish]) -> torch.Tensor:
        """[B, K] ids on the device, K the longest wish; they may not be computed yet."""
        caches = [_cache_of(stretch) for stretch in stretches]
        counts = [len(stretch.token_ids) for stretch in stretches]
        steps = max(wish.num_draft_tokens for wish in wishes)
        starts = [cache.length for cache in caches]
        is_greedy = all(wish.sampling.is_greedy for wish in wishes)
        if is_greedy and self._graphs is not None:
            shape = self._graphs.shape_for(lengths=starts, counts=counts, steps=steps)
            if shape is not None:
                memory = self._graphs.memory(shape)
                fill(memory, caches)
                given = self._staging.send(stretches, starts, shape.rows, into=self._graphs.buffers(shape))
                ids = self._graphs.run(shape, given)
                store(memory, caches, counts, is_copy=True)
                return ids
        memory = collect(caches, max(starts) + max(counts) + steps)
        given = self._staging.send(stretches, starts, max(counts))
        ids = self._greedy(given, memory, steps) if is_greedy else self._sampled(given, memory, wishes, steps)
        store(memory, caches, counts, is_copy=len(caches) > 1)
        return ids

    def _greedy(self, given: RoundInput, memory: torch.Tensor, steps: int) -> torch.Tensor:  # [B, steps]
        states = self._extend(given, memory)
        chosen = []
        for step in range(steps):
            logits, fed_back = self._model.guess(states)
            chosen.append(self._model.best_ids(logits))
            if step + 1 < steps:
                states = self._advance(given, memory, fed_back, chosen[-1], step)
        return torch.stack(chosen, dim=1)

    def _sampled(
        self, given: RoundInput, memory: torch.Tensor, wishes: Sequence[DraftWish], steps: int
    ) -> torch.Tensor:  # [B, steps]
        states = self._extend(given, memory)
        chosen = []
        for step in range(steps):
            logits, fed_back = self._model.guess(states)
            chosen.append(self._staging.send_ids(self._choose(logits, wishes, step)))
            if step + 1 < steps:
                states = self._advance(given, memory, fed_back, chosen[-1], step)
        return torch.stack(chosen, dim=1)

    def _choose(self, logits: torch.Tensor, wishes: Sequence[DraftWish], step: int) -> list[int]:
        """Each request's guess, with the one copy to the host that a step needs."""
        top = logits.float().topk(min(MAX_CANDIDATES, logits.shape[1]), dim=1)
        # float64 carries float32 logits and ids alike.
        found = torch.stack((top.values.double(), self._model.target_ids[top.indices].double())).cpu().numpy()
        chosen = []
        for index, wish in enumerate(wishes):
            values, ids = found[0, index].astype("float32"), found[1, index].astype("int64")
            position = wish.position + step
            chosen.append(int(ids[choose_candidate(values, sampling=wish.sampling, position=position, target_ids=ids)]))
        return chosen

    def _extend(self, given: RoundInput, memory: torch.Tensor) -> torch.Tensor:  # [B, H]
        rows = self._rows(memory, given, num_seen=memory.shape[4])
        last = None if rows.num_rows == 1 else given.last
        return self._model.forward(self._model.fuse(given.features), given.token_ids, rows, last)

    def _advance(
        self, given: RoundInput, memory: torch.Tensor, fed_back: torch.Tensor, ids: torch.Tensor, step: int
    ) -> torch.Tensor:  # [B, H]
        positions = (given.starts + given.last + (step + 1)).unsqueeze(1)
        rows = self._model.rows_at(memory, positions, num_seen=memory.shape[4])
        return self._model.forward(fed_back.unsqueeze(1), ids.unsqueeze(1), rows, None)

    def _rows(self, memory: torch.Tensor, given: RoundInput, *, num_seen: int) -> PaddedRows:
        offsets = torch.arange(given.token_ids.shape[1], device=self._model.device)
        return self._model.rows_at(memory, given.starts.unsqueeze(1) + offsets, num_seen=num_seen)

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        if self._was_full:
            # Not where it happened: the error's traceback still held that batch's tensors there.
            self._was_full = False
            torch.cuda.empty_cache()
        try:
            with named_errors(self._model.device):
                yield
        except OutOfDeviceMemory:
            self._was_full = True
            raise


def _cache_of(stretch: Stretch) -> DeviceCache:
    assert isinstance(stretch.cache, DeviceCache)
    return stretch.cache
