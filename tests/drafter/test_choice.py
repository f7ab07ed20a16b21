"""Picking a draft id: greedy, shared noise, filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter.choice import choose_draft_index
from wire.noise import gumbel_noise
from wire.sampling import SamplingParams

IDS = np.arange(0, 2000, 2, dtype=np.int64)
LOGITS = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3


def choose(sampling: SamplingParams, *, position: int = 7) -> int:
    return choose_draft_index(LOGITS, sampling=sampling, position=position, target_ids=IDS)


def test_greedy_takes_the_best() -> None:
    assert choose(SamplingParams(temperature=0.0)) == int(LOGITS.argmax())


@pytest.mark.parametrize("position", range(40))
def test_noise_is_that_of_the_target_ids(position: int) -> None:
    noise = gumbel_noise(5, position, IDS)
    expected = int(np.argmax(LOGITS.double().numpy() / 0.7 + noise))
    assert choose(SamplingParams(temperature=0.7, seed=5), position=position) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=5.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
)
def test_filters_that_leave_one_id_leave_the_best(sampling: SamplingParams) -> None:
    assert choose(sampling) == int(LOGITS.argmax())


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_what_they_should(seed: int) -> None:
    order = LOGITS.argsort(descending=True).tolist()
    assert choose(SamplingParams(temperature=9.0, seed=seed, top_k=3)) in order[:3]
    probs = LOGITS.double().softmax(0)
    num_nucleus = int((probs[order].cumsum(0) < 0.5).sum()) + 1
    assert choose(SamplingParams(temperature=1.0, seed=seed, top_p=0.5)) in order[:num_nucleus]
    num_likely = int((probs >= 0.3 * probs.max()).sum())
    assert choose(SamplingParams(temperature=1.0, seed=seed, min_p=0.3)) in order[:num_likely]
