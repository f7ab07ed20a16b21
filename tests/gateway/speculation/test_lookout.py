from __future__ import annotations

import pytest

from gateway.speculation.lookout import Lookout
from gateway.speculation.records import ControllerLimits

LIMITS = ControllerLimits()
PLAIN_S = 0.010


def plain_until(lookout: Lookout, gain_tokens: float | None = None) -> int:
    """Plain tokens until a probe is due."""
    for token in range(20_000):
        if lookout.is_probe_due(gain_tokens):
            return token
        lookout.count_plain(1, share=1.0)
    raise AssertionError("never")


def test_without_shadows_a_probe_is_due_after_the_back_off():
    assert plain_until(Lookout(LIMITS)) == LIMITS.probe_backoff_tokens
    assert plain_until(Lookout(LIMITS), -1.5) == LIMITS.probe_backoff_tokens


def test_the_back_off_doubles_with_each_failure_up_to_its_limit_and_success_resets_it():
    lookout = Lookout(LIMITS)
    waits = []
    for _ in range(6):
        lookout.start(has_paid=False)
        waits.append(plain_until(lookout))
    assert waits == [256, 512, 1024, 2048, 2048, 2048]
    lookout.start(has_paid=True)
    assert plain_until(lookout) == 128


def test_streams_of_a_batch_share_the_back_off():
    lookout = Lookout(LIMITS)
    for _ in range(8 * 128):
        lookout.count_plain(1, share=1 / 8)
    assert lookout.is_probe_due(None)


def test_a_belief_that_it_loses_delays_the_probe_until_its_loss_is_within_the_budget():
    lookout = Lookout(LIMITS)
    lookout.observe_shadow(1.0, round_s=0.025)
    # A probe loses 1 + 6 * 1.5 plain tokens.
    assert plain_until(lookout, -1.5) == pytest.approx(10 / LIMITS.probe_budget, rel=0.01)
    assert lookout.is_probe_due(0.5)


def test_changed_costs_bring_the_probe_near_whatever_is_believed():
    lookout = Lookout(LIMITS)
    for _ in range(5):
        lookout.start(has_paid=False)
    lookout.observe_shadow(1.0, round_s=0.025)
    lookout.costs_changed()
    assert plain_until(lookout, -1.5) == 128


def test_what_shadows_predict():
    lookout = Lookout(LIMITS)
    assert lookout.predicted(PLAIN_S) is None
    for _ in range(4):
        lookout.observe_shadow(2.5, round_s=0.025)
    assert lookout.predicted(PLAIN_S) == (pytest.approx(0.0), pytest.approx(0.25))
    assert lookout.num_shadows == 4
