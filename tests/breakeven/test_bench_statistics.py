from __future__ import annotations

import pytest

from breakeven.bench_statistics import Acceptance, RequestTimes, summarize


def times(begin_s: float, *arrivals_s: float, tokens: int, error: str = "") -> RequestTimes:
    end_s = arrivals_s[-1] if arrivals_s else begin_s
    return RequestTimes(begin_s=begin_s, arrivals_s=arrivals_s, end_s=end_s, num_tokens=tokens, error=error)


def test_the_times_of_one_answer() -> None:
    # Three events with five tokens: the first token after 0.5 s, the four others in 0.8 s.
    one = times(10.0, 10.5, 10.7, 11.3, tokens=5)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.gaps_s == pytest.approx((0.2, 0.6))


@pytest.mark.parametrize("one", [times(0, 1.0, tokens=1), times(0, 1.0, tokens=4), times(0, tokens=0)])
def test_one_token_or_one_event_has_no_time_per_token(one: RequestTimes) -> None:
    assert one.tpot_s is None
    assert one.gaps_s == ()


def test_a_run_is_added_up() -> None:
    done = [times(0.0, 0.1 * i, 0.1 * i + 1.0, tokens=11) for i in range(1, 102)]
    summary = summarize([*done, times(0.0, 0.5, tokens=3, error="broke")], wall_s=20.0)
    assert (summary.num_ok, summary.num_failed, summary.errors) == (101, 1, ("broke",))
    assert summary.num_tokens == 101 * 11
    assert summary.delivered_tok_per_s == pytest.approx(101 * 11 / 20.0)
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.p50, summary.ttft_ms.p99) == (pytest.approx(5100), pytest.approx(10_000))
    assert summary.tpot_ms is not None
    assert (summary.tpot_ms.p50, summary.tpot_ms.mean) == (pytest.approx(100), pytest.approx(100))
    assert summary.itl_ms is not None
    assert summary.itl_ms.p99 == pytest.approx(1000)
    assert summary.e2e_latency_ms is not None
    assert summary.e2e_latency_ms.p50 == pytest.approx(6100)


def test_nothing_measured_is_none_not_zero() -> None:
    summary = summarize([times(0, tokens=0, error="refused")], wall_s=0.0)
    assert (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_latency_ms) == (None,) * 4
    assert summary.delivered_tok_per_s == 0.0


def test_acceptance_counts_the_targets_own_token_in_the_length_only() -> None:
    acceptance = Acceptance(num_rounds=10, num_draft_tokens=30, num_accepted_tokens=15)
    assert (acceptance.acceptance_rate, acceptance.acceptance_length) == (0.5, 2.5)
    nothing = Acceptance(num_rounds=0, num_draft_tokens=0, num_accepted_tokens=0)
    assert (nothing.acceptance_rate, nothing.acceptance_length) == (None, None)
