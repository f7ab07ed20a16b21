from __future__ import annotations

import pytest

from gateway.speculation.bucket import Bucket
from gateway.speculation.records import ControllerLimits
from gateway.speculation.report import bucket_report

LIMITS = ControllerLimits()
EXPECTED = {3: 1.875, 4: 1.9375}


def bucket(costs: dict[int, float]) -> Bucket:
    made = Bucket(LIMITS, batch=1, context_class=0)
    for k, seconds in costs.items():
        for _ in range(10):
            made.learn_cost(k, seconds)
    return made


def test_before_anything_is_measured_nothing_is_claimed():
    report = bucket_report(bucket({}), EXPECTED)
    assert (report.plain_s, report.speedup, report.speedup_se, report.acceptance_length) == (None, None, None, None)
    assert (report.break_even_length, report.break_even_lengths, report.next_probe_in_tokens) == (None, {}, None)


def test_break_even_without_a_baseline_is_unknown():
    report = bucket_report(bucket({3: 0.03}), EXPECTED)
    assert (report.break_even_length, report.acceptance_length) == (None, pytest.approx(1.875))


def test_while_on_it_shows_the_k_in_use_and_the_measured_speedup():
    made = bucket({0: 0.01, 3: 0.02, 4: 0.03})
    made.gate.state, made.chosen = "ON", 4
    for _ in range(20):
        made.learn_plain(0.01)
        made.spec_rate.observe(3.0, 0.02)
    report = bucket_report(made, EXPECTED)
    assert report.break_even_lengths == {3: pytest.approx(2.0), 4: pytest.approx(3.0)}
    assert (report.num_draft_tokens, report.break_even_length) == (4, pytest.approx(3.0))
    assert report.speedup == pytest.approx(1.5)
    assert report.speedup_se == pytest.approx(1.5 * 0.5 / 20**0.5)


def test_while_off_it_shows_what_shadows_predict_and_when_it_tries_again():
    made = bucket({0: 0.01, 3: 0.02})
    made.gate.state = "OFF"
    assert bucket_report(made, EXPECTED).speedup is None
    for _ in range(4):
        made.lookout.observe_shadow(1.0, round_s=0.02)
    report = bucket_report(made, EXPECTED)
    assert report.speedup == pytest.approx(0.5)
    assert report.next_probe_in_tokens == 128
    assert bucket_report(_off(bucket({})), EXPECTED).speedup is None


def _off(made: Bucket) -> Bucket:
    made.gate.state = "OFF"
    return made
