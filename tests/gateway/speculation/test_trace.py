from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.speculation.records import ControllerLimits, Override, RoundPlan
from gateway.speculation.trace import (
    DrafterSet,
    RequestOpened,
    RoundPlanned,
    RoundSeen,
    ShadowSeen,
    TracedController,
    TraceRecord,
    TraceStarted,
    replay,
)
from tests.gateway.speculation.test_controller import World


def recorded(steps: int = 400) -> tuple[list[TraceRecord], TracedController]:
    records: list[TraceRecord] = []
    world = World(accepts=lambda _k: 0)
    world.controller = TracedController(ControllerLimits(), records.append)
    world.controller.set_drafter(is_up=True, reason="connected")
    world.views = [world.controller.new_request()]
    world.run(steps)
    world.accepts = lambda k: k
    world.run(steps)
    return records, world.controller


def test_every_call_is_recorded():
    records, _ = recorded()
    assert {type(record) for record in records} == {
        TraceStarted,
        DrafterSet,
        RequestOpened,
        RoundPlanned,
        RoundSeen,
        ShadowSeen,
    }
    assert sum(isinstance(record, RoundPlanned) for record in records) == 800


def test_a_replay_decides_the_same_again():
    records, controller = recorded()
    mismatches, reports = replay(records)
    assert mismatches == []
    assert reports == controller.reports()


def test_a_decision_that_comes_out_differently_is_named():
    records, _ = recorded(10)
    index = next(i for i, record in enumerate(records) if isinstance(record, RoundPlanned))
    original = records[index]
    assert isinstance(original, RoundPlanned)
    records[index] = replace(original, plan=RoundPlan(num_draft_tokens=8, reason="a dream"))
    mismatches, _ = replay(records)
    assert [(m.index, m.recorded.reason, m.replayed) for m in mismatches] == [(index, "a dream", original.plan)]


def test_a_trace_must_begin_at_the_beginning():
    with pytest.raises(ValueError, match="start record"):
        replay([DrafterSet(is_up=True, reason="")])
    assert replay([]) == ([], [])


def test_a_round_of_an_unknown_request_is_an_error():
    plan = RoundPlanned(
        request=7,
        batch_size=1,
        max_draft_tokens=1,
        context_len=1,
        override=Override(),
        now_s=0.0,
        plan=RoundPlan(num_draft_tokens=0, reason=""),
    )
    with pytest.raises(ValueError, match="request 7"):
        replay([TraceStarted(limits=ControllerLimits()), plan])
