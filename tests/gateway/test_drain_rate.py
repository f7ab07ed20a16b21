from __future__ import annotations

import pytest

from gateway.drain_rate import DrainRate


def test_nothing_measured_gives_the_default() -> None:
    rate = DrainRate(default_wait_s=7.0)
    assert rate.wait_s(3, 100.0) == 7.0
    rate.observe(1, 100.0)
    assert (rate.rate_per_s(100.5), rate.wait_s(3, 100.5)) == (None, 7.0)


@pytest.mark.parametrize("num_seconds", [5, 30, 300])
def test_a_steady_stream_is_measured_from_the_start(num_seconds: int) -> None:
    rate = DrainRate()
    for step in range(num_seconds * 4):
        rate.observe(1, 10.0 + step / 4)
    assert rate.rate_per_s(10.0 + num_seconds) == pytest.approx(4.0, rel=0.1)
    assert rate.wait_s(40, 10.0 + num_seconds) == pytest.approx(10.0, rel=0.1)


def test_the_rate_follows_a_change_and_the_wait_is_bounded() -> None:
    rate = DrainRate()
    for step in range(200):
        rate.observe(2, float(step))
    assert rate.wait_s(1, 200.0) == 1.0
    assert rate.wait_s(1, 400.0) > 10.0
    assert rate.wait_s(1, 10_000.0) == 60.0
    assert rate.wait_s(1, 1e9) == 60.0
