from __future__ import annotations

from gateway.speculation.acceptance_estimate import AcceptanceEstimate
from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.records import ControllerLimits

LIMITS = ControllerLimits()


def request() -> AcceptanceEstimate:
    return AcceptanceEstimate(half_life_rounds=20, max_draft_tokens=LIMITS.candidates[-1])


def feed(pool: AcceptancePool, own: AcceptanceEstimate, accepted: int, rounds: int) -> int:
    return sum(pool.observe(own, num_draft_tokens=3, num_accepted_tokens=accepted, is_cut=False) for _ in range(rounds))


def test_a_new_request_starts_from_what_the_others_showed():
    pool = AcceptancePool(LIMITS)
    feed(pool, request(), 3, 50)
    assert pool.request_rates(request())[0] > 0.95


def test_a_request_of_its_own_kind_leaves_the_pool_soon():
    pool, own = AcceptancePool(LIMITS), request()
    feed(pool, request(), 3, 200)
    feed(pool, own, 0, 10)
    assert pool.request_rates(own)[0] < 0.55 < pool.rates[0]


def test_a_change_of_the_first_position_alarms_and_shrinks_the_memory():
    pool = AcceptancePool(LIMITS)
    feed(pool, request(), 3, 300)
    assert feed(pool, request(), 0, 12) >= 1
    assert pool.rates[0] < 0.9
    feed(pool, request(), 0, 40)
    assert pool.rates[0] < 0.3


def test_a_cut_before_the_first_token_judges_nothing():
    pool = AcceptancePool(LIMITS)
    before = list(pool.rates)
    assert not pool.observe(request(), num_draft_tokens=3, num_accepted_tokens=0, is_cut=True)
    assert pool.rates == before
