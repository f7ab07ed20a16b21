"""Decides how many tokens to draft, 0 included, from measured costs and measured acceptance.

For streams in a batch of size B, with round times C(K) (drafting, verifying and all waiting, seconds of wall time from
one commit to the next) and t = C(0):

    E(K)        = 1 + sum_{i=1..K} P(first i drafts accepted)        tokens a round
    speedup(K)  = (E(K) / C(K)) / (1 / t) = E(K) * t / C(K)          dimensionless
    break-even acceptance length of K = C(K) / t                     tokens a round

The K with the largest E(K) / C(K) is used; whether to speculate at all is decided on delivered tokens per wall time:

    PROBE  ln(delivered rate of the probe / plain rate), with its standard error, against the margin    rate_estimate.py
    ON     seconds lost against plain decode since the best moment                                      loss_meter.py
    OFF    seconds that shadow drafts would have gained                                                 lookout.py

Two gates: the bucket's (gate.py) and under it each request's own, which suspends only that request.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.batch_round import BatchRound
from gateway.speculation.bucket import Bucket
from gateway.speculation.bucket_table import BucketTable
from gateway.speculation.planning import Planner
from gateway.speculation.records import BucketReport, ControllerLimits, Override, RoundObserved, RoundPlan
from gateway.speculation.report import bucket_report
from gateway.speculation.request_view import RequestView

__all__ = [
    "BucketReport",
    "Controller",
    "ControllerLimits",
    "Override",
    "RequestView",
    "RoundObserved",
    "RoundPlan",
]

# Costs are compared as ratios: a clock that did not move between two commits must not make one of them zero.
_MIN_ROUND_S = 1e-6


class Controller:
    """Pure: every input is an argument, the same inputs give the same decisions.

    One instance for all requests. Each request calls ``plan_round`` and ``observe`` in turn; requests interleave
    freely.
    """

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._buckets = BucketTable(limits)
        self._pool = AcceptancePool(limits)
        self._planner = Planner(limits, self._pool)
        self._num_requests = 0

    # ---------------------------------------------------------------- what the loop calls

    def set_drafter(self, *, is_up: bool, reason: str) -> None:
        """The drafter came or went. A new one may draft differently, so most of the acceptance memory goes."""
        if is_up and not self._buckets.is_drafter_up:
            self._pool.forget()
        self._buckets.set_drafter(is_up=is_up, reason=reason)

    def new_request(self) -> RequestView:
        """History record for a new request."""
        self._num_requests += 1
        return RequestView(self._limits, self._pool.new_belief(), serial=self._num_requests)

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
            batch_size: streams decoding now, this one included, >= 1; streams that compute a prompt do not count.
            max_draft_tokens: what the request's own limits allow; more makes no sense.
            context_len: prompt and output so far, tokens.
            override: the client's wish for this request.
            now_s: monotonic seconds.
        """
        bucket = self._buckets.for_round(batch_size, context_len, now_s)
        request.bucket = bucket
        plan = self._forced(bucket, override, max_draft_tokens)
        request.is_gated = plan is None
        if plan is None:
            most = max_draft_tokens if override.num_draft_tokens is None else override.num_draft_tokens
            plan = self._planner.plan(bucket, request, max(1, min(most, max_draft_tokens)), now_s)
        request.planned_k = 0 if plan.is_shadow else plan.num_draft_tokens
        if plan.is_shadow:
            request.shadow_rounds_left, request.shadow_extra_s = plan.num_draft_tokens + 2, 0.0
        if request.is_gated and plan.reason != "refresh":
            bucket.chosen = request.planned_k
        return plan

    def observe(self, request: RequestView, round_: RoundObserved) -> None:
        """Learn from one finished round. A request's first round, the prompt, has no plan and must not come here."""
        bucket = request.bucket
        assert bucket is not None
        if round_.round_s < _MIN_ROUND_S:
            round_ = replace(round_, round_s=_MIN_ROUND_S)
        bucket.last_s = round_.now_s
        if round_.num_draft_tokens > 0:
            self._pool.observe(
                request.belief,
                num_draft_tokens=round_.num_draft_tokens,
                num_accepted_tokens=round_.num_accepted_tokens,
                is_cut=round_.is_cut,
            )
        self._pool.pass_tokens(request.belief, round_.num_committed_tokens)
        is_shadowed = request.shadow_rounds_left > 0
        if request.planned_k == 0:
            self._count_plain(bucket, request, round_)
        if round_.is_resync or round_.is_draft_lost:
            self._observe_overhead(bucket, request, round_)
            return
        if round_.is_cut:
            return
        done = bucket.rounds.add(
            num_draft_tokens=round_.num_draft_tokens,
            tokens=round_.num_committed_tokens,
            seconds=round_.round_s,
            is_fair=round_.is_clean,
            is_shadowed=is_shadowed,
            is_pinned=not request.is_gated and round_.num_draft_tokens > 0,
        )
        if done is None:
            return
        bucket.has_pinned = done.is_pinned
        bucket.refresh_left = max(0, bucket.refresh_left - 1)
        seconds = self._seconds(bucket, done)
        if seconds is None:
            return
        if bucket.settle_left > 0:
            bucket.settle_left -= 1
        elif done.cost_k == 0:
            if done.is_fair and not done.is_shadowed:
                bucket.learn_plain(seconds)
                self._leave_base(bucket, round_.now_s)
        elif done.is_pinned and bucket.batch == 1:
            bucket.spec_rate.observe(done.tokens, seconds)  # known, but the gate judges only what it decided
        else:
            bucket.learn_spec(done.tokens, seconds, now_s=round_.now_s)
            if bucket.gate.state == "PROBE":
                self._judge_probe(bucket, request, round_.now_s)

    def observe_shadow(
        self,
        request: RequestView,
        *,
        batch_size: int,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        now_s: float,
    ) -> None:
        """A shadow was scored: ``num_accepted_tokens`` of its drafts are what the plain stream brought."""
        bucket = request.bucket
        if bucket is None or num_draft_tokens < 1:
            return
        bucket.last_s = now_s
        bucket.num_shadows += 1
        if request.shadow_rounds_left > 0:
            request.shadow_rounds_left = 0
            bucket.learn_shadow_overhead(request.shadow_extra_s)
        self._pool.observe(
            request.belief, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, is_cut=False
        )
        prospect = self._planner.prospect(bucket, request)
        if prospect is None or bucket.plain_s is None:
            return
        tokens = 1.0 + min(num_accepted_tokens, prospect.num_draft_tokens)
        watcher = bucket if bucket.gate.state == "OFF" else request
        watcher.lookout.observe_shadow(tokens, round_s=prospect.cost_tokens * bucket.plain_s)

    def reports(self) -> list[BucketReport]:
        """One per batch bucket seen, for the context class used last."""
        mixture = self._pool.mixture
        expected = dict(zip(self._limits.candidates, self._pool.expected_tokens(mixture), strict=True))
        return [bucket_report(bucket, expected) for bucket in self._buckets.newest()]

    # ---------------------------------------------------------------- planning

    def _forced(self, bucket: Bucket, override: Override, max_draft_tokens: int) -> RoundPlan | None:
        if override.mode == "off":
            return RoundPlan(num_draft_tokens=0, reason="client_off")
        if self._limits.mode == "off" and override.mode == "auto":
            return RoundPlan(num_draft_tokens=0, reason="pinned")
        if not self._buckets.is_drafter_up:
            return RoundPlan(num_draft_tokens=0, reason="drafter_down")
        if override.mode == "on":
            if bucket.gate.state == "BASE":
                bucket.gate.reason = "a client pins speculation on: plain decode is not measured yet"
            wanted = override.num_draft_tokens or self._limits.default_num_draft_tokens
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="client_on")
        if self._limits.mode != "auto":
            wanted = self._limits.default_num_draft_tokens if self._limits.mode == "on" else 0
            bucket.chosen = wanted
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="pinned")
        if max_draft_tokens < 1:
            return RoundPlan(num_draft_tokens=0, reason="limit_near")
        return None

    # ---------------------------------------------------------------- learning

    def _seconds(self, bucket: Bucket, done: BatchRound) -> float | None:
        """What the round's time counts as; feeds the cost cell if it is a fair sample of it."""
        is_usable = not done.is_shadowed or not bucket.costs.is_measured(0)
        if done.is_fair and is_usable and not done.is_mixed and bucket.settle_left == 0:
            return bucket.learn_cost(done.cost_k, done.seconds)
        cell = bucket.costs.cell(done.cost_k)
        return cell.clamp(done.seconds) if done.is_fair else cell.seconds

    def _count_plain(self, bucket: Bucket, request: RequestView, round_: RoundObserved) -> None:
        if bucket.gate.state == "OFF":
            bucket.lookout.count_plain(round_.num_committed_tokens, share=1.0 / bucket.batch)
        elif request.is_suspended:
            request.lookout.count_plain(round_.num_committed_tokens, share=1.0)
        if request.shadow_rounds_left > 0:
            plain_s = bucket.plain_s
            if plain_s is not None and round_.is_clean:
                request.shadow_extra_s += min(round_.round_s, 2.0 * plain_s) - plain_s
            request.shadow_rounds_left -= 1

    def _observe_overhead(self, bucket: Bucket, request: RequestView, round_: RoundObserved) -> None:
        """A round that speculation delayed and did nothing for."""
        plain_s = bucket.plain_s
        if plain_s is None or not request.is_gated or not (round_.is_clean or round_.is_draft_lost):
            return
        extra_s = max(0.0, min(round_.round_s, 10.0 * plain_s) - plain_s)
        bucket.charge(extra_s, now_s=round_.now_s)

    def _leave_base(self, bucket: Bucket, now_s: float) -> None:
        if bucket.gate.state != "BASE" or not bucket.has_baseline():
            return
        smaller = self._buckets.smaller(bucket)
        if self._limits.is_monotone and smaller is not None and smaller.gate.state == "OFF":
            bucket.gate.apply("smaller_loses", reason="speculation loses at a smaller batch already", now_s=now_s)
            bucket.turn_off(has_paid=True)
            bucket.costs.inherit(smaller.costs)
            return
        bucket.gate.apply("measured", reason="plain decode is measured, drafts are tried", now_s=now_s)
        bucket.start_probe(self._limits.default_num_draft_tokens)

    def _judge_probe(self, bucket: Bucket, request: RequestView, now_s: float) -> None:
        has_won = bucket.probe_verdict()
        if has_won is None:
            return
        if has_won:
            bucket.gate.apply("won", reason=f"K={bucket.probe_k} is faster than plain decode", now_s=now_s)
            bucket.turn_on()
            return
        bucket.num_probes_lost += 1
        other = self._planner.unmeasured_that_pays(bucket, request)
        if other is not None:
            bucket.start_probe(other)
            return
        bucket.gate.apply("lost", reason=f"K={bucket.probe_k} is slower than plain decode", now_s=now_s)
        bucket.turn_off(has_paid=False)
