"""From a list of the most likely ids at one position to one token id, exactly, in SGLang's own order of filters.

The engine tells the N most likely ids with their raw log-probabilities. What is exact from that alone:

    greedy            the first of the list
    top_k <= N        only relative weights matter
    top_p, min_p      when the boundary lies inside the list
    no filter         the ids outside the list are drawn against as one: the largest of their noises is one Gumbel
                      variable shifted by the logarithm of their mass. At temperature 1 that mass is known; at another
                      it lies between two bounds, and mostly even the larger one loses

Whatever stays open asks for the whole row (``Open``), and is then decided with the same noise: drawing again would
bias. A request whose outcome the list can never tell (penalties, bias) is not drafted; ``unverifiable`` says why.

Order of filters, as SGLang applies them: temperature, then top_k and top_p on the same unfiltered probabilities, then
min_p relative to the likeliest. Draws are argmax(logprob / T + Gumbel noise of (seed, position, id)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verifier.sglang.indexing import TopList
from wire.noise import gumbel_noise
from wire.sampling import SamplingParams

__all__ = ["Chosen", "Open", "choose", "num_listed_for", "unverifiable"]

_MAX_TOP_K = 1024
# Rounding of float32 log-probabilities; a boundary closer than this is not decided from the list.
_SLACK = 1e-5


@dataclass(frozen=True, slots=True)
class Chosen:
    """The target's id at this position."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Open:
    """The list does not tell; ask for the whole row."""


def unverifiable(params: SamplingParams, *, filters_jointly: bool = True, plugin_draws: bool = False) -> str | None:
    """Why no draft of such a request can be verified, from lists or by the plugin's draws, or None."""
    if plugin_draws:
        return "grammar" if params.grammar is not None else None
    if params.logit_bias:
        return "logit_bias"
    if params.repetition_penalty != 1.0:
        return "repetition_penalty"
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        return "output_penalty"
    if params.min_new_tokens > 0:
        return "min_new_tokens"
    if params.grammar is not None:
        return "grammar"
    if params.is_greedy:
        return None
    if params.top_k > _MAX_TOP_K:
        return "top_k_above_1024"
    if params.temperature > 1.0 and params.top_k == 0:
        return "temperature_above_1"
    if params.top_k and params.top_p < 1.0 and params.min_p > 0.0 and not filters_jointly:
        return "filter_order"
    return None


def num_listed_for(params: SamplingParams, *, top_logprobs_num: int, num_logprobs: int | None) -> int:
    """N to ask for."""
    wanted = 1 if params.is_greedy else max(top_logprobs_num, params.top_k)
    return max(wanted, num_logprobs or 0)


def choose(
    listed: TopList, params: SamplingParams, *, position: int, vocab_size: int, num_listed: int, is_whole: bool
) -> Chosen | Open:
    """The target's id at ``position``.

    Args:
        listed: the most likely ids, best first.
        num_listed: N of the first question about this position; fixes which ids count as the unlisted rest.
        is_whole: ``listed`` is the whole row; the answer is then never Open.
    """
    if params.is_greedy:
        return Chosen(listed[0][0])
    ids = np.array([token_id for token_id, _ in listed], dtype=np.int64)
    logprobs = np.array([logprob for _, logprob in listed])
    with np.errstate(over="ignore"):  # relative to the likeliest: a tiny temperature overflows to -inf only
        scaled = (logprobs - logprobs[0]) / params.temperature
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0:
        return _draw_unfiltered(ids, logprobs, scaled, params, position, vocab_size, num_listed, is_whole=is_whole)
    kept = _num_kept(logprobs, scaled, params, vocab_size, is_whole=is_whole)
    if kept is None:
        return Open()
    return Chosen(_draw(ids[:kept], scaled[:kept], params.seed, position))


def _draw(ids: npt.NDArray[np.int64], scaled: npt.NDArray[np.float64], seed: int, position: int) -> int:
    return int(ids[int((scaled + gumbel_noise(seed, position, ids)).argmax())])


def _num_kept(
    logprobs: npt.NDArray[np.float64],
    scaled: npt.NDArray[np.float64],
    params: SamplingParams,
    vocab_size: int,
    *,
    is_whole: bool,
) -> int | None:
    """How many of the list, from its start, survive the filters; None if that can't be told."""
    kept = len(logprobs)
    is_bounded = is_whole
    if params.top_k:
        kept, is_bounded = min(kept, params.top_k), is_bounded or kept >= params.top_k
    if params.min_p > 0.0:
        above = int((scaled >= scaled[0] + math.log(params.min_p)).sum())
        kept, is_bounded = min(kept, above), is_bounded or above < len(scaled)
    if params.top_p < 1.0:
        nucleus = _nucleus_len(logprobs, scaled, params, vocab_size, is_whole=is_whole)
        # An undecided nucleus is no matter where it surely reaches beyond what the other filters keep.
        if nucleus[0] != nucleus[1] and not (is_bounded and nucleus[0] >= kept):
            return None
        if nucleus[0] <= len(logprobs):
            kept, is_bounded = min(kept, nucleus[0]), True
    return max(1, kept) if is_bounded else None


def _nucleus_len(
    logprobs: npt.NDArray[np.float64],
    scaled: npt.NDArray[np.float64],
    params: SamplingParams,
    vocab_size: int,
    *,
    is_whole: bool,
) -> tuple[int, int]:
    """Least and largest number of ids in the top_p set; more than the list's length = reaches beyond it."""
    low, high = (-math.inf, -math.inf) if is_whole else tail_bounds(logprobs, params.temperature, vocab_size)
    weights = np.exp(scaled)
    before = np.cumsum(weights) - weights
    # An id is in while the mass before it is at most top_p of all; all = listed + tail.
    counts = [
        int((before <= params.top_p * (weights.sum() + math.exp(tail)) * (1.0 + slack)).sum())
        for tail, slack in ((low, -_SLACK), (high, _SLACK))
    ]
    if not is_whole:
        counts = [n + 1 if n == len(weights) else n for n in counts]
    elif counts[0] != counts[1]:
        counts[0] = counts[1]  # the whole row: within rounding, the wider set
    return counts[0], counts[1]


def tail_bounds(logprobs: npt.NDArray[np.float64], temperature: float, vocab_size: int) -> tuple[float, float]:
    """Bounds of the logarithm of the unlisted ids' weight at this temperature, relative to the likeliest id's.

    They follow from the total probability of the unlisted and from the smallest listed one, which none exceeds.
    """
    rest = max(0.0, 1.0 - float(np.exp(logprobs).sum()))
    num_rest = vocab_size - len(logprobs)
    if rest <= 0.0 or num_rest <= 0:
        return -math.inf, -math.inf
    best, last = float(logprobs[0]), float(logprobs[-1])
    # Concentrated: as many as possible as likely as the smallest listed id. Spread: all equally likely.
    concentrated = math.log(rest) - last + (last - best) / temperature
    spread = math.log(num_rest) + (math.log(rest / num_rest) - best) / temperature
    return min(spread, concentrated), max(spread, concentrated)


def _draw_unfiltered(
    ids: npt.NDArray[np.int64],
    logprobs: npt.NDArray[np.float64],
    scaled: npt.NDArray[np.float64],
    params: SamplingParams,
    position: int,
    vocab_size: int,
    num_listed: int,
    *,
    is_whole: bool,
) -> Chosen | Open:
    """Draw against the unlisted ids as one; its noise is keyed by the first id beyond the vocabulary."""
    inside = scaled[:num_listed] + gumbel_noise(params.seed, position, ids[:num_listed])
    best = int(inside.argmax())
    rest_noise = float(gumbel_noise(params.seed, position, np.array([vocab_size], dtype=np.int64))[0])
    if not is_whole:
        # The rest surely loses, or the row must be looked at: which id of the rest it is, the list can't tell anyway.
        _, most = tail_bounds(logprobs, params.temperature, vocab_size)
        return Chosen(int(ids[best])) if most + rest_noise <= inside[best] else Open()
    rest = scaled[num_listed:]
    if len(rest) == 0 or float(np.logaddexp.reduce(rest)) + rest_noise <= inside[best]:
        return Chosen(int(ids[best]))
    return Chosen(_draw(ids[num_listed:], rest, params.seed, position))
