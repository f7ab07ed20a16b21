"""The controller in small worlds of exact times: K drafts cost ``cost[K]`` seconds, so many of them are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.speculation.controller import Controller, ControllerLimits, Override, RequestView, RoundObserved, RoundPlan

FLAT = {0: 0.010, 1: 0.018, 2: 0.018, 3: 0.018, 4: 0.018, 5: 0.018, 6: 0.018, 7: 0.018, 8: 0.018}


class World:
    """One or more streams that take turns, with one controller."""

    def __init__(
        self,
        *,
        costs: dict[int, float] | None = None,
        accepts: Callable[[int], int] = lambda _k: 0,
        limits: ControllerLimits | None = None,
        streams: int = 1,
        is_up: bool = True,
    ) -> None:
        self.controller = Controller(limits or ControllerLimits())
        if is_up:
            self.controller.set_drafter(is_up=True, reason="connected")
        self.costs = costs or dict(FLAT)
        self.accepts = accepts
        self.streams = streams
        self.override = Override()
        self.is_clean = True
        self.max_draft_tokens = 100
        self.views = [self.controller.new_request() for _ in range(streams)]
        self.shadows: dict[int, tuple[int, int]] = {}
        self.now_s = 0.0
        self.tokens = 0
        self.plans: list[RoundPlan] = []

    def plan(self, view: RequestView) -> RoundPlan:
        plan = self.controller.plan_round(
            view,
            batch_size=self.streams,
            max_draft_tokens=self.max_draft_tokens,
            context_len=100,
            override=self.override,
            now_s=self.now_s,
        )
        self.plans.append(plan)
        return plan

    def observe(self, view: RequestView, k: int, accepted: int, **flags: bool) -> None:
        self.now_s += self.costs[k]
        self.tokens += accepted + 1
        self.controller.observe(
            view,
            RoundObserved(
                batch_size=self.streams,
                num_draft_tokens=k,
                num_accepted_tokens=accepted,
                num_committed_tokens=accepted + 1,
                round_s=self.costs[k],
                is_cut=flags.pop("is_cut", False),
                is_clean=flags.pop("is_clean", self.is_clean),
                now_s=self.now_s,
                **flags,
            ),
        )

    def step(self) -> list[RoundPlan]:
        """A round of each stream."""
        plans = [self.plan(view) for view in self.views]
        for view, plan in zip(self.views, plans, strict=True):
            k = 0 if plan.is_shadow else plan.num_draft_tokens
            self.observe(view, k, self.accepts(k))
            if plan.is_shadow:
                self.controller.observe_shadow(
                    view,
                    batch_size=self.streams,
                    num_draft_tokens=plan.num_draft_tokens,
                    num_accepted_tokens=self.accepts(plan.num_draft_tokens),
                    now_s=self.now_s,
                )
        return plans

    def run(self, steps: int) -> list[str]:
        """Reasons of so many steps."""
        return [plan.reason for _ in range(steps) for plan in self.step()]

    def run_until(self, state: str, limit: int = 3000) -> int:
        """Steps until the bucket is in ``state``."""
        for step in range(limit):
            if self.report.state == state:
                return step
            self.step()
        raise AssertionError(f"{self.report.state}, never {state}: {self.report.reason}")

    @property
    def report(self):
        return self.controller.reports()[-1] if self.controller.reports() else _NONE


class _Nothing:
    state = ""
    reason = "no round yet"


_NONE = _Nothing()


def test_plain_is_measured_first_then_the_default_k_then_it_pays():
    world = World(accepts=lambda k: k)
    assert world.run(9) == ["base"] * 9
    assert world.step()[0] == RoundPlan(num_draft_tokens=3, reason="probe")
    assert world.run_until("ON") <= 10
    assert world.step()[0].reason in ("pays", "measuring")


def test_longer_drafts_are_found_when_they_pay():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    world.run(40)
    assert world.report.num_draft_tokens == 8
    assert world.report.break_even_lengths[8] == pytest.approx(1.8)
    assert world.report.acceptance_length > 6  # the highest level is 0.94


def test_a_short_answer_does_not_pay_for_measuring_every_k():
    world = World(accepts=lambda k: min(k, 3))
    world.run_until("ON")
    world.run(60)
    measured = {k for k, cell in world.report.round_costs.items() if cell.is_seeded}
    assert len(measured - {0}) <= 3
    assert sum(plan.reason == "measuring" for plan in world.plans) <= 20


def test_speculation_that_loses_is_off_after_one_short_probe():
    world = World(accepts=lambda k: 0)
    world.run_until("OFF")
    assert sum(plan.reason == "probe" for plan in world.plans) <= 15
    assert world.report.speedup is not None
    assert world.report.speedup < 1.0
    reasons = world.run(500)
    assert reasons.count("below_break_even") >= 490
    assert world.report.next_probe_in_tokens is not None


def test_a_lost_probe_goes_on_with_a_k_that_may_still_pay():
    world = World(accepts=lambda k: k, costs={0: 0.010, **dict.fromkeys(range(1, 9), 0.050)})
    world.run_until("ON")
    assert {plan.num_draft_tokens for plan in world.plans if plan.reason == "probe"} == {3, 8}
    assert (world.report.num_probes_lost, world.report.num_probes_won) == (1, 1)
    assert world.report.num_switches == 2


def test_plain_decode_loses_almost_nothing_in_a_hopeless_world():
    world = World(accepts=lambda k: 0)
    world.run(10_000)
    assert world.now_s / world.tokens <= 0.010 * 1.01


def test_the_bucket_goes_off_when_acceptance_falls_and_on_again_by_shadows():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    world.run(100)
    world.accepts = lambda _k: 0
    world.run(60)
    reasons = {plan.reason for plan in world.plans[-5:]}
    assert reasons <= {"request_suspended", "below_break_even"}
    world.run(400)
    world.accepts = lambda k: k
    begin = world.tokens
    while world.plans[-1].num_draft_tokens == 0 or world.plans[-1].is_shadow:
        world.step()
    assert world.tokens - begin < 100


def test_only_the_request_that_loses_is_suspended():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    world.run(100)
    world.accepts = lambda _k: 0
    while world.plans[-1].reason != "request_suspended":
        world.step()
    assert world.report.state == "ON"
    assert world.report.num_suspensions == 1
    world.views = [world.controller.new_request()]
    assert world.plan(world.views[0]).reason == "pays"


def test_a_suspended_request_tries_again_within_a_long_answer_without_shadows():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    world.run(200)
    world.accepts = lambda _k: 0
    while world.plans[-1].reason != "request_suspended":
        world.step()
    world.controller.observe_shadow = lambda *args, **kwargs: None  # type: ignore[method-assign]
    world.accepts = lambda k: k
    begin = world.tokens
    while world.plans[-1].reason != "pays":
        world.step()
    assert world.tokens - begin <= 140


def test_a_shadow_that_is_never_scored_does_not_block_the_next():
    world = World(accepts=lambda _k: 0)
    world.run_until("OFF")
    world.controller.observe_shadow = lambda *args, **kwargs: None  # type: ignore[method-assign]
    world.run(60)
    assert sum(plan.is_shadow for plan in world.plans[-60:]) >= 3


def test_a_slower_verifier_turns_it_off_and_a_faster_one_on_again():
    world = World(accepts=lambda k: min(k, 2))
    world.run_until("ON")
    world.run(100)
    world.costs = {k: 0.010 if k == 0 else 0.045 for k in FLAT}
    world.run(60)
    assert {plan.reason for plan in world.plans[-5:]} <= {"request_suspended", "below_break_even"}
    assert "plain" in world.report.reason
    world.costs = dict(FLAT)
    world.run(2000)
    assert world.plans[-1].reason in ("pays", "measuring", "refresh")


def test_a_slower_target_alone_is_noticed_by_refreshing_the_baseline():
    world = World(accepts=lambda k: min(k, 2))
    world.run_until("ON")
    world.run(400)
    assert "refresh" in {plan.reason for plan in world.plans}


def test_a_batch_gates_on_what_the_fleet_gets():
    for cost, state in ((0.018, "ON"), (0.060, "OFF")):
        world = World(accepts=lambda k: min(k, 2), streams=4, costs={0: 0.010, **dict.fromkeys(range(1, 9), cost)})
        world.run_until(state)
        world.run(50)
        assert world.report.state == state
        assert world.report.batch_size == 4


def test_in_a_batch_a_bad_request_drafts_nothing_and_is_followed_by_shadows():
    world = World(accepts=lambda k: k, streams=2, costs={0: 0.010, **{k: 0.011 + 0.004 * k for k in range(1, 9)}})
    world.run_until("ON")
    world.run(60)
    bad = world.views[0]
    for _ in range(120):
        for view in world.views:
            plan = world.plan(view)
            k = 0 if plan.is_shadow else plan.num_draft_tokens
            world.observe(view, k, 0 if view is bad else k)
            if plan.is_shadow:
                world.controller.observe_shadow(
                    view,
                    batch_size=2,
                    num_draft_tokens=plan.num_draft_tokens,
                    num_accepted_tokens=0,
                    now_s=world.now_s,
                )
    last = {plan.reason for plan in world.plans[-60:]}
    assert "worth_less_than_batch_time" in last
    assert last & {"pays", "measuring"}
    assert any(plan.is_shadow for plan in world.plans[-240:])


def test_a_larger_batch_starts_off_where_a_smaller_one_loses():
    world = World(accepts=lambda _k: 0)
    world.run_until("OFF")
    world.streams = 2
    world.views.append(world.controller.new_request())
    world.run(10)
    report = world.controller.reports()[-1]
    assert (report.batch_size, report.state) == (2, "OFF")
    assert "smaller batch" in report.reason
    assert 3 in report.round_costs
    mixture = World(accepts=lambda _k: 0, limits=ControllerLimits(is_monotone=False))
    mixture.run_until("OFF")
    mixture.streams = 2
    mixture.views.append(mixture.controller.new_request())
    mixture.run(12)
    assert mixture.controller.reports()[-1].state == "PROBE"


def test_the_drafter_down_means_plain_and_back_means_probe():
    world = World(accepts=lambda k: k, is_up=False)
    assert world.run(12) == ["drafter_down"] * 12
    assert world.report.state == "FAULT"
    world.controller.set_drafter(is_up=True, reason="connected")
    assert world.report.state == "PROBE"
    world.run_until("ON")
    world.controller.set_drafter(is_up=False, reason="crashed")
    assert world.step()[0].reason == "drafter_down"
    assert world.report.reason == "crashed"


def test_pins_and_client_wishes_come_before_the_gates():
    pinned = World(limits=ControllerLimits(mode="on"))
    assert pinned.step()[0] == RoundPlan(num_draft_tokens=3, reason="pinned")
    assert pinned.report.state == "PINNED"
    off = World(limits=ControllerLimits(mode="off"))
    assert off.step()[0] == RoundPlan(num_draft_tokens=0, reason="pinned")
    world = World()
    world.override = Override(mode="off")
    assert world.step()[0].reason == "client_off"
    world.override = Override(mode="on", num_draft_tokens=7)
    assert world.step()[0] == RoundPlan(num_draft_tokens=7, reason="client_on")
    world.override = Override(mode="on")
    world.max_draft_tokens = 2
    assert world.step()[0] == RoundPlan(num_draft_tokens=2, reason="client_on")


def test_off_in_the_configuration_is_a_pin_and_no_fault():
    off = World(limits=ControllerLimits(mode="off"))
    off.controller.set_drafter(is_up=False, reason="none is started")
    assert [off.step()[0] for _ in range(3)] == [RoundPlan(num_draft_tokens=0, reason="pinned")] * 3
    assert (off.report.state, off.report.reason) == ("PINNED", "mode is off")
    off.override = Override(mode="on")  # a client can't have what isn't there
    assert off.step()[0] == RoundPlan(num_draft_tokens=0, reason="drafter_down")


def test_in_auto_mode_the_clients_number_is_a_limit():
    world = World(accepts=lambda k: k)
    world.override = Override(num_draft_tokens=2)
    world.run_until("ON")
    world.run(60)
    assert max(plan.num_draft_tokens for plan in world.plans) <= 2


def test_at_the_end_of_an_answer_there_is_nothing_to_draft():
    world = World()
    world.max_draft_tokens = 0
    assert world.step()[0].reason == "limit_near"


def test_cut_and_unclean_rounds_teach_no_times():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    before = world.report.round_costs[3].count
    view = world.views[0]
    for flags in ({"is_cut": True}, {"is_clean": False}):
        world.plan(view)
        world.costs[3] = 5.0
        world.observe(view, 3, 0, **flags)
    assert world.report.round_costs[3].count == before
    assert world.report.state == "ON"


def test_an_unclean_round_counts_at_its_usual_cost():
    world = World(accepts=lambda _k: 0)
    world.run_until("PROBE")
    view = world.views[0]
    world.is_clean = False
    world.plan(view)
    world.observe(view, 5, 0)  # nothing known of 5 drafts: no time to count
    assert 5 not in world.report.round_costs


def test_resyncs_and_lost_drafts_are_charged_to_speculation():
    for flags in ({"is_resync": True}, {"is_draft_lost": True, "is_clean": False}):
        world = World(accepts=lambda k: k)
        world.run_until("ON")
        view = world.views[0]
        world.costs[0] = 0.110
        for _ in range(10):
            world.plan(view)
            world.observe(view, 0, 0, **flags)
        assert world.report.state == "OFF"
        assert "lost" in world.report.reason


def test_an_unclean_resync_or_one_without_a_baseline_charges_nothing():
    world = World(accepts=lambda k: k)
    view = world.views[0]
    world.plan(view)
    world.observe(view, 0, 0, is_resync=True)
    world.run_until("ON")
    world.plan(view)
    world.costs[0] = 9.0
    world.observe(view, 0, 0, is_resync=True, is_clean=False)
    assert world.report.state == "ON"


def test_a_forced_request_does_not_suspend_itself():
    world = World(accepts=lambda k: k)
    world.run_until("ON")
    world.override = Override(mode="on", num_draft_tokens=3)
    world.accepts = lambda _k: 0
    world.run(20)
    assert world.report.num_suspensions == 0


def test_a_pinned_request_teaches_costs_and_neither_blocks_the_gate_nor_moves_it():
    world = World(accepts=lambda _k: 0)
    world.override = Override(mode="on", num_draft_tokens=3)
    world.run(40)
    assert (world.report.state, world.report.num_switches) == ("BASE", 0)
    assert "pins speculation on" in world.report.reason
    assert world.report.round_costs[3].seconds == pytest.approx(0.018)
    world.override = Override()
    world.accepts = lambda k: k
    world.run(9)
    assert world.report.plain_s == pytest.approx(0.010)
    world.run_until("ON")
    world.override = Override(mode="on", num_draft_tokens=3)
    world.accepts = lambda _k: 0
    world.run(100)
    assert world.report.state == "ON"


def test_a_request_beside_a_pinned_one_gets_its_share_of_the_drafting():
    # The batch speculates anyway, so a stream's time hardly depends on its own K.
    world = World(accepts=lambda k: k, streams=2, costs={k: 0.018 + 0.0002 * k for k in range(9)})
    pinned, free = world.views
    reasons = []
    for _ in range(100):
        world.override = Override(mode="on", num_draft_tokens=3)
        first = world.plan(pinned)
        world.override = Override()
        second = world.plan(free)
        reasons.append(second.reason)
        for view, plan in ((pinned, first), (free, second)):
            world.observe(view, plan.num_draft_tokens, plan.num_draft_tokens)
    assert "measuring" in reasons
    assert set(reasons[-20:]) == {"beside_pinned"}
    assert "plain decode is not measured" in world.report.reason


@pytest.mark.parametrize("k", [9, 16, 64])
def test_a_client_may_draft_more_than_the_candidates(k: int):
    world = World(accepts=lambda k: k, costs={**FLAT, k: 0.030})
    world.override = Override(mode="on", num_draft_tokens=k)
    assert world.step()[0] == RoundPlan(num_draft_tokens=k, reason="client_on")
    world.run(20)
    assert world.report.round_costs[k].seconds == pytest.approx(0.030)
    world.override = Override(num_draft_tokens=k)  # auto: a limit beyond all candidates
    world.run_until("ON")
    world.run(60)
    assert world.report.num_draft_tokens == 8


def test_a_client_that_turns_it_off_leaves_a_measured_baseline():
    world = World(accepts=lambda k: k)
    world.override = Override(mode="off", num_draft_tokens=4)
    assert set(world.run(30)) == {"client_off"}
    assert world.report.plain_s == pytest.approx(0.010)
    world.override = Override()
    assert world.run(2) == ["probe", "probe"]


def test_shadows_nobody_asked_for_are_harmless():
    world = World()
    view = world.views[0]
    args = {"batch_size": 1, "num_accepted_tokens": 0, "now_s": 0.0}
    world.controller.observe_shadow(view, num_draft_tokens=3, **args)
    world.step()
    world.controller.observe_shadow(view, num_draft_tokens=0, **args)
    world.controller.observe_shadow(view, num_draft_tokens=3, **args)
    world.run_until("PROBE")
    world.run(3)
    world.controller.observe_shadow(view, num_draft_tokens=3, **args)
    assert world.report.num_shadows == 2


def test_the_same_calls_give_the_same_decisions():
    first, second = World(accepts=lambda k: k // 2), World(accepts=lambda k: k // 2)
    first.run(500)
    second.run(500)
    assert first.plans == second.plans
    assert first.controller.reports() == second.controller.reports()


def test_a_clock_that_does_not_move_is_survived() -> None:
    controller = Controller(ControllerLimits())
    controller.set_drafter(is_up=True, reason="connected")
    request = controller.new_request()
    for number in range(200):
        plan = controller.plan_round(
            request, batch_size=1, max_draft_tokens=8, context_len=10 + number, override=Override(), now_s=0.0
        )
        drafted = 0 if plan.is_shadow else plan.num_draft_tokens
        controller.observe(
            request,
            RoundObserved(
                batch_size=1,
                num_draft_tokens=drafted,
                num_accepted_tokens=drafted,
                num_committed_tokens=drafted + 1,
                round_s=0.0,
                is_cut=False,
                is_clean=True,
                now_s=0.0,
            ),
        )
    assert controller.reports()[0].plain_s is not None
