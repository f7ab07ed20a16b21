from __future__ import annotations

import pytest

from gateway.speculation.loss_meter import LossMeter


def test_losses_add_up_and_are_won_back_but_credit_is_not_kept():
    meter = LossMeter()
    for gain in (-2.0, -1.0, 5.0, -1.0):
        meter.add(gain)
    assert meter.loss_s == pytest.approx(1.0)
    assert meter.gain_s == pytest.approx(1.0)


def test_a_head_start_of_loss():
    meter = LossMeter()
    meter.add(-9.0)
    meter.start(loss_s=3.0)
    meter.add(-1.0)
    assert (meter.loss_s, meter.gain_s) == (4.0, -1.0)
