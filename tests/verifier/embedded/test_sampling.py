"""Every sampling parameter against a slow straightforward implementation, alone, combined and per draft position."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verifier.embedded import slow_sampler
from tests.verifier.embedded.sampling_strategies import any_params
from verifier.embedded.sampling import TokenSampler, position_logprobs
from wire.sampling import SamplingParams

VOCAB = 12
ids = st.lists(st.integers(0, VOCAB - 1), max_size=8)
params_strategy = any_params(VOCAB)


def _logits(seed: int, rows: int) -> np.ndarray:
    # Multiples of 1/8: sums and comparisons are exact in both implementations, and ties do happen.
    return (np.random.default_rng(seed).integers(-40, 40, (rows, VOCAB)) / 8).astype(np.float32)


@settings(max_examples=500)
@given(
    params=params_strategy,
    prompt=ids.filter(bool),
    output=ids,
    draft_ids=ids,
    seed=st.integers(0, 10**6),
)
def test_equals_the_slow_implementation_at_every_draft_position(
    params: SamplingParams, prompt: list[int], output: list[int], draft_ids: list[int], seed: int
) -> None:
    logits = _logits(seed, len(draft_ids) + 1)
    sampler = TokenSampler(params, vocab_size=VOCAB, prompt_len=len(prompt))
    committed = prompt + output
    got = sampler.choose(logits, committed, tuple(draft_ids))
    expected = [
        slow_sampler.choose(logits[i], params, ids=committed + draft_ids[:i], prompt_len=len(prompt))
        for i in range(len(draft_ids) + 1)
    ]
    assert got == expected


@settings(max_examples=150)
@given(params=params_strategy, data=st.data())
def test_a_whole_request_with_drafts_and_rollback_equals_fresh_samplers(
    params: SamplingParams, data: st.DataObject
) -> None:
    # One sampler lives through the request and counts as it goes; drafts must leave no trace.
    committed = [1, 2, 1]
    sampler = TokenSampler(params, vocab_size=VOCAB, prompt_len=3)
    for step in range(5):
        draft_ids = data.draw(ids)
        logits = _logits(step, len(draft_ids) + 1)
        got = sampler.choose(logits, committed, tuple(draft_ids))
        fresh = TokenSampler(params, vocab_size=VOCAB, prompt_len=3)
        assert got == fresh.choose(logits, committed, tuple(draft_ids))
        committed = committed + got[: data.draw(st.integers(1, len(got)))]
    # The gateway cut the last block (a stop string): fewer ids than were counted.
    shorter = committed[:4]
    logits = _logits(99, 1)
    assert sampler.choose(logits, shorter, ()) == TokenSampler(params, vocab_size=VOCAB, prompt_len=3).choose(
        logits, shorter, ()
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.4, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.3),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.4, logit_bias=((3, 1.0),)),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "all filters", "penalties"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    logits, context, n = np.linspace(-1.5, 1.5, VOCAB, dtype=np.float32)[None], [3, 4, 11, 11], 6000
    counts = np.zeros(VOCAB)
    for seed in range(n):
        seeded = SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})
        counts[TokenSampler(seeded, vocab_size=VOCAB, prompt_len=2).choose(logits, context, ())[0]] += 1
    expected = slow_sampler.probabilities(logits[0], params, ids=context, prompt_len=2) * n
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    degrees = kept.sum() - 1
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3


def test_a_tie_in_greedy_goes_to_the_lowest_id() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [4, 7]] = 2.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, logit_bias=((1, -1.0),))):
        assert TokenSampler(params, vocab_size=VOCAB, prompt_len=1).choose(logits, [1], ()) == [4]


def test_the_noise_belongs_to_the_position_not_to_the_call() -> None:
    params = SamplingParams(seed=5)
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    together = TokenSampler(params, vocab_size=VOCAB, prompt_len=1).choose(logits, [1], (2, 3))
    one_by_one = [
        TokenSampler(params, vocab_size=VOCAB, prompt_len=1).choose(logits[:1], [1, 2, 3][: i + 1], ())[0]
        for i in range(3)
    ]
    assert together == one_by_one
    assert len(set(together)) > 1


def test_the_callers_arrays_are_not_changed() -> None:
    logits, committed = _logits(1, 3), [1, 2, 3]
    before = logits.copy()
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((1, 5.0),), top_p=0.5, seed=1)
    TokenSampler(params, vocab_size=VOCAB, prompt_len=1).choose(logits, committed, (4, 5))
    assert (logits == before).all()
    assert committed == [1, 2, 3]


EXTREMES = {
    "tiny temperature": {"temperature": 1e-308},
    "small temperature": {"temperature": 1e-30},
    "tiny repetition penalty": {"repetition_penalty": 1e-308},
    "both": {"temperature": 1e-308, "repetition_penalty": 1e-308},
    "everything held back": {"min_new_tokens": 3, "eos_ids": tuple(range(VOCAB - 1))},
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.5, "min_p": 0.5}])
@pytest.mark.parametrize("extreme", EXTREMES.values(), ids=EXTREMES.keys())
def test_legal_but_extreme_numbers_end_and_keep_the_order(
    extreme: dict[str, object], filters: dict[str, float]
) -> None:
    # The edge accepts any temperature in [0, 2] and any repetition penalty above 0.
    logits = np.linspace(-5, 20, VOCAB, dtype=np.float32)[None]
    params = SamplingParams(**extreme, **filters)
    chosen = TokenSampler(params, vocab_size=VOCAB, prompt_len=2).choose(logits, [VOCAB - 1, 0], ())
    assert chosen == [VOCAB - 1]


# ---------------------------------------------------------------- log-probabilities


@given(seed=st.integers(0, 1000), rows=st.integers(1, 4), num_top=st.integers(0, 15))
def test_logprobs_equal_log_softmax(seed: int, rows: int, num_top: int) -> None:
    logits = _logits(seed, rows)
    token_ids = [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, rows)]
    entries = position_logprobs(logits, token_ids, num_top)
    assert len(entries) == rows
    for row, token_id, entry in zip(logits, token_ids, entries, strict=True):
        values = [float(x) for x in row]
        total = math.log(math.fsum(math.exp(x) for x in values))
        expected = [x - total for x in values]
        ranked = sorted(range(VOCAB), key=lambda i: (-values[i], i))[:num_top]
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-12)
        assert [top.token_id for top in entry.top] == ranked
        assert [top.logprob for top in entry.top] == pytest.approx([expected[i] for i in ranked], abs=1e-12)


def test_logprobs_of_huge_logits_are_finite() -> None:
    logits = np.array([[1e30, -1e30, 0.0]], dtype=np.float32)
    entry = position_logprobs(logits, [0], 2)[0]
    assert entry.logprob == 0.0
    assert all(math.isfinite(top.logprob) for top in entry.top)
