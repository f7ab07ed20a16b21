"""Exactness of drawing from lists: same as drawing from the whole row, and distributed as the target."""

from __future__ import annotations

import numpy as np
import pytest

from verifier.sglang.sampling import Chosen, Open, choose, num_listed_for, tail_bounds, unverifiable
from wire.noise import gumbel_noise
from wire.sampling import Grammar, SamplingParams

VOCAB_SIZE = 40


def row(seed: int, scale: float = 2.0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(0.0, scale, VOCAB_SIZE)
    return values - np.log(np.exp(values).sum())


def listed(logprobs: np.ndarray, num: int) -> list[tuple[int, float]]:
    order = np.argsort(-logprobs, kind="stable")[:num]
    return [(int(i), float(logprobs[i])) for i in order]


def reference_probs(logprobs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The target's distribution by SGLang's own steps: temperature, joint top_k and top_p, min_p."""
    probs = np.exp(logprobs / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    ranked = probs[order].copy()
    cumulated = np.cumsum(ranked)
    keep = (cumulated - ranked) <= params.top_p
    if params.top_k:
        keep &= np.arange(VOCAB_SIZE) < params.top_k
    keep &= ranked >= ranked[0] * params.min_p
    ranked[~keep] = 0.0
    result = np.zeros(VOCAB_SIZE)
    result[order] = ranked / ranked.sum()
    return result


def drawn(logprobs: np.ndarray, params: SamplingParams, position: int, num: int) -> tuple[int, bool]:
    """The id, and whether the whole row was needed."""
    common = {"position": position, "vocab_size": VOCAB_SIZE, "num_listed": num}
    choice = choose(listed(logprobs, num), params, is_whole=False, **common)
    if isinstance(choice, Chosen):
        return choice.token_id, False
    choice = choose(listed(logprobs, VOCAB_SIZE), params, is_whole=True, **common)
    assert isinstance(choice, Chosen)
    return choice.token_id, True


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=6),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.6),
    SamplingParams(temperature=0.8, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=8, top_p=0.7, min_p=0.05),
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: f"T{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_distribution_is_the_targets(params: SamplingParams) -> None:
    logprobs = row(3)
    expected = reference_probs(logprobs, params)
    num_draws = 1500
    counts = np.zeros(VOCAB_SIZE)
    for position in range(num_draws):
        token_id, _ = drawn(logprobs, params, position, 10)
        counts[token_id] += 1
    assert counts[expected == 0.0].sum() == 0
    big = expected * num_draws >= 5
    observed = [*counts[big], counts[~big].sum()]
    wanted = [*(expected[big] * num_draws), expected[~big].sum() * num_draws]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, wanted, strict=True) if e > 0)
    freedom = len(observed) - 1
    assert chi2 < freedom + 4 * np.sqrt(2 * max(1, freedom)) + 4  # about four sigma


@pytest.mark.parametrize("params", CASES[2:], ids=lambda p: f"T{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
def test_filtered_draw_is_the_argmax_of_noise_over_the_kept_ids(params: SamplingParams) -> None:
    # CASES[:2] filter nothing: there the unlisted ids share one noise.
    for seed in range(60):
        logprobs = row(seed)
        kept = np.flatnonzero(reference_probs(logprobs, params))
        scores = logprobs[kept] / params.temperature + gumbel_noise(params.seed, seed, kept)
        assert drawn(logprobs, params, seed, 12)[0] == int(kept[int(scores.argmax())])


def test_the_list_mostly_suffices_where_it_holds_the_mass() -> None:
    params = SamplingParams(temperature=0.7)
    widened = sum(drawn(row(seed, 4.0), params, seed, 20)[1] for seed in range(300))
    assert widened < 10


def test_tail_bounds_hold() -> None:
    for seed in range(50):
        logprobs = np.sort(row(seed))[::-1]
        for temperature in (0.5, 0.7, 1.0, 1.4):
            low, high = tail_bounds(logprobs[:8], temperature, VOCAB_SIZE)
            true = float(np.log(np.exp((logprobs[8:] - logprobs[0]) / temperature).sum()))
            assert low - 1e-9 <= true <= high + 1e-9


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-3])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p)
    for seed in range(20):
        logprobs = row(seed)
        assert drawn(logprobs, params, seed, 8) == (int(logprobs.argmax()), False)


def test_greedy_is_the_first_and_asks_for_one() -> None:
    params = SamplingParams(temperature=0.0)
    choice = choose([(5, -0.1)], params, position=3, vocab_size=VOCAB_SIZE, num_listed=1, is_whole=False)
    assert choice == Chosen(5)
    assert num_listed_for(params, top_logprobs_num=64, num_logprobs=None) == 1
    assert num_listed_for(SamplingParams(top_k=100), top_logprobs_num=64, num_logprobs=5) == 100


def test_wide_nucleus_is_open() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.999)
    flat = np.full(VOCAB_SIZE, -np.log(VOCAB_SIZE))
    choice = choose(listed(flat, 5), params, position=0, vocab_size=VOCAB_SIZE, num_listed=5, is_whole=False)
    assert isinstance(choice, Open)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(temperature=0.0), None),
        (SamplingParams(), None),
        (SamplingParams(temperature=1.2), "temperature_above_1"),
        (SamplingParams(temperature=1.2, top_k=20), None),
        (SamplingParams(top_k=5000), "top_k_above_1024"),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), "repetition_penalty"),
        (SamplingParams(presence_penalty=0.1), "output_penalty"),
        (SamplingParams(frequency_penalty=0.1), "output_penalty"),
        (SamplingParams(logit_bias=((1, 1.0),)), "logit_bias"),
        (SamplingParams(min_new_tokens=3), "min_new_tokens"),
        (SamplingParams(temperature=0.0, grammar=Grammar(kind="regex", text="a+")), "grammar"),
    ],
)
def test_what_goes_plain(params: SamplingParams, reason: str | None) -> None:
    assert unverifiable(params) == reason


def test_three_filters_need_a_backend_that_applies_them_jointly() -> None:
    params = SamplingParams(top_k=5, top_p=0.9, min_p=0.1)
    assert unverifiable(params) is None
    assert unverifiable(params, filters_jointly=False) == "filter_order"
