from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.speculation.choose_k import (
    choose_for_batch,
    choose_num_draft_tokens,
    promising_num_draft_tokens,
)
from tests.gateway.speculation.test_costs import table

CANDIDATES = (1, 2, 3, 4, 5, 6, 8)


def expected_by_candidate(rates: list[float], candidates: tuple[int, ...]) -> list[float]:
    """E(K) = 1 + sum over i <= K of P(first i drafts accepted)."""
    return [1.0 + sum(math.prod(rates[:i]) for i in range(1, k + 1)) for k in candidates]


def test_the_far_end_of_a_step_is_found():
    costs = table({0: 1.0, 1: 1.0, 2: 2.0, 8: 2.0}, samples=200)
    expected = expected_by_candidate([0.9] * 8, CANDIDATES)
    choice = choose_num_draft_tokens(costs, expected, CANDIDATES, current=0)
    assert choice is not None
    assert choice.num_draft_tokens == 8
    assert choice.tok_per_s == pytest.approx(expected[-1] / 2.0)


def test_nothing_measured_is_no_choice():
    costs = table({0: 1.0})
    costs.cell(3).observe(1.0)
    costs.cell(3).observe(1.0)
    assert choose_num_draft_tokens(costs, [1.5] * 7, CANDIDATES, current=0) is None


def test_candidates_beyond_the_limit_are_left_out():
    costs = table({0: 1.0, 1: 1.0, 8: 1.0})
    choice = choose_num_draft_tokens(costs, [1.9], CANDIDATES, current=0)
    assert choice is not None
    assert choice.num_draft_tokens == 1


def test_near_ties_keep_the_k_in_use():
    costs = table({3: 1.0, 4: 1.0}, samples=300)
    expected = [1.0, 1.0, 2.0, 2.005, 1.0, 1.0, 1.0]
    for current in (3, 4):
        choice = choose_num_draft_tokens(costs, expected, CANDIDATES, current=current)
        assert choice is not None
        assert choice.num_draft_tokens == current


def test_another_k_must_win_by_its_standard_error():
    costs = table({3: 1.0}, samples=300)
    for _ in range(4):
        costs.cell(4).observe(1.0)
    choice = choose_num_draft_tokens(costs, [1.0, 1.0, 2.0, 2.1], CANDIDATES, current=3)
    assert choice is not None
    assert choice.num_draft_tokens == 3


def test_in_a_batch_a_bad_text_drafts_nothing_and_a_good_one_much():
    bad = expected_by_candidate([0.15] * 8, CANDIDATES)
    good = expected_by_candidate([0.9] * 8, CANDIDATES)
    assert choose_for_batch(bad, CANDIDATES, tokens_per_draft=0.2, current=3) == 0
    assert choose_for_batch(good, CANDIDATES, tokens_per_draft=0.2, current=0) == 8
    assert choose_for_batch(good, CANDIDATES, tokens_per_draft=0.2, current=8) == 8
    assert choose_for_batch(bad, CANDIDATES, tokens_per_draft=0.145, current=0) == 0


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.9))
def test_the_batch_rule_adds_drafts_while_survival_exceeds_their_price(rate: float, price: float):
    expected = expected_by_candidate([rate] * 8, tuple(range(1, 9)))
    k = choose_for_batch(expected, tuple(range(1, 9)), tokens_per_draft=price, current=-1)
    assert k == 0 or rate**k > price
    assert k == 8 or rate ** (k + 1) <= price * 1.0000001


def test_what_is_promising_is_the_best_of_low_costs_but_not_the_k_in_use():
    expected = expected_by_candidate([0.8] * 8, CANDIDATES)
    costs = table({0: 1.0, 3: 2.0}, samples=300)
    assert promising_num_draft_tokens(costs.low_seconds, expected, CANDIDATES, above_tok_per_s=0.0, current=3) == 8
    assert promising_num_draft_tokens(costs.low_seconds, expected, CANDIDATES, above_tok_per_s=9.9, current=3) is None
    assert promising_num_draft_tokens(lambda _k: None, expected, CANDIDATES, above_tok_per_s=0.0, current=0) is None
