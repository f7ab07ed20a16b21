from __future__ import annotations

import random

from gateway.speculation.change_detection import PageHinkley


def rounds_until_alarm(test: PageHinkley, mean: float, limit: int) -> int:
    draw = random.Random(3)
    return next((n for n in range(1, limit + 1) if test.observe(draw.gauss(mean, 1.0))), limit + 1)


def test_a_shift_by_a_deviation_alarms_soon_up_and_down():
    for mean in (1.0, -1.0):
        assert rounds_until_alarm(PageHinkley(drift=0.3, threshold=15.0), mean, 200) < 60


def test_no_change_stays_silent():
    assert rounds_until_alarm(PageHinkley(drift=0.3, threshold=15.0), 0.0, 5000) > 5000


def test_one_wild_sample_is_clipped():
    test = PageHinkley(drift=0.3, threshold=15.0)
    assert not test.observe(1e9)
    assert not test.observe(-1e9)


def test_after_an_alarm_it_starts_over():
    test = PageHinkley(drift=0.0, threshold=3.5)
    assert [test.observe(2.0) for _ in range(4)] == [False, True, False, True]
