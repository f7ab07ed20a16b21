from __future__ import annotations

import math
import random

import pytest

from gateway.speculation.rate_estimate import RatioEstimate, log_speedup


def test_the_rate_is_the_ratio_of_sums_not_the_mean_of_ratios():
    rate = RatioEstimate(half_life_rounds=math.inf)
    rate.observe(1.0, 1.0)
    rate.observe(9.0, 3.0)
    assert rate.tok_per_s == pytest.approx(10 / 4)


def test_nothing_seen_gives_no_rate_and_no_certainty():
    rate = RatioEstimate(half_life_rounds=10)
    assert rate.tok_per_s is None
    assert rate.relative_variance == math.inf
    assert log_speedup(rate, rate) == (0.0, math.inf)


def test_the_variance_matches_the_scatter_of_many_runs():
    draw = random.Random(1)
    rates, variances = [], []
    for _ in range(400):
        rate = RatioEstimate(half_life_rounds=math.inf)
        for _ in range(50):
            rate.observe(draw.choice((1, 1, 2, 3, 5)), draw.lognormvariate(0, 0.3))
        rates.append(math.log(rate.tok_per_s or 1.0))
        variances.append(rate.relative_variance)
    mean = sum(rates) / len(rates)
    seen = sum((r - mean) ** 2 for r in rates) / (len(rates) - 1)
    assert sum(variances) / len(variances) == pytest.approx(seen, rel=0.15)


def test_a_decayed_rate_follows():
    rate = RatioEstimate(half_life_rounds=5)
    for _ in range(100):
        rate.observe(1.0, 1.0)
    for _ in range(20):
        rate.observe(2.0, 1.0)
    assert rate.tok_per_s == pytest.approx(2.0, rel=0.05)


def test_time_that_delivers_nothing_lowers_the_rate_without_counting_a_round():
    rate = RatioEstimate(half_life_rounds=math.inf)
    rate.observe(2.0, 1.0)
    rate.charge(1.0)
    assert rate.tok_per_s == pytest.approx(1.0)
    assert rate.count == 1


def test_shrinking_keeps_the_rate_and_widens_the_error():
    rate = RatioEstimate(half_life_rounds=math.inf)
    for tokens in (1, 2, 3, 1):
        rate.observe(tokens, 1.0)
    before_rate, before = rate.tok_per_s, rate.relative_variance
    rate.shrink(0.25)
    assert rate.tok_per_s == before_rate
    assert rate.relative_variance == pytest.approx(4 * before)


def test_memory_shrunk_to_nothing_is_uncertain_not_an_error():
    rate = RatioEstimate(half_life_rounds=math.inf)
    rate.observe(1.0, 1.0)
    rate.observe(1.0, 1.0)
    rate.shrink(1e-170)
    assert rate.relative_variance == math.inf


def test_speedup_has_a_floor_of_error_that_more_streams_lower():
    spec, plain = RatioEstimate(half_life_rounds=math.inf), RatioEstimate(half_life_rounds=math.inf)
    for _ in range(4):
        spec.observe(2.0, 1.0)
        plain.observe(1.0, 1.0)
    gain, error = log_speedup(spec, plain)
    assert (gain, error) == (pytest.approx(math.log(2)), pytest.approx(0.25))
    assert log_speedup(spec, plain, batch=4)[1] == pytest.approx(0.125)


def test_lost_tokens_against_plain():
    rate = RatioEstimate(half_life_rounds=math.inf)
    rate.observe(2.0, 30.0)
    assert rate.lost_tokens(10.0) == pytest.approx(1.0)
