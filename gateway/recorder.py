"""Counts what happens and turns it into the one snapshot that /stats, /metrics and the dashboard read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from gateway.batcher import BatchObserved
from gateway.speculation.controller import BucketReport
from gateway.speculation.costs import batch_bucket
from gateway.speculation.session import RoundOutcome
from gateway.stats import (
    BucketStats,
    CostStats,
    DraftCostStats,
    LatencyStats,
    PeerStats,
    RequestStats,
    SpeculationStats,
    StatsSnapshot,
    TokenStats,
)

__all__ = ["LatencyWindow", "Recorder"]

_WINDOW = 512
_ALPHA = 0.05


class LatencyWindow:
    """Recent wall times: percentiles over the last 512, and an exponentially weighted mean."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._count = 0
        self._ewma: float | None = None

    def observe(self, seconds: float) -> None:
        """Add one."""
        self._recent.append(seconds)
        self._count += 1
        self._ewma = seconds if self._ewma is None else self._ewma + _ALPHA * (seconds - self._ewma)

    @property
    def count(self) -> int:
        """How many were added."""
        return self._count

    @property
    def ewma_s(self) -> float | None:
        """The weighted mean in seconds, None before the first."""
        return self._ewma

    def stats(self) -> LatencyStats:
        """The report, in ms."""
        ordered = sorted(self._recent)
        return LatencyStats(
            count=self._count,
            p50=_ms(_percentile(ordered, 0.5)),
            p95=_ms(_percentile(ordered, 0.95)),
            ewma=_ms(self._ewma),
        )


class Recorder:
    """All counters of one gateway. Changed from one event loop only."""

    def __init__(self, *, max_draft_tokens: int) -> None:
        self.num_running = 0
        self.num_decoding = 0  # running and past their prompt
        self.num_waiting = 0
        self.num_client_closed = 0
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.ttft = LatencyWindow()
        self.tpot = LatencyWindow()
        self._plain = LatencyWindow()
        self._verify = LatencyWindow()
        self._draft = LatencyWindow()
        self._plain_round = LatencyWindow()
        self._draft_costs: dict[int, LatencyWindow] = {}
        self._verify_costs: dict[tuple[int, int], LatencyWindow] = {}
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._rounds = self._plain_rounds = self._drafted = self._accepted = self._committed = 0
        self._shadows = self._shadow_drafted = self._shadow_accepted = 0
        self._drafted_at = [0] * max_draft_tokens
        self._accepted_at = [0] * max_draft_tokens

    def prompt_done(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was computed."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def tokens_kept(self, count: int) -> None:
        """Tokens that became part of an answer."""
        self._completion_tokens += count

    def round_done(self, outcome: RoundOutcome, *, round_s: float, is_clean: bool) -> None:
        """A decode or verify round of one request was committed."""
        if outcome.num_draft_tokens == 0:
            self._plain_rounds += 1
            if is_clean:
                self._plain_round.observe(round_s)
            return
        self._rounds += 1
        self._drafted += outcome.num_draft_tokens
        self._accepted += outcome.num_accepted_tokens
        self._committed += outcome.num_committed_tokens
        for position in range(min(outcome.num_draft_tokens, len(self._drafted_at))):
            self._drafted_at[position] += 1
            self._accepted_at[position] += position < outcome.num_accepted_tokens

    def shadow_done(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A shadow proposal was scored against the plain stream."""
        self._shadows += 1
        self._shadow_drafted += num_draft_tokens
        self._shadow_accepted += num_accepted_tokens

    def batch_done(self, batch: BatchObserved) -> None:
        """A decode batch came back from the verifier."""
        if not batch.is_clean:
            return
        if batch.num_draft_tokens == 0:
            self._plain.observe(batch.verify_s)
        else:
            self._verify.observe(batch.verify_s)
        mean = round(batch.num_draft_tokens / batch.batch_size)
        bucket = batch_bucket(batch.batch_size)  # as the controller's reports, beside which this is shown
        self._verify_costs.setdefault((bucket, mean), LatencyWindow()).observe(batch.verify_s)

    def draft_done(self, *, num_draft_tokens: int, draft_s: float) -> None:
        """A proposal came back from the drafter."""
        self._draft.observe(draft_s)
        self._draft_costs.setdefault(num_draft_tokens, LatencyWindow()).observe(draft_s)

    def snapshot(
        self,
        *,
        version: str,
        model: str,
        uptime_s: float,
        reports: Sequence[BucketReport],
        verifier: PeerStats,
        drafter: PeerStats,
    ) -> StatsSnapshot:
        """Everything, at this moment."""
        plain, step = self._plain.ewma_s, self._plain_round.ewma_s
        return StatsSnapshot(
            version=version,
            model=model,
            uptime_s=round(uptime_s, 3),
            requests=RequestStats(
                running=self.num_running,
                waiting=self.num_waiting,
                finished=dict(self.finished),
                failed=dict(self.failed),
                client_closed=self.num_client_closed,
            ),
            tokens=TokenStats(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                completion_tokens=self._completion_tokens,
            ),
            speculation=self._speculation(reports),
            plain_ms=self._plain.stats(),
            verify_ms=self._verify.stats(),
            draft_ms=self._draft.stats(),
            overhead_ms=_ms(step - plain) if step is not None and plain is not None else None,
            ttft_ms=self.ttft.stats(),
            tpot_ms=self.tpot.stats(),
            verifier=verifier,
            drafter=drafter,
        )

    def _speculation(self, reports: Sequence[BucketReport]) -> SpeculationStats:
        busiest = max(reports, key=lambda r: sum(c.count for c in r.round_costs.values()), default=None)
        return SpeculationStats(
            state=busiest.state if busiest else "BASE",
            reason=busiest.reason if busiest else "no request yet",
            break_even_length=_round(busiest.break_even_length) if busiest else None,
            acceptance_length=_round(1 + self._accepted / self._rounds) if self._rounds else None,
            acceptance_rate=_round(self._accepted / self._drafted) if self._drafted else None,
            acceptance_rate_per_position=tuple(
                round(accepted / drafted, 4)
                for accepted, drafted in zip(self._accepted_at, self._drafted_at, strict=True)
                if drafted
            ),
            num_rounds=self._rounds,
            num_plain_rounds=self._plain_rounds,
            num_draft_tokens=self._drafted,
            num_accepted_tokens=self._accepted,
            num_committed_tokens=self._committed,
            num_drafts_per_position=tuple(self._drafted_at),
            num_accepted_per_position=tuple(self._accepted_at),
            num_shadows=self._shadows,
            num_shadow_draft_tokens=self._shadow_drafted,
            num_shadow_accepted_tokens=self._shadow_accepted,
            fallbacks=dict(self.fallbacks),
            buckets=tuple(self._bucket(report) for report in reports),
        )

    def _bucket(self, report: BucketReport) -> BucketStats:
        verify = {k: w for (size, k), w in sorted(self._verify_costs.items()) if size == report.batch_size}
        return BucketStats(
            batch_size=report.batch_size,
            state=report.state,
            reason=report.reason,
            num_draft_tokens=report.num_draft_tokens,
            plain_ms=_ms(report.plain_s),
            break_even_length=_round(report.break_even_length),
            acceptance_length=_round(report.acceptance_length),
            speedup=_round(report.speedup),
            speedup_se=_round(report.speedup_se),
            next_probe_in_tokens=report.next_probe_in_tokens,
            num_switches=report.num_switches,
            break_even_lengths={str(k): round(length, 4) for k, length in report.break_even_lengths.items()},
            verify_costs=tuple(
                CostStats(num_draft_tokens=k, verify_ms=w.ewma_s * 1e3, count=w.count)
                for k, w in verify.items()
                if w.ewma_s is not None
            ),
            draft_costs=tuple(
                DraftCostStats(num_draft_tokens=k, draft_ms=w.ewma_s * 1e3, count=w.count)
                for k, w in sorted(self._draft_costs.items())
                if w.ewma_s is not None
            ),
        )


def _percentile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
