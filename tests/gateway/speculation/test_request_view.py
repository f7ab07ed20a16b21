from __future__ import annotations

from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.records import ControllerLimits
from gateway.speculation.request_view import RequestView


def test_a_new_request_may_speculate_and_believes_what_the_others_showed():
    limits = ControllerLimits()
    pool = AcceptancePool(limits)
    view = RequestView(limits, pool.new_belief(), serial=7)
    assert (view.serial, view.is_suspended, view.belief.shares) == (7, False, pool.mixture)
