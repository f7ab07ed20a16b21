from __future__ import annotations

from gateway.speculation.bucket import Bucket
from gateway.speculation.records import ControllerLimits
from gateway.speculation.request_view import RequestView


def test_a_suspension_holds_until_the_bucket_is_turned_on_again():
    limits = ControllerLimits()
    view, bucket = RequestView(limits, serial=1), Bucket(limits, batch=1, context_class=0)
    assert not view.is_suspended_in(bucket)
    bucket.on_tick, view.suspended_tick = 3, 4
    assert view.is_suspended_in(bucket)
    bucket.on_tick = 5
    assert not view.is_suspended_in(bucket)
    bucket.on_tick = 0  # never turned on
    assert not view.is_suspended_in(bucket)
