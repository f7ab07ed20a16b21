"""Counters are raw sums, ratios come from them, and what was not measured is None."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.batcher import BatchObserved
from gateway.recorder import LatencyWindow, Recorder
from gateway.speculation.controller import Controller, ControllerLimits, Override
from gateway.speculation.session import RoundOutcome
from gateway.stats import PeerStats, StatsSnapshot
from tests.gateway.core_fakes import FakePeer


def snapshot(recorder: Recorder, **changes: Any) -> StatsSnapshot:
    peer: PeerStats = FakePeer().stats()
    fields = {"version": "1", "model": "toy", "uptime_s": 1.23456, "reports": [], "verifier": peer, "drafter": peer}
    return recorder.snapshot(**{**fields, **changes})


def outcome(drafted: int, accepted: int) -> RoundOutcome:
    return RoundOutcome(
        round_id=1,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        num_committed_tokens=accepted + 1,
        is_prompt=False,
        is_cut=False,
    )


def batch(size: int, drafts: int, verify_s: float, *, is_clean: bool = True) -> BatchObserved:
    return BatchObserved(
        batch_size=size, num_draft_tokens=drafts, verify_s=verify_s, forward_s=verify_s / 2, is_clean=is_clean
    )


def test_nothing_measured_is_none_never_zero() -> None:
    stats = snapshot(Recorder(max_draft_tokens=3))
    speculation = stats.speculation
    assert speculation.acceptance_length is None
    assert speculation.acceptance_rate is None
    assert speculation.acceptance_rate_per_position == ()
    assert stats.overhead_ms is None
    for window in (stats.plain_ms, stats.verify_ms, stats.draft_ms, stats.ttft_ms, stats.tpot_ms):
        assert (window.count, window.p50, window.p95, window.ewma) == (0, None, None, None)
    assert stats.uptime_s == 1.235


def test_rounds_give_lengths_rates_and_the_curve() -> None:
    recorder = Recorder(max_draft_tokens=3)
    for drafted, accepted in ((3, 3), (3, 1), (2, 0)):
        recorder.round_done(outcome(drafted, accepted), round_s=0.1, is_clean=True)
    recorder.round_done(outcome(0, 0), round_s=0.1, is_clean=True)
    got = snapshot(recorder).speculation
    assert (got.num_rounds, got.num_plain_rounds) == (3, 1)
    assert (got.num_draft_tokens, got.num_accepted_tokens, got.num_committed_tokens) == (8, 4, 7)
    assert got.num_drafts_per_position == (3, 3, 2)
    assert got.num_accepted_per_position == (2, 1, 1)
    assert got.acceptance_rate == 0.5
    assert got.acceptance_length == round(1 + 4 / 3, 4)
    assert got.acceptance_rate_per_position == (0.6667, 0.3333, 0.5)


def test_longer_drafts_than_the_curve_are_counted_but_not_in_it() -> None:
    recorder = Recorder(max_draft_tokens=2)
    recorder.round_done(outcome(5, 4), round_s=0.1, is_clean=True)
    got = snapshot(recorder).speculation
    assert got.num_draft_tokens == 5
    assert got.num_drafts_per_position == (1, 1)


def test_overhead_is_the_plain_round_beyond_the_plain_pass() -> None:
    recorder = Recorder(max_draft_tokens=3)
    recorder.batch_done(batch(1, 0, 0.010))
    recorder.round_done(outcome(0, 0), round_s=0.012, is_clean=True)
    recorder.round_done(outcome(0, 0), round_s=9.0, is_clean=False)
    assert snapshot(recorder).overhead_ms == pytest.approx(2.0)


def test_passes_beside_a_prompt_are_not_timed() -> None:
    recorder = Recorder(max_draft_tokens=3)
    recorder.batch_done(batch(1, 0, 5.0, is_clean=False))
    recorder.batch_done(batch(2, 6, 0.030))
    stats = snapshot(recorder)
    assert stats.plain_ms.count == 0
    assert (stats.verify_ms.count, stats.verify_ms.p50) == (1, 30.0)


def test_requests_and_tokens() -> None:
    recorder = Recorder(max_draft_tokens=3)
    recorder.prompt_done(prompt_tokens=10, cached_tokens=4)
    recorder.prompt_done(prompt_tokens=5, cached_tokens=0)
    recorder.tokens_kept(3)
    recorder.tokens_kept(0)
    recorder.num_running, recorder.num_waiting, recorder.num_client_closed = 2, 1, 3
    recorder.finished["stop"] += 1
    recorder.failed["upstream_error"] += 2
    recorder.fallbacks["draft_late"] += 5
    recorder.draft_done(num_draft_tokens=3, draft_s=0.002)
    stats = snapshot(recorder)
    assert (stats.tokens.prompt_tokens, stats.tokens.cached_tokens, stats.tokens.completion_tokens) == (15, 4, 3)
    assert (stats.requests.running, stats.requests.waiting, stats.requests.client_closed) == (2, 1, 3)
    assert (stats.requests.finished, stats.requests.failed) == ({"stop": 1}, {"upstream_error": 2})
    assert stats.speculation.fallbacks == {"draft_late": 5}
    assert stats.draft_ms.p50 == 2.0


def test_a_snapshot_does_not_change_afterwards() -> None:
    recorder = Recorder(max_draft_tokens=3)
    before = snapshot(recorder)
    recorder.finished["stop"] += 1
    recorder.fallbacks["draft_late"] += 1
    assert before.requests.finished == {}
    assert before.speculation.fallbacks == {}


def test_shadows_are_counted_apart() -> None:
    recorder = Recorder(max_draft_tokens=3)
    recorder.shadow_done(num_draft_tokens=3, num_accepted_tokens=2)
    got = snapshot(recorder).speculation
    assert (got.num_shadows, got.num_shadow_draft_tokens, got.num_shadow_accepted_tokens) == (1, 3, 2)
    assert got.num_rounds == 0


def test_percentiles_of_a_window() -> None:
    window = LatencyWindow()
    for millis in range(1, 101):
        window.observe(millis / 1000)
    stats = window.stats()
    assert stats.count == 100
    assert stats.p50 == pytest.approx(51.0)
    assert stats.p95 == pytest.approx(96.0)
    assert window.ewma_s is not None
    assert 0.07 < window.ewma_s < 0.1


def test_a_window_forgets_but_counts() -> None:
    window = LatencyWindow()
    window.observe(100.0)
    for _ in range(512):
        window.observe(0.001)
    stats = window.stats()
    assert stats.count == 513
    assert stats.p95 == 1.0
    assert math.isfinite(stats.ewma)


def test_verify_costs_stand_beside_the_bucket_that_plans_them() -> None:
    controller = Controller(ControllerLimits())
    controller.set_drafter(is_up=True, reason="connected")
    view = controller.new_request()
    controller.plan_round(
        view, batch_size=3, max_draft_tokens=8, context_len=10, override=Override(), now_s=0.0
    )  # three streams are in the bucket of four
    recorder = Recorder(max_draft_tokens=3)
    for size in (3, 4):
        recorder.batch_done(batch(size, 2 * size, 0.03))
    [bucket] = snapshot(recorder, reports=controller.reports()).speculation.buckets
    assert bucket.batch_size == 4
    assert [(cost.num_draft_tokens, cost.count) for cost in bucket.verify_costs] == [(2, 2)]
