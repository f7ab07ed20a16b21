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

from verifier.sglang.plugin.device_rows import pick_rows, put_rows, to_device
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
        self.prompt = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        self.output = torch.zeros_like(self.prompt)

    def advance(self, group: RowGroup) -> None:
        """Count the ids before ``group.position``."""
        known = group.known_ids
        if not (self._len == group.position - 1 and group.newest is not None):
            if self._len > len(known):  # taken back: retracted, or from before
                # Fresh ones: a pass that is still running may read the old.
                self.prompt, self.output = torch.zeros_like(self.prompt), torch.zeros_like(self.output)
                self._len = 0
            _count(self.prompt, known[self._len : self._prompt_len])
            _count(self.output, known[max(self._len, self._prompt_len) : group.position])
            self._len = min(len(known), group.position)
        if self._len < group.position:
            counts = self.prompt if self._len < self._prompt_len else self.output
            counts.index_add_(0, group.newest.long().reshape(1), torch.ones_like(counts[:1]))
            self._len += 1


def _count(counts: torch.Tensor, token_ids: Sequence[int]) -> None:
    if len(token_ids):
        index = to_device(np.array(token_ids, dtype=np.int64), counts.device)
        counts.index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))


class BatchedDraws:
    """RowDraws for the GPU; runs on any device."""

    def draw(self, rows: torch.Tensor, groups: Sequence[RowGroup]) -> torch.Tensor:
        """See RowDraws."""
        if all(group.state.params.is_greedy and not _changes_logits(group) for group in groups):
            return rows.argmax(dim=1)  # the first of equal ones, as torch promises
        values = rows.double()
        params = [group.state.params for group in groups for _ in range(group.count)]
        positions = [group.position + i for group in groups for i in range(group.count)]
        _bias(values, params)
        _hide_eos(values, groups)
        _penalise(values, groups)
        sampled = [i for i, p in enumerate(params) if not p.is_greedy]
        if sampled:
            picked = pick_rows(values, sampled)
            scored = _scored(picked, [params[i] for i in sampled], [positions[i] for i in sampled])
            put_rows(values, sampled, scored)
        return values.argmax(dim=1)


def _changes_logits(group: RowGroup) -> bool:
    """Steps 1 to 4 may do anything."""
    state = group.state
    return bool(state.params.logit_bias) or state.has_penalties or _hides_eos(group, group.position)


def _hides_eos(group: RowGroup, position: int) -> bool:
    return position - group.state.prompt_len < group.state.params.min_new_tokens


def _bias(values: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Step 1, in place."""
    size = values.shape[1]
    found = [(row * size + token_id, bias) for row, p in enumerate(params) for token_id, bias in p.logit_bias]
    if found:
        index = to_device(np.array([at for at, _ in found], dtype=np.int64), values.device)
        biases = to_device(np.array([bias for _, bias in found], dtype=np.float64), values.device)
        values.view(-1).index_add_(0, index, biases)


def _hide_eos(values: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    """Step 2, in place."""
    found: list[int] = []
    row = 0
    for group in groups:
        for i in range(group.count):
            if _hides_eos(group, group.position + i):
                found += [row * values.shape[1] + token_id for token_id in group.state.params.eos_ids]
            row += 1
    if found:
        values.view(-1).index_fill_(0, to_device(np.array(found, dtype=np.int64), values.device), -math.inf)


def _penalise(values: torch.Tensor, groups: Sequence[RowGroup]) -> None:
    """Steps 3 and 4, in place, for all rows with penalties at once."""
    index: list[int] = []
    prompts: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    params: list[SamplingParams] = []
    drafted: list[int] = []
    row, size = 0, values.shape[1]
    for group in groups:
        state = group.state
        if state.has_penalties:
            if state.counts is None:
                state.counts = _Counts(state, size, values.device)
            state.counts.advance(group)
            for i in range(group.count):
                drafted += [len(index) * size + token_id for token_id in group.drafts[:i]]
                index.append(row + i)
            prompts += [state.counts.prompt] * group.count
            outputs += [state.counts.output] * group.count
            params += [state.params] * group.count
        row += group.count
    if not index:
        return
    prompt, output = torch.stack(prompts), torch.stack(outputs)
    _count(output.view(-1), drafted)
    numbers = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    repetition, frequency, presence = to_device(np.array(numbers), values.device)[:, :, None].unbind(1)
    picked = pick_rows(values, index)
    divided = (picked / repetition).clamp_(max=_LARGEST)
    penalised = torch.where(picked > 0, divided, picked * repetition)
    penalised = torch.where(prompt + output > 0, penalised, picked)
    penalised -= torch.where(output > 0, frequency * output + presence, torch.zeros_like(output))
    put_rows(values, index, penalised)


def _scored(values: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    """Steps 6 to 10 without the argmax: [S, V], -inf where filtered away."""
    device, size = values.device, values.shape[1]
    seeds = np.array([p.seed for p in params], dtype=np.uint64)
    numbers = np.array(
        [
            [p.temperature for p in params],
            [p.top_k if 0 < p.top_k < size else size for p in params],
            [p.top_p if p.top_p < 1.0 else math.inf for p in params],
            [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params],
        ]
    )
    # One copy to the device for all, so everything travels as 64 bits.
    keys = noise_keys(seeds, np.array(positions, dtype=np.uint64))
    sent = to_device(np.concatenate([keys.view(np.int64)[None], numbers.view(np.int64)]), device)
    columns = sent[1:].view(torch.float64)[:, :, None]
    values = values - values.max(dim=1, keepdim=True).values
    values /= columns[0]
    filtered = [i for i, p in enumerate(params) if 0 < p.top_k < size or p.top_p < 1.0 or p.min_p > 0.0]
    if filtered:
        # Rows without a filter pass through unchanged, so all rows may go where indices would have to be sent.
        values = _filtered(values, columns[1], columns[2], columns[3])
    return values + gumbel_rows(sent[0], size)


def _filtered(values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_logit: torch.Tensor) -> torch.Tensor:
    """Steps 7 to 9.

    Args:
        values: [S, V] logits over temperature, the largest of each row 0.
        top_k, top_p, min_logit: [S, 1] float64; V, inf and -inf where a filter is off.

    Returns:
        [S, V], -inf where filtered away.
    """
    ranked, order = values.sort(dim=1, descending=True, stable=True)  # of equal ones the lowest ids first
    kept = torch.arange(values.shape[1], device=values.device)[None, :] < top_k
    weights = ranked.exp() * kept
    before = weights.cumsum(dim=1) - weights
    kept = kept & (before < top_p * weights.sum(dim=1, keepdim=True)) & (ranked >= min_logit)
    ranked = ranked.masked_fill(~kept, -math.inf)
    return torch.empty_like(values).scatter_(1, order, ranked)
