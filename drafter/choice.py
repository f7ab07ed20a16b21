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

__all__ = ["MAX_CANDIDATES", "choose_candidate", "choose_draft_index"]

MAX_CANDIDATES = 256


def choose_draft_index(
    logits: torch.Tensor,  # [draft vocab], on the CPU
    *,
    sampling: SamplingParams,
    position: int,
    target_ids: npt.NDArray[np.int64],  # [draft vocab]
) -> int:
    """Index in the draft vocabulary of the guess for the token at ``position`` (index in prompt + output)."""
    if sampling.is_greedy:
        return int(logits.argmax())
    top = torch.topk(logits, min(MAX_CANDIDATES, len(logits)))
    indexes = top.indices.numpy()
    return int(
        indexes[
            choose_candidate(top.values.numpy(), sampling=sampling, position=position, target_ids=target_ids[indexes])
        ]
    )


def choose_candidate(
    logits: npt.NDArray[np.float32],  # [N], best first
    *,
    sampling: SamplingParams,
    position: int,
    target_ids: npt.NDArray[np.int64],  # [N]
) -> int:
    """Which of the most likely ids is the guess; the first one if greedy."""
    if sampling.is_greedy:
        return 0
    scaled = logits.astype(np.float64) / sampling.temperature
    kept = _num_kept(scaled, sampling)
    noise = gumbel_noise(sampling.seed, position, target_ids[:kept])
    return int(np.argmax(scaled[:kept] + noise))


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
