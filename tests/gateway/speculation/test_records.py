from __future__ import annotations

from gateway.speculation.records import ControllerLimits, Override


def test_the_defaults_fit_together():
    limits = ControllerLimits()
    assert limits.default_num_draft_tokens in limits.candidates
    assert list(limits.candidates) == sorted(set(limits.candidates))
    assert limits.probe_min_rounds <= limits.probe_max_rounds
    assert limits.probe_backoff_tokens <= limits.probe_backoff_max_tokens
    assert limits.stay_odds > limits.return_odds > 1.0
    assert limits.shadow_k <= limits.candidates[-1]


def test_no_wish_by_default():
    assert Override() == Override(mode="auto", num_draft_tokens=None)
