from __future__ import annotations

import pytest

from gateway.speculation.bucket import Bucket
from gateway.speculation.records import ControllerLimits

LIMITS = ControllerLimits()


def bucket(batch: int = 1, *, plain_s: float | None = 0.010) -> Bucket:
    made = Bucket(LIMITS, batch=batch, context_class=0)
    if plain_s is not None:
        for _ in range(LIMITS.base_rounds + 1):
            used = made.learn_cost(0, plain_s)
            if used is not None:
                made.learn_plain(used)
    return made


def on(batch: int = 1) -> Bucket:
    made = bucket(batch)
    made.gate.state = "ON"
    made.turn_on()
    return made


def test_the_first_sample_of_a_shape_and_stalls_count_for_nothing():
    made = bucket()
    assert made.learn_cost(3, 9.0) is None
    for _ in range(3):
        assert made.learn_cost(3, 0.02) == 0.02
    assert made.learn_cost(3, 1.0) is None


def test_the_baseline_takes_eight_rounds():
    made = bucket(plain_s=None)
    assert made.plain_s is None
    for _ in range(8):
        made.learn_cost(0, 0.01)
        made.learn_plain(0.01)
    assert made.has_baseline()
    assert not bucket(plain_s=None).has_baseline()


def test_probe_verdicts():
    def probe(tokens: float, rounds: int, batch: int = 1) -> bool | None:
        made = bucket(batch)
        made.gate.state = "PROBE"
        made.start_probe(3)
        for _ in range(rounds):
            made.learn_spec(tokens, 0.020, now_s=0.0)
        return made.probe_verdict()

    assert probe(4.0, 3) is None
    assert probe(4.0, 4) is True
    assert probe(1.0, 4) is False
    assert probe(2.2, 4) is None
    assert probe(2.2, 16) is True
    assert probe(2.02, 16) is False
    assert probe(1.5, 15) is None or probe(1.5, 15) is False


def test_a_probe_ends_at_its_allowed_loss():
    made = bucket()
    made.gate.state = "PROBE"
    made.start_probe(3)
    for _ in range(4):
        made.learn_spec(1.7, 0.040, now_s=0.0)
    assert made.probe_rate.lost_tokens(0.010) > LIMITS.probe_loss_tokens
    assert made.probe_verdict() is False


def test_without_a_baseline_a_probe_decides_nothing():
    made = bucket(plain_s=None)
    made.gate.state = "PROBE"
    made.start_probe(3)
    for _ in range(5):
        made.learn_spec(4.0, 0.020, now_s=0.0)
    assert made.probe_verdict() is None


def test_on_ends_when_the_loss_exceeds_what_is_allowed():
    made = on()
    rounds = 0
    while made.gate.state == "ON":
        made.learn_spec(1.0, 0.030, now_s=5.0)
        rounds += 1
    assert rounds == LIMITS.bucket_loss_tokens / 2 + 1
    assert (made.gate.state, made.gate.since_s, made.lookout.doubts) == ("OFF", 5.0, 1)
    made.learn_spec(1.0, 0.030, now_s=6.0)
    assert made.gate.state == "OFF"


def test_a_stretch_that_paid_leaves_no_doubt():
    made = on()
    for _ in range(100):
        made.learn_spec(3.0, 0.020, now_s=0.0)
    while made.gate.state == "ON":
        made.learn_spec(1.0, 0.030, now_s=0.0)
    assert made.lookout.doubts == 0


def test_after_a_failure_the_next_stretch_is_on_probation():
    made = on()
    while made.gate.state == "ON":
        made.learn_spec(1.0, 0.030, now_s=0.0)
    made.gate.state = "ON"
    made.turn_on()
    assert made.meter.loss_s == pytest.approx(0.5 * LIMITS.bucket_loss_tokens * 0.010)


def test_on_without_a_baseline_gains_and_loses_nothing():
    made = bucket(plain_s=None)
    made.gate.state = "ON"
    made.learn_spec(1.0, 0.030, now_s=0.0)
    made.charge(1.0, now_s=0.0)
    assert made.meter.loss_s == 0.0


def test_overhead_is_charged_to_speculation_in_every_state():
    made = on(batch=4)
    made.charge(0.040, now_s=0.0)
    assert made.meter.loss_s == pytest.approx(0.010)
    made.charge(9.0, now_s=0.0)
    assert made.gate.state == "OFF"
    made.gate.state = "PROBE"
    made.start_probe(3)
    made.learn_spec(2.0, 0.010, now_s=0.0)
    made.charge(0.040, now_s=0.0)
    assert made.probe_rate.tok_per_s == pytest.approx(2.0 / 0.020)


def test_the_baseline_is_refreshed_now_and_then_unless_plain_rounds_come_anyway():
    made = on()
    for _ in range(LIMITS.refresh_tokens // 4 - 1):
        made.learn_spec(4.0, 0.020, now_s=0.0)
    assert made.refresh_left == 0
    made.learn_spec(4.0, 0.020, now_s=0.0)
    assert made.refresh_left == LIMITS.refresh_rounds
    made.tokens_since_refresh = 200.0
    made.learn_plain(0.010)
    assert made.tokens_since_refresh == 200 - 128


def test_changed_costs_ask_for_a_new_baseline():
    made = on()
    for _ in range(100):
        made.learn_cost(3, 0.020)
    assert made.refresh_left == 0
    for _ in range(12):
        made.learn_cost(3, 0.040)
    assert made.refresh_left > 0
    off = bucket()
    off.lookout.probe_in_tokens = 999.0
    for _ in range(60):
        off.learn_cost(0, 0.018)
    assert (off.refresh_left, off.lookout.probe_in_tokens) == (0, 128)


def test_exploring_takes_one_round_of_a_stream_or_three_of_each_of_a_batch():
    for batch, plans in ((1, 1), (4, 12)):
        made = on(batch)
        assert not made.may_explore()
        assert made.explores() == 0
        for _ in range(LIMITS.explore_every_rounds):
            made.learn_spec(4.0, 0.020, now_s=0.0)
        assert made.may_explore()
        made.start_exploring(5)
        assert [made.explores() for _ in range(plans + 1)] == [5] * plans + [0]


def test_exploring_becomes_rare_when_nothing_promises_or_much_is_known():
    for known in (0, 10):
        made = on()
        for _ in range(known):
            made.learn_cost(5, 0.02)
        made.start_exploring(5 if known else None)
        for _ in range(4 * LIMITS.explore_every_rounds - 1):
            made.learn_spec(4.0, 0.020, now_s=0.0)
        assert not made.may_explore()
        made.learn_spec(4.0, 0.020, now_s=0.0)
        assert made.may_explore()


def test_shadow_overhead_is_what_is_sure_of_it():
    assert bucket(plain_s=None).overhead_tokens == 0.0
    made = bucket()
    made.learn_shadow_overhead(0.002)
    assert made.overhead_tokens == 0.0
    for _ in range(200):
        made.learn_shadow_overhead(0.002)
    assert made.overhead_tokens == pytest.approx(0.2, abs=0.02)
    for sign in (1, -1) * 200:
        made.learn_shadow_overhead(sign * 0.01)
    assert made.overhead_tokens == 0.0


def test_another_context_class_starts_from_what_is_known():
    old = on()
    old.probe_k = 5
    new = Bucket(LIMITS, batch=1, context_class=1)
    new.inherit(old, now_s=7.0)
    assert (new.gate.state, new.gate.since_s, new.probe_k, new.plain_s) == ("ON", 7.0, 5, pytest.approx(0.010))
    assert new.has_baseline()
    fresh = Bucket(LIMITS, batch=1, context_class=1)
    fresh.inherit(bucket(plain_s=None), now_s=7.0)
    assert fresh.gate.state == "BASE"


def test_the_outlook_is_a_mean_over_about_one_round_of_each_stream():
    single, four = bucket(), bucket(4)
    for made in (single, four):
        made.learn_outlook(2.0, 1.0)
    assert (single.outlook_gain, single.outlook_loss) == (2.0, 1.0)
    assert (four.outlook_gain, four.outlook_loss) == (0.5, 0.25)
    single.turn_off(has_paid=True)
    assert (single.outlook_gain, single.outlook_loss) == (0.0, 0.0)
