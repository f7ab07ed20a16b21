"""Pick a draft id from logits: greedily, or with the target's own noise.

The target draws argmax(logits / T + noise) with noise keyed by (seed, position, target id). Adding the same noise here
makes the guess agree more often and can't change the output. Filters are applied to the draft's own distribution, and
only the most likely ids are looked at: an id outside them wins too rarely to pay for its noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from wire.noise import gumbel_noise
from wire.sampling import SamplingParams

__all__ = ["choose_draft_index"]

_MAX_CANDIDATES = 256


def choose_draft_index(
    logits: torch.Tensor,  # [draft vocab]
    *,
    sampling: SamplingParams,
    shared_noise: bool,
    position: int,
    target_ids: npt.NDArray[np.int64],  # [draft vocab]
) -> int:
    """Index in the draft vocabulary of the guess for the token at ``position`` (index in prompt + output)."""
    if sampling.is_greedy or not shared_noise:
        return int(logits.argmax())
    top = torch.topk(logits, min(_MAX_CANDIDATES, len(logits)))
    scaled = top.values.numpy().astype(np.float64) / sampling.temperature
    kept = _num_kept(scaled, sampling)
    indexes = top.indices.numpy()[:kept]
    noise = gumbel_noise(sampling.seed, position, target_ids[indexes])
    return int(indexes[np.argmax(scaled[:kept] + noise)])


def _num_kept(scaled: npt.NDArray[np.float64], sampling: SamplingParams) -> int:
    """How many of the candidates (best first) survive top_k, top_p and min_p."""
    kept = min(len(scaled), sampling.top_k or len(scaled))
    probs = np.exp(scaled[:kept] - scaled[0])
    if sampling.min_p > 0:
        kept = max(1, int(np.count_nonzero(probs >= sampling.min_p)))
    if sampling.top_p < 1:
        cumulative = np.cumsum(probs[:kept])
        kept = 1 + int(np.searchsorted(cumulative[:-1], sampling.top_p * cumulative[-1]))
    return kept
