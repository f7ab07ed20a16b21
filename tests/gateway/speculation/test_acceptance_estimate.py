from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.speculation.acceptance_estimate import AcceptanceEstimate, expected_committed_tokens


def estimate(half_life: float = 1e9, positions: int = 3) -> AcceptanceEstimate:
    return AcceptanceEstimate(half_life_rounds=half_life, max_draft_tokens=positions)


def test_a_position_is_judged_only_where_the_round_reached_it():
    seen = estimate()
    seen.observe(num_draft_tokens=3, num_accepted_tokens=1, is_cut=False)
    seen.observe(num_draft_tokens=3, num_accepted_tokens=3, is_cut=False)
    assert seen.conditional_rates(prior=[0.0] * 3, prior_weight=1e-9) == pytest.approx([1.0, 0.5, 1.0])


def test_a_cut_round_says_nothing_about_the_position_after_the_accepted_ones():
    seen = estimate()
    seen.observe(num_draft_tokens=3, num_accepted_tokens=1, is_cut=True)
    assert seen.conditional_rates(prior=[0.5] * 3, prior_weight=1.0) == pytest.approx([0.75, 0.5, 0.5])


def test_drafts_beyond_the_tracked_positions_are_ignored():
    seen = estimate(positions=2)
    seen.observe(num_draft_tokens=5, num_accepted_tokens=5, is_cut=False)
    assert seen.conditional_rates(prior=[0.0] * 2, prior_weight=1e-9) == pytest.approx([1.0, 1.0])


def test_old_rounds_fade_by_half_in_a_half_life():
    seen = estimate(half_life=10)
    seen.observe(num_draft_tokens=1, num_accepted_tokens=1, is_cut=False)
    for _ in range(10):
        seen.observe(num_draft_tokens=0, num_accepted_tokens=0, is_cut=False)
    assert seen.weight == pytest.approx(0.5)


def test_shrinking_keeps_the_rates():
    seen = estimate()
    for accepted in (0, 1, 1, 1):
        seen.observe(num_draft_tokens=1, num_accepted_tokens=accepted, is_cut=False)
    for _ in range(20):
        seen.shrink(0.1)
    assert seen.weight == pytest.approx(4e-20)
    assert seen.conditional_rates(prior=[0.0] * 3, prior_weight=1e-30)[0] == pytest.approx(0.75)


def test_an_unreached_position_is_believed_to_be_like_the_one_before():
    seen = estimate()
    for _ in range(100):
        seen.observe(num_draft_tokens=1, num_accepted_tokens=1, is_cut=False)
    rates = seen.continued_rates(first=0.5, prior_weight=2.0)
    assert rates[0] == rates[1] == rates[2] == pytest.approx(101 / 102)


def test_no_position_at_all():
    assert estimate(positions=0).weight == 0.0


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 8))
def test_expected_tokens_lie_between_one_and_all(rates: list[float], k: int):
    assert 1.0 <= expected_committed_tokens(rates, k) <= 1 + min(k, len(rates))


def test_expected_tokens_of_a_geometric_head():
    assert expected_committed_tokens([0.5] * 4, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
