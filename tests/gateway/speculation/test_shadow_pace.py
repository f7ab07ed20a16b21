from __future__ import annotations

from gateway.speculation.records import ControllerLimits
from gateway.speculation.shadow_pace import ShadowPace

LIMITS = ControllerLimits()


def shadows(gain: float, tokens: int, *, overhead: float = 0.0) -> int:
    """Shadows begun in so many plain tokens."""
    pace, count = ShadowPace(LIMITS), 0
    for _ in range(tokens):
        pace.pass_token(gain_tokens=gain, cost_tokens=2.0)
        count += pace.is_due(overhead_tokens=overhead)
    return count


def test_the_first_is_due_at_once_and_hopeless_ones_are_as_rare_as_allowed():
    assert ShadowPace(LIMITS).is_due(overhead_tokens=0.0)
    assert shadows(0.0, 1 + 10 * LIMITS.shadow_max_interval_tokens) == 11


def test_the_more_is_missed_the_denser_they_are():
    few, many = shadows(0.001, 1000), shadows(0.01, 1000)
    assert 20 < few < many
    assert shadows(1.0, 1000) == 1000


def test_they_are_due_when_what_is_missed_is_worth_one():
    pace = ShadowPace(LIMITS)
    assert pace.is_due(overhead_tokens=0.06)
    waits = 0
    while not pace.is_due(overhead_tokens=0.06):
        pace.pass_token(gain_tokens=0.025, cost_tokens=2.0)  # 0.0123 tokens each
        waits += 1
    assert waits == 5


def test_they_keep_to_their_budget():
    assert shadows(1.0, 1000, overhead=0.3) == 1000 * LIMITS.shadow_budget / 0.3
