"""The draws of verifier/embedded/sampling.py for all rows at once, in torch, on the device the logits lie on.

The same steps in the same order in float64, with the same noise. A logarithm's last bit may differ between numpy and a
GPU, which moves a draw only if two ids' sums are that close. Nothing here waits for the device: with the overlap
scheduler the newest id of a decode step is known to the device only, so counts for penalties live there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from verifier.sglang.plugin.row_draws import RowGroup, RowState
from wire.noise import GAMMA, MIX1, MIX2, noise_keys
from wire.sampling import SamplingParams

__all__ = ["BatchedDraws", "gumbel_rows"]

_LARGEST = torch.finfo(torch.float64).max
_INT64 = 1 << 64


def _signed(value: int) -> int:
    return value - _INT64 if value >= _INT64 // 2 else value


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser in place. torch has no unsigned shift, so the sign's copies are masked away."""
    for shift, factor in ((30, MIX1), (27, MIX2), (31, None)):
        bits ^= (bits >> shift) & ((1 << (64 - shift)) - 1)
        if factor is not None:
            bits *= _signed(factor)
    return bits


def gumbel_rows(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """wire.noise.gumbel_noise of every id, for each row.

    Args:
        keys: [R] int64, the bits of ``noise_keys``.

    Returns:
        [R, V] float64.
    """
    bits = torch.arange(1, vocab_size + 1, device=keys.device) * _signed(GAMMA)
    bits = _mix(bits[None, :] + keys[:, None])
    noise = ((bits >> 11) & ((1 << 53) - 1)).double()
    noise += 0.5
    noise *= 2.0**-53
    return noise.log_().neg_().log_().neg_()


class _Counts:
    """[V] occurrences in prompt and output of one request, on the device."""

    def __init__(self, state: RowState, vocab_size: int, device: torch.device) -> None:
        self._prompt_len = state.prompt_len
        self._len = 0
        self._zeros = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self.prompt = self._zeros.clone()
        self.output = self._zeros.clone()

    def advance(self, group: RowGroup) -> None:
        """Count the ids before ``group.position``."""
        known = group.known_ids
        if not (self._len == group.position - 1 and group.newest is not None):
            if self._len > len(known):  # taken back: retracted, or from before
                self.prompt, self.output, self._len = self._zeros.clone(), self._zeros.clone(), 0
            at = max(self._len, self._prompt_len)
            self.prompt += self._of(known[self._len : self._prompt_len])
            self.output += self._of(known[at : group.position])
            self._len = min(len(known), group.position)
        if self._len < group.position:
            counts = self.prompt if self._len < self._prompt_len else self.output
            counts.index_add_(0, group.newest.long().reshape(1), torch.ones_like(counts[:1]))
            self._len += 1

    def _of(self, ids: Sequence[int]) -> torch.Tensor:
        found = torch.tensor([*ids], dtype=torch.int64).bincount(minlength=len(self._zeros))
        return found.to(self._zeros.device, torch.float64, non_blocking=True)


class BatchedDraws:
    """RowDraws for the GPU; runs on any device."""

    def draw(self, rows: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """See RowDraws."""
        values = rows.double()
        params: list[SamplingParams] = []
        positions: list[int] = []
        for group in groups:
            for i in range(group.count):
                _process(values[len(params)], group, i)
                params.append(group.state.params)
                positions.append(group.position + i)
        sampled = [i for i, p in enumerate(params) if not p.is_greedy]
        if sampled:
            index = torch.tensor(sampled, device=rows.device)
            scored = _scored(values[index], [params[i] for i in sampled], [positions[i] for i in sampled])
            values = values.index_copy(0, index, scored)
        return _lowest_argmax(values)


def _process(row: torch.Tensor, group: RowGroup, index: int) -> None:
    """Steps 1 to 4, on one row [V] in place."""
    state, position = group.state, group.position + index
    params = state.params
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if position - state.prompt_len < params.min_new_tokens:
        row[list(params.eos_ids)] = -math.inf
    if not state.has_penalties:
        return
    if state.counts is None:
        state.counts = _Counts(state, len(row), row.device)
    if index == 0:
        state.counts.advance(group)
    prompt, output = state.counts.prompt, state.counts.output
    if index > 0:
        drafts = torch.tensor(group.drafts[:index], device=row.device)
        counted = torch.zeros_like(output).index_add_(0, drafts, torch.ones_like(drafts, dtype=output.dtype))
        output = output + counted
    if params.repetition_penalty != 1.0:
        divided = (row / params.repetition_penalty).clamp_(max=_LARGEST)
        penalised = torch.where(row > 0, divided, row * params.repetition_penalty)
        row.copy_(torch.where(prompt + output > 0, penalised, row))
    used = params.frequency_penalty * output + params.presence_penalty
    row -= torch.where(output > 0, used, torch.zeros_like(used))


def _scored(values: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    """Steps 6 to 10 without the argmax: [S, V], -inf where filtered away."""
    device, size = values.device, values.shape[1]
    values = values - values.max(dim=1, keepdim=True).values
    values /= torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)[:, None]
    filtered = [i for i, p in enumerate(params) if 0 < p.top_k < size or p.top_p < 1.0 or p.min_p > 0.0]
    if filtered:
        index = torch.tensor(filtered, device=device)
        values = values.index_copy(0, index, _filtered(values[index], [params[i] for i in filtered]))
    seeds = np.array([p.seed for p in params], dtype=np.uint64)
    keys = noise_keys(seeds, np.array(positions, dtype=np.uint64)).view(np.int64)
    return values + gumbel_rows(torch.from_numpy(keys).to(device), size)


def _filtered(values: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Steps 7 to 9; [F, V] with the largest 0 in each row."""
    device, size = values.device, values.shape[1]

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]

    ranked, order = values.sort(dim=1, descending=True, stable=True)  # of equal ones the lowest ids first
    top_k = column([p.top_k if 0 < p.top_k < size else size for p in params])
    kept = torch.arange(size, device=device)[None, :] < top_k
    weights = ranked.exp() * kept
    before = weights.cumsum(dim=1) - weights
    needed = column([p.top_p if p.top_p < 1.0 else math.inf for p in params]) * weights.sum(dim=1, keepdim=True)
    kept = kept & (before < needed)
    kept = kept & (ranked >= column([math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]))
    ranked = torch.where(kept, ranked, torch.full_like(ranked, -math.inf))
    return torch.empty_like(values).scatter_(1, order, ranked)


def _lowest_argmax(values: torch.Tensor) -> torch.Tensor:
    """[R] the lowest of the largest ids; argmax names any of them on a GPU."""
    ids = torch.arange(values.shape[1], device=values.device)
    beyond = torch.full_like(ids, values.shape[1] - 1)
    largest = values == values.max(dim=1, keepdim=True).values
    return torch.where(largest, ids, beyond).min(dim=1).values
