from __future__ import annotations

import pytest

from gateway.speculation.gate import TRANSITIONS, Gate


def test_a_life():
    gate = Gate()
    for now_s, event in enumerate(("measured", "won", "losing", "shadow_pays", "lost", "probe_due", "won")):
        gate.apply(event, reason=event, now_s=float(now_s))
    assert (gate.state, gate.reason, gate.since_s, gate.num_switches) == ("ON", "won", 6.0, 7)


def test_staying_in_a_state_is_no_switch_but_a_new_reason():
    gate = Gate()
    gate.apply("drafter_down", reason="crashed", now_s=1.0)
    gate.apply("drafter_down", reason="restarting", now_s=2.0)
    assert (gate.state, gate.reason, gate.since_s, gate.num_switches) == ("FAULT", "restarting", 1.0, 1)


def test_what_the_table_does_not_allow_is_an_error():
    with pytest.raises(KeyError):
        Gate().apply("won", reason="", now_s=0.0)


def test_every_state_can_fail_and_only_probe_turns_on():
    states = {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values())
    assert all(TRANSITIONS[state, "drafter_down"] == "FAULT" for state in states)
    assert {state for (state, _), target in TRANSITIONS.items() if target == "ON"} == {"PROBE"}
