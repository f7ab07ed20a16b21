from __future__ import annotations

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
        self.request = RequestView(LIMITS, self.pool.new_belief(), serial=1)
        self.text(accepted, 200)
        for k, seconds in ({0: 0.010} if costs is None else costs).items():
            for _ in range(10):
                self.bucket.learn_cost(k, seconds)

    def text(self, accepted: int, rounds: int) -> None:
        """The request's drafts are accepted so far."""
        for _ in range(rounds):
            self.pool.observe(self.request.belief, num_draft_tokens=8, num_accepted_tokens=accepted, is_cut=False)
            self.pool.pass_tokens(self.request.belief, accepted + 1)

    def plan(self, most: int = 100) -> RoundPlan:
        return self.planner.plan(self.bucket, self.request, most, 1.0)

    def on(self) -> Desk:
        self.bucket.gate.state = "ON"
        self.bucket.turn_on()
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
    desk = Desk(accepted=0, costs=COSTS)
    desk.bucket.gate.state = "OFF"
    shadow = desk.plan()
    assert shadow == RoundPlan(num_draft_tokens=LIMITS.shadow_k, reason="below_break_even", is_shadow=True)
    assert desk.plan() == RoundPlan(num_draft_tokens=0, reason="below_break_even")
    desk.bucket.lookout.probe_in_tokens = 0.0
    assert desk.plan().reason == "probe"
    assert (desk.bucket.gate.state, desk.bucket.gate.reason) == ("PROBE", "probe due")


def test_off_ends_when_shadows_say_that_it_pays():
    desk = Desk(accepted=8, costs=COSTS)
    desk.bucket.gate.state = "OFF"
    assert desk.plan().reason == "below_break_even"
    desk.bucket.lookout.observe_shadow(4.0, round_s=0.02)
    assert desk.plan() == RoundPlan(num_draft_tokens=8, reason="probe")
    assert (desk.bucket.gate.state, desk.bucket.gate.reason) == ("PROBE", "shadow pays")


def test_after_failures_more_must_be_promised():
    for doubts, state in ((0, "PROBE"), (2, "OFF")):
        desk = Desk(costs={0: 0.010, 3: 0.033, 8: 0.060})  # E(3) is 3.7 at this text
        desk.bucket.gate.state = "OFF"
        desk.bucket.lookout.doubts = doubts
        desk.bucket.lookout.observe_shadow(4.0, round_s=0.02)
        desk.plan()
        assert desk.bucket.gate.state == state


def test_off_without_any_cost_probes_the_default():
    desk = Desk(costs={0: 0.010})
    desk.bucket.gate.state = "OFF"
    assert desk.plan().is_shadow
    desk.bucket.lookout.probe_in_tokens = 0.0
    assert desk.plan() == RoundPlan(num_draft_tokens=LIMITS.default_num_draft_tokens, reason="probe")


def test_one_shadow_at_a_time_of_a_request():
    desk = Desk(accepted=0, costs=COSTS)
    desk.bucket.gate.state = "OFF"
    desk.request.shadow_rounds_left = 3
    assert not desk.plan().is_shadow


def test_a_request_whose_text_turns_bad_goes_plain_alone_and_returns_when_it_is_good_again():
    desk = Desk(costs=COSTS).on()
    assert desk.plan().reason == "pays"
    desk.text(0, 8)
    first = desk.plan()
    assert (first.reason, first.is_shadow, desk.bucket.num_suspensions) == ("request_suspended", True, 1)
    assert desk.plan() == RoundPlan(num_draft_tokens=0, reason="request_suspended")
    desk.text(8, 3)
    assert desk.plan().reason == "pays"
    assert not desk.request.is_suspended


def test_a_suspended_request_tries_a_few_rounds_when_costs_may_have_changed():
    desk = Desk(accepted=0, costs=COSTS).on()
    assert desk.plan().reason == "request_suspended"
    desk.request.lookout.probe_in_tokens = 0.0
    assert [desk.plan().reason for _ in range(6)] == ["pays"] * 4 + ["request_suspended"] * 2
    unknown = Desk(costs={0: 0.010}).on()
    unknown.request.is_suspended = True
    assert unknown.plan().reason == "request_suspended"


def test_near_the_end_of_an_answer_a_short_draft_that_loses_suspends_nothing():
    desk = Desk(accepted=8, costs={0: 0.010, 1: 0.025, 8: 0.026}).on()
    assert desk.plan(most=2) == RoundPlan(num_draft_tokens=0, reason="limit_near")
    assert desk.plan().num_draft_tokens == 8


def test_beside_a_pinned_stream_a_request_drafts_what_its_share_is_worth():
    for state in ("BASE", "OFF"):
        desk = Desk(batch=2, costs={2: 0.018, 3: 0.0185, 4: 0.019})
        desk.bucket.gate.state, desk.bucket.has_pinned = state, True
        desk.bucket.learn_spec(3.0, 0.018, now_s=0.0)
        assert desk.plan().reason == "beside_pinned"
        desk.text(0, 20)
        assert desk.plan().reason == "worth_less_than_batch_time"


def test_beside_a_pinned_stream_the_price_of_a_draft_is_measured_first():
    desk = Desk(batch=2, costs={2: 0.018})
    desk.bucket.has_pinned = True
    for _ in range(LIMITS.explore_every_rounds):
        assert desk.plan() == RoundPlan(num_draft_tokens=0, reason="measuring")
        desk.bucket.learn_spec(2.0, 0.018, now_s=0.0)
    desk.plan()
    assert [desk.plan().num_draft_tokens for _ in range(3)] == [3, 3, 3]


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


def test_nothing_is_promised_without_any_cost():
    for costs in ({}, {0: 0.010}, {3: 0.020}):
        desk = Desk(costs=costs)
        assert desk.planner.prospect(desk.bucket, desk.request) is None
        assert desk.planner.unmeasured_that_pays(desk.bucket, desk.request) is None


def test_an_unmeasured_k_is_worth_a_probe_only_if_it_may_pay():
    good, bad = Desk(accepted=8, costs={0: 0.010, 3: 0.050}), Desk(accepted=1, costs={0: 0.010, 3: 0.050})
    assert good.planner.unmeasured_that_pays(good.bucket, good.request) == 8
    assert bad.planner.unmeasured_that_pays(bad.bucket, bad.request) is None
    known = Desk(accepted=0, costs=COSTS)
    assert known.planner.unmeasured_that_pays(known.bucket, known.request) is None
