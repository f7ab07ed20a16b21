from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.speculation.acceptance_pool import LEVELS, AcceptanceBelief, AcceptancePool
from gateway.speculation.records import ControllerLimits

LIMITS = ControllerLimits()


def feed(pool: AcceptancePool, belief: AcceptanceBelief, accepted: int, rounds: int, *, k: int = 3) -> None:
    for _ in range(rounds):
        pool.observe(belief, num_draft_tokens=k, num_accepted_tokens=accepted, is_cut=False)
        pool.pass_tokens(belief, accepted + 1)


def mean(shares: list[float]) -> float:
    return sum(share * level for share, level in zip(shares, LEVELS, strict=True))


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.booleans(), st.floats(1, 500)), max_size=30))
def test_a_belief_is_always_a_distribution(rounds: list[tuple[int, int, bool, float]]):
    pool = AcceptancePool(LIMITS)
    belief = pool.new_belief()
    for drafted, accepted, is_cut, tokens in rounds:
        pool.observe(belief, num_draft_tokens=drafted, num_accepted_tokens=min(accepted, drafted), is_cut=is_cut)
        pool.pass_tokens(belief, tokens)
        assert sum(belief.shares) == pytest.approx(1.0)
        assert sum(pool.mixture) == pytest.approx(1.0)
        assert min(belief.shares) > 0.0


def test_a_round_weighs_each_level_by_its_likelihood():
    pool = AcceptancePool(LIMITS)
    belief = pool.new_belief()
    pool.observe(belief, num_draft_tokens=3, num_accepted_tokens=1, is_cut=False)
    weights = [level * (1.0 - level) for level in LEVELS]
    assert belief.shares == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-6)


def test_a_cut_round_says_nothing_of_the_draft_after_it():
    pool = AcceptancePool(LIMITS)
    belief = pool.new_belief()
    before = list(belief.shares)
    pool.observe(belief, num_draft_tokens=3, num_accepted_tokens=0, is_cut=True)
    assert belief.shares == pytest.approx(before)


def test_a_text_that_jumps_to_a_level_seen_before_is_recognised_within_a_few_rounds():
    pool = AcceptancePool(LIMITS)
    belief, draw = pool.new_belief(), random.Random(1)

    def text(rate: float, tokens: int) -> None:
        while tokens > 0:
            accepted = 0
            while accepted < 4 and draw.random() < rate:
                accepted += 1
            pool.observe(belief, num_draft_tokens=4, num_accepted_tokens=accepted, is_cut=False)
            pool.pass_tokens(belief, accepted + 1)
            tokens -= accepted + 1

    for _ in range(5):
        text(0.8, 500)
        text(0.2, 150)
    assert mean(belief.shares) < 0.35
    feed(pool, belief, 4, 3, k=4)
    assert mean(belief.shares) > 0.6
    text(0.8, 300)
    feed(pool, belief, 0, 6, k=4)
    assert mean(belief.shares) < 0.4


def test_unseen_tokens_bring_a_belief_back_to_the_mixture():
    pool = AcceptancePool(LIMITS)
    belief = pool.new_belief()
    feed(pool, belief, 3, 20)
    sure = mean(belief.shares)
    pool.pass_tokens(belief, 1.0 / LIMITS.hazard_per_token)
    assert mean(pool.mixture) < mean(belief.shares) < sure
    pool.pass_tokens(belief, 1e4)
    assert belief.shares == pytest.approx(pool.mixture, abs=1e-6)


def test_a_new_request_starts_from_what_the_others_showed():
    pool = AcceptancePool(LIMITS)
    feed(pool, pool.new_belief(), 3, 300)
    assert mean(pool.new_belief().shares) > 0.8
    pool.forget()
    assert 0.5 < mean(pool.new_belief().shares) < 0.9


def test_expected_tokens_are_those_of_the_levels():
    pool = AcceptancePool(LIMITS)
    certain = [1.0 if level == 0.75 else 0.0 for level in LEVELS]
    expected = pool.expected_tokens(certain)
    assert expected == pytest.approx([sum(0.75**i for i in range(k + 1)) for k in LIMITS.candidates])
    gain, loss = pool.prospect(certain, 3, 2.0)
    assert (gain, loss) == (pytest.approx(expected[3] - 2.0), 0.0)
    gain, loss = pool.prospect(certain, 3, 4.0)
    assert (gain, loss) == (0.0, pytest.approx(4.0 - expected[3]))


def test_drafts_that_get_worse_further_out_are_learnt_as_a_curve():
    pool, draw = AcceptancePool(LIMITS), random.Random(3)
    belief = pool.new_belief()
    for _ in range(3000):
        accepted = 0
        while accepted < 8 and draw.random() < (0.8 if accepted < 2 else 0.5):
            accepted += 1
        pool.observe(belief, num_draft_tokens=8, num_accepted_tokens=accepted, is_cut=False)
        pool.pass_tokens(belief, accepted + 1)
    assert pool.curve[0] == 1.0
    assert pool.curve[1] == pytest.approx(1.0, abs=0.1)
    assert pool.curve[3] < 0.8
    true = 1 + 0.8 + 0.64 + 0.32 + 0.16
    assert pool.expected_tokens(pool.mixture)[3] == pytest.approx(true, rel=0.08)
