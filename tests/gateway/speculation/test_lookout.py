from __future__ import annotations

import pytest

from gateway.speculation.lookout import Lookout
from gateway.speculation.records import ControllerLimits

LIMITS = ControllerLimits()
PLAIN_S = 0.010


def shadows(lookout: Lookout, tokens: float, count: int, *, round_s: float = 0.025) -> None:
    for _ in range(count):
        lookout.observe_shadow(tokens, round_s=round_s, plain_s=PLAIN_S)


def plain_until(lookout: Lookout, limit: int) -> int | None:
    """Plain tokens until a verdict."""
    for token in range(limit):
        if lookout.verdict(PLAIN_S) is not None:
            return token
        lookout.count_plain(1, share=1.0)
    return None


def test_without_shadows_a_probe_is_due_after_the_back_off():
    lookout = Lookout(LIMITS)
    assert plain_until(lookout, 5000) == 128
    assert lookout.verdict(PLAIN_S) == "probe_due"


def test_the_back_off_doubles_with_each_failure_up_to_its_limit_and_success_resets_it():
    lookout = Lookout(LIMITS)
    waits = []
    for _ in range(6):
        lookout.start(has_paid=False)
        waits.append(plain_until(lookout, 5000))
    assert waits == [256, 512, 1024, 2048, 2048, 2048]
    lookout.start(has_paid=True)
    assert plain_until(lookout, 5000) == 128


def test_streams_of_a_batch_share_the_back_off():
    lookout = Lookout(LIMITS)
    for _ in range(8 * 128):
        lookout.count_plain(1, share=1 / 8)
    assert lookout.verdict(PLAIN_S) == "probe_due"


def test_good_shadows_end_the_plain_stretch():
    lookout = Lookout(LIMITS)
    shadows(lookout, 4.0, 3)
    assert lookout.verdict(PLAIN_S) is None
    shadows(lookout, 4.0, 1)
    assert lookout.verdict(PLAIN_S) == "shadow_pays"


def test_after_failures_shadows_must_show_more_and_one_may_be_forgiven():
    for forgiven, needed in ((0, 32), (1, 16)):
        lookout = Lookout(LIMITS, forgiven=forgiven)
        for _ in range(3):
            lookout.start(has_paid=False)
        shadows(lookout, 4.0, needed - 4)
        assert lookout.verdict(PLAIN_S) is None
        shadows(lookout, 4.0, 4)
        assert lookout.verdict(PLAIN_S) == "shadow_pays"


def test_bad_shadows_delay_the_probe_until_its_loss_is_within_the_budget():
    lookout = Lookout(LIMITS)
    shadows(lookout, 1.0, 10)
    waited = plain_until(lookout, 20_000)
    # A probe loses 1 + 6 * (2.5 - 1) plain tokens; 0.3 % of the stretch must cover them.
    assert waited == pytest.approx(10 / LIMITS.probe_budget, rel=0.01)


def test_few_shadows_do_not_delay_a_probe():
    lookout = Lookout(LIMITS)
    shadows(lookout, 1.0, 7)
    assert plain_until(lookout, 5000) == 128


def test_changed_costs_bring_the_probe_near_whatever_shadows_say():
    lookout = Lookout(LIMITS)
    for _ in range(5):
        lookout.start(has_paid=False)
    shadows(lookout, 1.0, 10)
    lookout.costs_changed()
    assert plain_until(lookout, 5000) == 128


def test_changed_acceptance_forgets_old_failures():
    lookout = Lookout(LIMITS)
    for _ in range(5):
        lookout.start(has_paid=False)
    lookout.acceptance_changed()
    assert lookout.doubts == 1
    assert plain_until(lookout, 5000) == 128


def starts(lookout: Lookout, tokens: int, *, overhead: float = 0.0, accepted: float = 1.0) -> int:
    """Shadows begun in so many plain tokens, each scored at once."""
    count = 0
    for _ in range(tokens):
        if lookout.takes_shadow(num_draft_tokens=3, overhead_tokens=overhead):
            count += 1
            lookout.observe_shadow(accepted, round_s=0.025, plain_s=PLAIN_S)
        lookout.count_plain(1, share=1.0)
    return count


def test_shadows_thin_out_while_they_lose_and_become_dense_when_one_gains():
    lookout = Lookout(LIMITS)
    assert starts(lookout, 100) > starts(lookout, 100)
    starts(lookout, 3000)
    sparse = starts(lookout, 960)
    assert sparse == 960 / LIMITS.shadow_max_interval_tokens
    assert starts(lookout, 200, accepted=3.0) > 20


def test_shadows_keep_to_their_budget():
    assert starts(Lookout(LIMITS), 1000, overhead=0.5) == 1000 * LIMITS.shadow_sparse_budget / 0.5
    promising = Lookout(LIMITS)
    promising.observe_shadow(4.0, round_s=0.025, plain_s=PLAIN_S)
    dense = starts(promising, 1000, overhead=0.5, accepted=2.575)
    assert dense == pytest.approx(1000 * LIMITS.shadow_dense_budget / 0.5, rel=0.1)


def test_what_shadows_predict():
    lookout = Lookout(LIMITS)
    assert lookout.predicted(PLAIN_S) is None
    shadows(lookout, 2.5, 4)
    assert lookout.predicted(PLAIN_S) == (pytest.approx(0.0), pytest.approx(0.25))
