from __future__ import annotations

import pytest

from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.bucket import Bucket
from gateway.speculation.planning import Planner
from gateway.speculation.records import ControllerLimits, RoundPlan
from gateway.speculation.request_view import RequestView

LIMITS = ControllerLimits()


class Desk:
    """A planner with one bucket and one request of a given acceptance."""

    def __init__(self, *, accepted: int = 3, batch: int = 1, costs: dict[int, float] | None = None) -> None:
        self.pool = AcceptancePool(LIMITS)
        self.planner = Planner(LIMITS, self.pool)
        self.bucket = Bucket(LIMITS, batch=batch, context_class=0)
        self.request = RequestView(LIMITS, serial=1)
        for _ in range(200):
            self.pool.observe(self.request.acceptance, num_draft_tokens=8, num_accepted_tokens=accepted, is_cut=False)
        for k, seconds in ({0: 0.010} if costs is None else costs).items():
            for _ in range(10):
                self.bucket.learn_cost(k, seconds)

    def plan(self, most: int = 100) -> RoundPlan:
        return self.planner.plan(self.bucket, self.request, most, 1.0)

    def on(self) -> Desk:
        self.bucket.gate.state = "ON"
        self.bucket.turn_on(1)
        return self


COSTS = {0: 0.010, 2: 0.018, 3: 0.020, 4: 0.022}


def test_base_is_plain():
    assert Desk().plan() == RoundPlan(num_draft_tokens=0, reason="base")


def test_a_probe_uses_its_k_within_the_limit():
    desk = Desk()
    desk.bucket.gate.state = "PROBE"
    desk.bucket.start_probe(6)
    assert desk.plan().num_draft_tokens == 6
    assert desk.plan(most=5).num_draft_tokens == 5
    desk.bucket.start_probe(8)
    assert desk.plan(most=7).num_draft_tokens == 6


def test_in_a_batch_a_probe_asks_no_more_of_a_request_than_its_share():
    desk = Desk(accepted=0, batch=4, costs=COSTS)
    desk.bucket.gate.state = "PROBE"
    desk.bucket.start_probe(4)
    desk.bucket.learn_spec(1.0, 0.02, now_s=0.0)
    assert desk.plan().num_draft_tokens == 1


def test_on_takes_the_k_with_the_greatest_rate():
    desk = Desk(accepted=3, costs=COSTS).on()
    assert desk.plan() == RoundPlan(num_draft_tokens=3, reason="pays")
    assert desk.plan(most=2).num_draft_tokens == 2


def test_on_without_a_measured_candidate_measures_the_probed_k():
    desk = Desk().on()
    assert desk.plan() == RoundPlan(num_draft_tokens=3, reason="measuring")


def test_on_measures_what_may_be_better_now_and_then():
    desk = Desk(accepted=8, costs={0: 0.010, 3: 0.020}).on()
    for _ in range(LIMITS.explore_every_rounds):
        desk.bucket.learn_spec(4.0, 0.02, now_s=0.0)
    assert [desk.plan().reason for _ in range(3)] == ["pays", "measuring", "pays"]


def test_a_refresh_is_plain():
    desk = Desk(costs=COSTS).on()
    desk.bucket.refresh_left = 1
    assert desk.plan().reason == "refresh"


def test_off_follows_the_stream_with_shadows_and_opens_a_probe_when_due():
    desk = Desk(accepted=8, costs=COSTS)
    desk.bucket.gate.state = "OFF"
    shadow = desk.plan()
    assert shadow == RoundPlan(num_draft_tokens=8, reason="below_break_even", is_shadow=True)
    assert desk.plan() == RoundPlan(num_draft_tokens=0, reason="below_break_even")
    desk.bucket.lookout.probe_in_tokens = 0.0
    assert desk.plan() == RoundPlan(num_draft_tokens=8, reason="probe")
    assert (desk.bucket.gate.state, desk.bucket.gate.reason) == ("PROBE", "probe due")


def test_one_shadow_at_a_time_of_a_request():
    desk = Desk(costs=COSTS)
    desk.bucket.gate.state = "OFF"
    desk.request.shadow_rounds_left = 3
    assert not desk.plan().is_shadow


def test_a_suspended_request_stays_plain_until_its_lookout_says_otherwise():
    desk = Desk(costs=COSTS).on()
    desk.request.suspended_tick = 2
    assert desk.plan().reason == "request_suspended"
    desk.request.lookout.probe_in_tokens = 0.0
    assert desk.plan().reason == "pays"
    assert desk.request.suspended_tick == 0
    assert desk.request.meter.loss_s == pytest.approx(0.5 * LIMITS.request_loss_tokens * 0.010)


def test_in_a_batch_a_hopeless_request_drafts_nothing():
    desk = Desk(accepted=0, batch=4, costs=COSTS).on()
    desk.bucket.learn_spec(3.0, 0.02, now_s=0.0)
    plan = desk.plan()
    assert plan.reason == "worth_less_than_batch_time"
    assert plan.is_shadow


def test_in_a_batch_without_a_slope_every_request_takes_the_best_k():
    desk = Desk(accepted=3, batch=4, costs={0: 0.010, 3: 0.020}).on()
    desk.bucket.learn_spec(3.0, 0.02, now_s=0.0)
    assert desk.plan().num_draft_tokens == 3


def test_what_to_probe_without_any_cost_is_the_default():
    desk = Desk(costs={})
    assert desk.planner.promising_k(desk.bucket, desk.request) == LIMITS.default_num_draft_tokens
    desk = Desk()
    assert desk.planner.unmeasured_that_pays(desk.bucket, desk.request) is None


def test_an_unmeasured_k_is_worth_a_probe_only_if_it_may_pay():
    good, bad = Desk(accepted=8, costs={0: 0.010, 3: 0.050}), Desk(accepted=1, costs={0: 0.010, 3: 0.050})
    assert good.planner.unmeasured_that_pays(good.bucket, good.request) == 8
    assert bad.planner.unmeasured_that_pays(bad.bucket, bad.request) is None
    known = Desk(accepted=3, costs=COSTS)
    assert known.planner.unmeasured_that_pays(known.bucket, known.request) is None
