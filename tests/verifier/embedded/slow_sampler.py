"""The documented sampling order in plain Python floats, one id at a time: nothing shared with the real sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from wire.noise import gumbel_noise
from wire.sampling import SamplingParams


def processed(
    logits: Sequence[float], params: SamplingParams, *, ids: Sequence[int], prompt_len: int
) -> dict[int, float]:
    """Logits of the ids that survive, after steps 1-8; ``ids`` is everything before the position drawn."""
    values = [float(x) for x in logits]
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    output = list(ids[prompt_len:])
    if len(output) < params.min_new_tokens:
        for token_id in params.eos_ids:
            values[token_id] = -math.inf
    for token_id in set(ids):
        if values[token_id] > 0:
            values[token_id] /= params.repetition_penalty
        else:
            values[token_id] *= params.repetition_penalty
    for token_id in set(output):
        values[token_id] -= params.frequency_penalty * output.count(token_id) + params.presence_penalty
    if params.temperature == 0:
        best = max(range(len(values)), key=lambda i: (values[i], -i))
        return {best: values[best]}
    kept = {i: value / params.temperature for i, value in enumerate(values)}
    ranked = sorted(kept, key=lambda i: (-kept[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(kept[i] - kept[ranked[0]]) for i in ranked)
        nucleus, mass = [], 0.0
        for i in ranked:
            if mass >= params.top_p * total:
                break
            nucleus.append(i)
            mass += math.exp(kept[i] - kept[ranked[0]])
        ranked = nucleus
    if params.min_p > 0:
        ranked = [i for i in ranked if math.exp(kept[i] - kept[ranked[0]]) >= params.min_p]
    return {i: kept[i] for i in sorted(ranked)}


def choose(logits: Sequence[float], params: SamplingParams, *, ids: Sequence[int], prompt_len: int) -> int:
    """The target's id at position len(ids)."""
    kept = processed(logits, params, ids=ids, prompt_len=prompt_len)
    if params.temperature == 0:
        return next(iter(kept))
    noise = gumbel_noise(params.seed, len(ids), np.arange(len(logits)))
    return max(kept, key=lambda i: (kept[i] + noise[i], -i))


def probabilities(
    logits: Sequence[float], params: SamplingParams, *, ids: Sequence[int], prompt_len: int
) -> np.ndarray:
    """[V], the distribution the id at position len(ids) is drawn from."""
    kept = processed(logits, params, ids=ids, prompt_len=prompt_len)
    result = np.zeros(len(logits))
    peak = max(kept.values())
    for i, value in kept.items():
        result[i] = math.exp(value - peak)
    return result / result.sum()
