"""Decides how many tokens to draft, 0 included, from measured costs and measured acceptance.

For streams in a batch of size B, with round times C(K) (drafting, verifying and all waiting, seconds of wall time from
one commit to the next) and t = C(0):

    E(K)        = 1 + sum_{i=1..K} P(first i drafts accepted)        tokens a round
    speedup(K)  = (E(K) / C(K)) / (1 / t) = E(K) * t / C(K)          dimensionless
    break-even acceptance length of K = C(K) / t                     tokens a round

The K with the largest E(K) / C(K) wins; it must beat plain decode by a margin, otherwise plain it is: a wrong "off"
costs the gain, a wrong "on" is slower than having no gateway at all.

Cells that are not measured yet are measured first, plain decode before anything else; after that one round in
``refresh_rounds`` re-measures the baseline, or one draft length while off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.speculation.acceptance_estimate import AcceptanceEstimate, expected_committed_tokens
from gateway.speculation.costs import CostCell, CostTable, batch_bucket

__all__ = [
    "BucketReport",
    "Controller",
    "ControllerLimits",
    "Override",
    "RequestView",
    "RoundObserved",
    "RoundPlan",
]

BucketState = Literal["BASE", "PROBE", "ON", "OFF", "PINNED", "FAULT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerLimits:
    """Constants of the policy; config.py says what each is for.

    candidates: the draft lengths tried, ascending, without 0.
    """

    mode: Literal["auto", "on", "off"]
    candidates: tuple[int, ...]
    default_num_draft_tokens: int
    margin: float = 0.03
    refresh_rounds: int = 256
    prior_rate: float = 0.5
    request_prior_rounds: float = 12.0
    bucket_half_life_rounds: float = 300.0
    request_half_life_rounds: float = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """K for the next round and why.

    ``is_shadow``: run the round plain, let the drafter propose K tokens beside it, and report how they would have done.
    """

    num_draft_tokens: int
    reason: str
    is_shadow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """What the client asked for its own request; the same meaning as ports.SpeculationOverride."""

    mode: Literal["auto", "on", "off"] = "auto"
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundObserved:
    """One finished round of one request.

    Fields:
        batch_size: streams decoding when it was planned. round_s: wall time from the commit before to this commit.
        is_cut: ended by a stop or limit. is_clean: no prompt was computed in its pass, no re-sync, no retry: its time
            is a fair sample. is_resync: a plain round that only fetched the drafter's features.
    """

    batch_size: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    round_s: float
    is_cut: bool
    is_clean: bool
    is_resync: bool
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """What the controller knows and does for one bucket; for /stats."""

    batch_size: int
    state: BucketState
    reason: str
    num_draft_tokens: int
    plain_s: float | None
    round_costs: dict[int, CostCell]
    acceptance_length: float | None
    break_even_length: float | None
    speedup: float | None


class RequestView:
    """One request's acceptance history; belongs to the request, changed only by the controller."""

    def __init__(self, limits: ControllerLimits) -> None:
        self.acceptance = AcceptanceEstimate(
            half_life_rounds=limits.request_half_life_rounds, max_draft_tokens=limits.candidates[-1]
        )


@dataclass(slots=True)
class _Bucket:
    acceptance: AcceptanceEstimate
    num_rounds: int = 0
    since_refresh: int = 0
    state: BucketState = "BASE"
    reason: str = "nothing measured yet"
    chosen: int = 0


class Controller:
    """Pure: every input is an argument, the same inputs give the same decisions.

    One instance for all requests. Not a state machine over requests: it only keeps estimates.
    """

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._costs = CostTable()
        self._buckets: dict[int, _Bucket] = {}
        self._is_drafter_up = False
        self._drafter_reason = "not connected yet"

    def set_drafter(self, *, is_up: bool, reason: str) -> None:
        """The drafter came or went."""
        self._is_drafter_up, self._drafter_reason = is_up, reason

    def new_request(self) -> RequestView:
        """History record for a new request."""
        return RequestView(self._limits)

    def plan_round(
        self,
        request: RequestView,
        *,
        batch_size: int,
        max_draft_tokens: int,
        context_len: int,
        override: Override,
        now_s: float,
    ) -> RoundPlan:
        """K for the next round of ``request``.

        Args:
            batch_size: streams decoding now, this one included, >= 1.
            max_draft_tokens: what the request's own limits allow; more makes no sense.
            context_len: committed tokens of the request. now_s: monotonic time.
        """
        bucket = self._bucket(batch_size)
        if not self._is_drafter_up:
            bucket.state, bucket.reason, bucket.chosen = "FAULT", self._drafter_reason, 0
            return RoundPlan(num_draft_tokens=0, reason="drafter_down")
        if override.mode != "auto":
            wanted = (
                (override.num_draft_tokens or self._limits.default_num_draft_tokens) if override.mode == "on" else 0
            )
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="client")
        if self._limits.mode != "auto":
            wanted = self._limits.default_num_draft_tokens if self._limits.mode == "on" else 0
            bucket.state, bucket.reason, bucket.chosen = "PINNED", f"mode is {self._limits.mode}", wanted
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="pinned")
        if max_draft_tokens < 1:
            return RoundPlan(num_draft_tokens=0, reason="limit_near")
        return self._plan_auto(bucket, batch_bucket(batch_size), request, max_draft_tokens)

    def observe(self, request: RequestView, round_: RoundObserved) -> None:
        """Learn from one finished round."""
        bucket = self._bucket(round_.batch_size)
        bucket.num_rounds += 1
        bucket.since_refresh += 1
        if round_.num_draft_tokens > 0:
            for estimate in (bucket.acceptance, request.acceptance):
                estimate.observe(
                    num_draft_tokens=round_.num_draft_tokens,
                    num_accepted_tokens=round_.num_accepted_tokens,
                    is_cut=round_.is_cut,
                )
        if round_.is_clean:
            self._costs.cell(batch_bucket(round_.batch_size), round_.num_draft_tokens).observe(round_.round_s)

    def reports(self) -> list[BucketReport]:
        """One per bucket seen."""
        return [self._report(size, bucket) for size, bucket in sorted(self._buckets.items())]

    def _bucket(self, batch_size: int) -> _Bucket:
        size = batch_bucket(batch_size)
        if size not in self._buckets:
            self._buckets[size] = _Bucket(
                AcceptanceEstimate(
                    half_life_rounds=self._limits.bucket_half_life_rounds, max_draft_tokens=self._limits.candidates[-1]
                )
            )
        return self._buckets[size]

    def _plan_auto(self, bucket: _Bucket, size: int, request: RequestView, max_draft_tokens: int) -> RoundPlan:
        usable = [k for k in self._limits.candidates if k <= max_draft_tokens]
        for k in (0, *usable):
            if not self._costs.cell(size, k).is_seeded:
                bucket.state = "BASE" if k == 0 else "PROBE"
                bucket.reason, bucket.chosen = f"measuring K={k}", k
                return RoundPlan(num_draft_tokens=k, reason="measuring")
        plain_s = self._costs.cell(size, 0).seconds
        assert plain_s is not None
        rates = self._rates(bucket, request)
        speedups = {k: self._speedup(size, k, plain_s, rates) for k in usable}
        best = max(usable, key=lambda k: speedups[k])
        is_on = speedups[best] > 1.0 + self._limits.margin
        bucket.state = "ON" if is_on else "OFF"
        bucket.chosen = best if is_on else 0
        bucket.reason = f"K={best} gives {speedups[best]:.2f} times plain decode"
        if bucket.since_refresh >= self._limits.refresh_rounds:
            bucket.since_refresh = 0
            return RoundPlan(num_draft_tokens=0 if is_on else best, reason="refresh")
        return RoundPlan(num_draft_tokens=bucket.chosen, reason="pays" if is_on else "below_break_even")

    def _rates(self, bucket: _Bucket, request: RequestView | None) -> list[float]:
        prior = [self._limits.prior_rate] * self._limits.candidates[-1]
        rates = bucket.acceptance.conditional_rates(prior=prior, prior_weight=1.0)
        if request is None:
            return rates
        return request.acceptance.conditional_rates(prior=rates, prior_weight=self._limits.request_prior_rounds)

    def _speedup(self, size: int, num_draft_tokens: int, plain_s: float, rates: list[float]) -> float:
        seconds = self._costs.cell(size, num_draft_tokens).seconds
        assert seconds is not None
        return expected_committed_tokens(rates, num_draft_tokens) * plain_s / seconds

    def _report(self, size: int, bucket: _Bucket) -> BucketReport:
        known = self._costs.known(size)
        plain_s = known[0].seconds if 0 in known else None
        shown = bucket.chosen or max((k for k in known if k), default=0, key=lambda k: known[k].count)
        cost_s = known[shown].seconds if shown in known else None
        rates = self._rates(bucket, None)
        has_history = bucket.acceptance.weight > 0
        can_compare = plain_s is not None and cost_s is not None and shown > 0
        return BucketReport(
            batch_size=size,
            state=bucket.state,
            reason=bucket.reason,
            num_draft_tokens=bucket.chosen,
            plain_s=plain_s,
            round_costs=known,
            acceptance_length=expected_committed_tokens(rates, shown) if has_history and shown else None,
            break_even_length=cost_s / plain_s if can_compare and cost_s and plain_s else None,
            speedup=self._speedup(size, shown, plain_s, rates) if can_compare and plain_s and has_history else None,
        )
