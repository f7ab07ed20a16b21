"""From the raw logits of one position to one token id, exactly, in one documented order.

    1 logit_bias          added to the raw logits
    2 min_new_tokens      EOS ids get -inf while the output is shorter
    3 repetition_penalty  ids seen in prompt or output: positive logits divided, negative multiplied
    4 frequency_penalty   subtracted once per occurrence in the output
      presence_penalty    subtracted once if in the output
    5 grammar             ids that can't continue the output get -inf
    6 temperature         0: the lowest id among the largest logits is the answer; otherwise logits / temperature
    7 top_k               the k largest; of equal ones the lowest ids
    8 top_p               smallest set of the largest, renormalised after top_k, whose sum reaches top_p
    9 min_p               ids at least min_p times as likely as the likeliest
   10 draw                argmax of logits + Gumbel noise keyed by (seed, position, id)

"Seen" and "output" at a draft position include the draft ids before it, so that penalties and grammar are those plain
decoding would have applied there. Rows after a draft the grammar forbids go unmasked: they can't be accepted. All
arithmetic from step 1 on is float64, one row at a time, so a row's choice depends on its own logits only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wire.messages import PositionLogprobs, TopLogprob
from wire.noise import gumbel_noise
from wire.sampling import SamplingParams

if TYPE_CHECKING:  # the plugin samples with this module where no grammar library need be
    from verifier.embedded.grammar import GrammarState, Mask

__all__ = ["TokenSampler", "position_logprobs"]

Row = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
_LARGEST = np.finfo(np.float64).max


class TokenSampler:
    """Chooses the target's ids for one request; keeps the counts its penalties need.

    Args:
        params: the request's sampling parameters.
        vocab_size: V.
        prompt_len: ids from here on are output.
        grammar: the compiled ``params.grammar``, at its start; None = no grammar.
    """

    def __init__(
        self, params: SamplingParams, *, vocab_size: int, prompt_len: int, grammar: GrammarState | None = None
    ) -> None:
        self.params = params
        self._grammar = grammar
        self._prompt_len = prompt_len
        self._tracks_counts = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        self._is_plain_greedy = (
            params.is_greedy
            and not self._tracks_counts
            and not params.logit_bias
            and params.min_new_tokens == 0
            and grammar is None
        )
        self._all_ids = np.arange(vocab_size)
        self._counted_len = 0
        self._prompt_counts = np.zeros(vocab_size if self._tracks_counts else 0, dtype=np.int32)
        self._output_counts = np.zeros_like(self._prompt_counts)

    def choose(
        self, logits: npt.NDArray[np.float32], committed_ids: Sequence[int], draft_ids: tuple[int, ...]
    ) -> list[int]:
        """The target's choice at each of the K+1 positions of a round.

        Args:
            logits: [K+1, V] raw; row i belongs to context + draft_ids[:i].
            committed_ids: all ids before the round, length L; row i draws the id at position L + i. Only a penalty or a
                grammar reads the ids, for other requests the length is enough.
            draft_ids: [K].

        Returns:
            [K+1] token ids.

        Raises:
            ItemRefused: the grammar can't be followed any further.
        """
        if self._is_plain_greedy:
            return [int(i) for i in logits.argmax(axis=1)]
        self._count(committed_ids)
        chosen = []
        base = len(committed_ids)
        masks = self._grammar.masks(committed_ids[self._prompt_len :], draft_ids) if self._grammar else []
        for index in range(len(draft_ids) + 1):
            if index > 0:
                self._add(draft_ids[index - 1], base + index - 1, 1)
            mask = masks[index] if index < len(masks) else None
            chosen.append(self._choose_row(logits[index].astype(np.float64), base + index, mask))
        for index, draft_id in enumerate(draft_ids):  # the drafts are not committed yet
            self._add(draft_id, base + index, -1)
        return chosen

    def _count(self, committed_ids: Sequence[int]) -> None:
        if not self._tracks_counts:
            return
        if self._counted_len > len(committed_ids):
            self._prompt_counts[:] = 0
            self._output_counts[:] = 0
            self._counted_len = 0
        for position in range(self._counted_len, len(committed_ids)):
            self._add(committed_ids[position], position, 1)
        self._counted_len = len(committed_ids)

    def _add(self, token_id: int, position: int, amount: int) -> None:
        if self._tracks_counts:
            counts = self._prompt_counts if position < self._prompt_len else self._output_counts
            counts[token_id] += amount

    def _choose_row(self, logits: Row, position: int, mask: Mask | None) -> int:
        self._apply_processors(logits, position)
        params = self.params
        if mask is not None:
            logits[~mask] = -np.inf
        if params.is_greedy:
            return int(logits.argmax())
        # The largest becomes 0 first, so that a tiny temperature overflows to -inf only, never to inf or NaN.
        with np.errstate(over="ignore"):
            logits -= logits.max()
            logits /= params.temperature
        ids = _filtered_ids(logits, params)
        if ids is None:
            logits += gumbel_noise(params.seed, position, self._all_ids)
            return int(logits.argmax())
        return int(ids[(logits[ids] + gumbel_noise(params.seed, position, ids)).argmax()])

    def _apply_processors(self, logits: Row, position: int) -> None:
        params = self.params
        for token_id, bias in params.logit_bias:
            logits[token_id] += bias
        if position - self._prompt_len < params.min_new_tokens:
            logits[list(params.eos_ids)] = -np.inf
        if not self._tracks_counts:
            return
        if params.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._prompt_counts + self._output_counts)
            values = logits[seen]
            with np.errstate(over="ignore"):
                divided = np.minimum(values / params.repetition_penalty, _LARGEST)
            logits[seen] = np.where(values > 0, divided, values * params.repetition_penalty)
        used = np.flatnonzero(self._output_counts)
        logits[used] -= params.frequency_penalty * self._output_counts[used] + params.presence_penalty


def _filtered_ids(logits: Row, params: SamplingParams) -> Ids | None:
    """Ids that survive top_k, top_p and min_p, ascending; None if nothing is filtered."""
    ids = None
    if 0 < params.top_k < len(logits):
        ids = _top_k_ids(logits, params.top_k)
    if params.top_p < 1.0:
        ids = _top_p_ids(logits, ids, params.top_p)
    if params.min_p > 0.0:
        kept = np.arange(len(logits)) if ids is None else ids
        ids = kept[logits[kept] >= logits[kept].max() + np.log(params.min_p)]
    return ids


def _top_k_ids(logits: Row, top_k: int) -> Ids:
    threshold = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
    above = np.flatnonzero(logits > threshold)
    level = np.flatnonzero(logits == threshold)[: top_k - len(above)]  # flatnonzero ascends: lowest ids first
    return np.sort(np.concatenate((above, level)))


def _top_p_ids(logits: Row, ids: Ids | None, top_p: float) -> Ids:
    kept = np.arange(len(logits)) if ids is None else ids
    values = logits[kept]
    peak = values.max()
    weights = np.exp(values - peak)
    needed = top_p * weights.sum()
    # The nucleus lies among the largest logits: sort only those, widening until they hold enough mass.
    margin = 4.0
    while True:
        near = np.flatnonzero(values >= peak - margin)
        if len(near) == len(values) or weights[near].sum() >= needed:
            break
        margin *= 2
    order = near[np.argsort(-values[near], kind="stable")]
    before = np.cumsum(weights[order]) - weights[order]
    nucleus = order[before < needed]
    return np.sort(kept[nucleus])


def position_logprobs(
    logits: npt.NDArray[np.float32], token_ids: Iterable[int], num_top: int
) -> tuple[PositionLogprobs, ...]:
    """Log-softmax of raw logits for chosen ids and the most likely ones.

    Args:
        logits: [R, V]. token_ids: [R]. num_top: how many of the most likely ids to list, >= 0.
    """
    entries = []
    for row, token_id in zip(logits, token_ids, strict=True):
        values = row.astype(np.float64)
        peak = values.max()
        values -= peak + np.log(np.exp(values - peak).sum())
        top = _top_k_ids(values, min(num_top, len(values))) if num_top else np.empty(0, dtype=np.int64)
        top = top[np.argsort(-values[top], kind="stable")]
        entries.append(
            PositionLogprobs(
                token_id=token_id,
                logprob=float(values[token_id]),
                top=tuple(TopLogprob(int(i), float(values[i])) for i in top),
            )
        )
    return tuple(entries)
