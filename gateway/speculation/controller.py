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

from gateway.speculation.acceptance_estimate import AcceptanceEstimate, expected_committed_tokens
from gateway.speculation.batch_round import BatchRound
from gateway.speculation.bucket import Bucket
from gateway.speculation.change_detection import FirstTokenCusum
from gateway.speculation.choose_k import (
    Choice,
    choose_for_batch,
    choose_num_draft_tokens,
    expected_by_candidate,
    promising_num_draft_tokens,
)
from gateway.speculation.costs import BUCKETS, batch_bucket, context_class
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

_CLASS_SLACK = 1.15  # a mean context length must pass the edge by so much to change the class


class Controller:
    """Pure: every input is an argument, the same inputs give the same decisions.

    One instance for all requests. Each request calls ``plan_round`` and ``observe`` in turn; requests interleave freely.
    """

    def __init__(self, limits: ControllerLimits) -> None:
        self._limits = limits
        self._buckets: dict[tuple[int, int], Bucket] = {}
        self._acceptance = AcceptanceEstimate(
            half_life_rounds=limits.bucket_half_life_rounds, max_draft_tokens=limits.candidates[-1]
        )
        self._first_token = FirstTokenCusum()
        self._rates = self._prior_rates()
        self._current: Bucket | None = None
        self._is_drafter_up = False
        self._drafter_reason = "not connected yet"
        self._num_requests = 0
        self._tick = 0

    # ---------------------------------------------------------------- what the loop calls

    def set_drafter(self, *, is_up: bool, reason: str) -> None:
        """The drafter came or went. A new one may draft differently, so most of the acceptance memory goes."""
        if is_up and not self._is_drafter_up:
            self._acceptance.shrink(self._limits.alarm_keep)
        self._is_drafter_up, self._drafter_reason = is_up, reason
        for bucket in self._buckets.values():
            self._align_with_drafter(bucket, bucket.last_s)

    def new_request(self) -> RequestView:
        """History record for a new request."""
        self._num_requests += 1
        return RequestView(self._limits, serial=self._num_requests)

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
        bucket = self._bucket_for(batch_size, context_len, now_s)
        request.bucket = bucket
        plan = self._forced(bucket, override, max_draft_tokens)
        request.is_gated = plan is None
        if plan is None:
            most = max_draft_tokens if override.num_draft_tokens is None else override.num_draft_tokens
            plan = self._plan_gated(bucket, request, max(1, min(most, max_draft_tokens)), now_s)
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
        bucket.last_s = round_.now_s
        if round_.num_draft_tokens > 0:
            self._learn_acceptance(
                bucket, request, round_.num_draft_tokens, round_.num_accepted_tokens, is_cut=round_.is_cut
            )
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
        )
        if done is None:
            return
        seconds = self._seconds(bucket, done)
        if seconds is None:
            return
        if bucket.settle_left > 0:
            bucket.settle_left -= 1
        elif done.cost_k == 0:
            if done.is_fair and not done.is_shadowed:
                bucket.learn_plain(seconds)
                self._leave_base(bucket, round_.now_s)
        else:
            bucket.learn_spec(done.tokens, seconds, now_s=round_.now_s)
            self._judge_request(bucket, request, done.tokens, seconds)
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
        self._learn_acceptance(bucket, request, num_draft_tokens, num_accepted_tokens, is_cut=False)
        plain_s, cost_s = bucket.plain_s, bucket.costs.likely_seconds(num_draft_tokens)
        if plain_s is None or cost_s is None:
            return
        if bucket.gate.state == "OFF":
            bucket.lookout.observe_shadow(1.0 + num_accepted_tokens, round_s=cost_s, plain_s=plain_s)
        elif request.is_suspended_in(bucket):
            request.lookout.observe_shadow(1.0 + num_accepted_tokens, round_s=cost_s, plain_s=plain_s)

    def reports(self) -> list[BucketReport]:
        """One per batch bucket seen, for the context class used last."""
        newest: dict[int, Bucket] = {}
        for (size, _), bucket in self._buckets.items():
            if size not in newest or bucket.last_s >= newest[size].last_s:
                newest[size] = bucket
        return [bucket_report(bucket, self._rates) for _, bucket in sorted(newest.items())]

    # ---------------------------------------------------------------- planning

    def _forced(self, bucket: Bucket, override: Override, max_draft_tokens: int) -> RoundPlan | None:
        if not self._is_drafter_up:
            return RoundPlan(num_draft_tokens=0, reason="drafter_down")
        if override.mode == "off":
            return RoundPlan(num_draft_tokens=0, reason="client_off")
        if override.mode == "on":
            wanted = override.num_draft_tokens or self._limits.default_num_draft_tokens
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="client_on")
        if self._limits.mode != "auto":
            wanted = self._limits.default_num_draft_tokens if self._limits.mode == "on" else 0
            bucket.chosen = wanted
            return RoundPlan(num_draft_tokens=min(wanted, max_draft_tokens), reason="pinned")
        if max_draft_tokens < 1:
            return RoundPlan(num_draft_tokens=0, reason="limit_near")
        return None

    def _plan_gated(self, bucket: Bucket, request: RequestView, most: int, now_s: float) -> RoundPlan:
        state = bucket.gate.state
        if state == "BASE":
            return RoundPlan(num_draft_tokens=0, reason="base")
        if state == "OFF":
            plain = self._plan_off(bucket, request, now_s)
            if plain is not None:
                return plain
        if bucket.gate.state == "PROBE":
            return RoundPlan(num_draft_tokens=self._at_most(bucket.probe_k, most), reason="probe")
        if bucket.refresh_left > 0:
            return RoundPlan(num_draft_tokens=0, reason="refresh")
        if request.is_suspended_in(bucket):
            plain = self._plan_suspended(bucket, request)
            if plain is not None:
                return plain
        return self._plan_on(bucket, request, most)

    def _plan_off(self, bucket: Bucket, request: RequestView, now_s: float) -> RoundPlan | None:
        plain_s = bucket.plain_s
        assert plain_s is not None
        event = bucket.lookout.verdict(plain_s)
        if event is None:
            return self._plain_or_shadow(bucket, request, bucket, "below_break_even")
        bucket.gate.apply(event, reason=event.replace("_", " "), now_s=now_s)
        bucket.start_probe(self._promising_k(bucket, request))
        return None

    def _plan_suspended(self, bucket: Bucket, request: RequestView) -> RoundPlan | None:
        plain_s = bucket.plain_s
        assert plain_s is not None
        if request.lookout.verdict(plain_s) is None:
            return self._plain_or_shadow(bucket, request, request, "request_suspended")
        request.suspended_tick = 0
        # On probation: half the allowed loss is already on the meter.
        request.meter.start(loss_s=0.5 * self._limits.request_loss_tokens * plain_s)
        return None

    def _plain_or_shadow(
        self, bucket: Bucket, request: RequestView, watcher: Bucket | RequestView, reason: str
    ) -> RoundPlan:
        if request.shadow_rounds_left == 0:
            k = self._promising_k(bucket, request)
            if watcher.lookout.takes_shadow(num_draft_tokens=k, overhead_tokens=bucket.overhead_tokens):
                return RoundPlan(num_draft_tokens=k, reason=reason, is_shadow=True)
        return RoundPlan(num_draft_tokens=0, reason=reason)

    def _plan_on(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        exploring = bucket.explores()
        if exploring:
            return RoundPlan(num_draft_tokens=self._at_most(exploring, most), reason="measuring")
        candidates = self._limits.candidates
        expected = expected_by_candidate(self._request_rates(request), [k for k in candidates if k <= most])
        choice = choose_num_draft_tokens(bucket.costs, expected, candidates, current=request.last_k)
        if choice is None:
            return RoundPlan(num_draft_tokens=self._at_most(bucket.probe_k, most), reason="measuring")
        if bucket.may_explore():
            bar = choice.tok_per_s * (1.0 + self._limits.explore_gain)
            k = choice.num_draft_tokens
            wanted = promising_num_draft_tokens(
                bucket.costs.low_seconds, expected, candidates, above_tok_per_s=bar, current=k
            )
            bucket.start_exploring(wanted)
        request.last_k = self._share_of_batch(bucket, request, expected, choice)
        if request.last_k == 0:
            return self._plain_or_shadow(bucket, request, request, "worth_less_than_batch_time")
        return RoundPlan(num_draft_tokens=request.last_k, reason="pays")

    def _share_of_batch(self, bucket: Bucket, request: RequestView, expected: list[float], choice: Choice) -> int:
        rate, slope_s = bucket.spec_rate.tok_per_s, bucket.costs.slope_s() if bucket.batch > 1 else None
        if rate is None or slope_s is None:
            return choice.num_draft_tokens
        return choose_for_batch(
            expected, self._limits.candidates, tokens_per_draft=rate * slope_s, current=request.last_k
        )

    def _promising_k(self, bucket: Bucket, request: RequestView) -> int:
        expected = expected_by_candidate(self._request_rates(request), self._limits.candidates)
        wanted = promising_num_draft_tokens(
            bucket.costs.likely_seconds, expected, self._limits.candidates, above_tok_per_s=0.0, current=0
        )
        return self._limits.default_num_draft_tokens if wanted is None else wanted

    def _at_most(self, wanted: int, most: int) -> int:
        return wanted if wanted <= most else max((k for k in self._limits.candidates if k <= most), default=most)

    # ---------------------------------------------------------------- learning

    def _learn_acceptance(
        self, bucket: Bucket, request: RequestView, num_draft_tokens: int, num_accepted_tokens: int, *, is_cut: bool
    ) -> None:
        if not is_cut or num_accepted_tokens > 0:
            is_changed = self._first_token.observe(is_accepted=num_accepted_tokens > 0, believed_rate=self._rates[0])
            if is_changed:
                self._acceptance.shrink(self._limits.alarm_keep)
                bucket.lookout.acceptance_changed()
        for estimate in (self._acceptance, request.acceptance):
            estimate.observe(num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, is_cut=is_cut)
        self._rates = self._prior_rates()

    def _seconds(self, bucket: Bucket, done: BatchRound) -> float | None:
        """What the round's time counts as; feeds the cost cell if it is a fair sample of it."""
        is_usable = not done.is_shadowed or not bucket.costs.is_measured(0)
        if done.is_fair and is_usable and bucket.settle_left == 0:
            return bucket.learn_cost(done.cost_k, done.seconds)
        cell = bucket.costs.cell(done.cost_k)
        return cell.clamp(done.seconds) if done.is_fair else cell.seconds

    def _count_plain(self, bucket: Bucket, request: RequestView, round_: RoundObserved) -> None:
        if bucket.gate.state == "OFF":
            bucket.lookout.count_plain(round_.num_committed_tokens, share=1.0 / bucket.batch)
        elif request.is_suspended_in(bucket):
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
        request.meter.add(-extra_s)

    def _judge_request(self, bucket: Bucket, request: RequestView, tokens: float, seconds: float) -> None:
        plain_s = bucket.plain_s
        if bucket.gate.state != "ON" or plain_s is None or bucket.batch > 1 or not request.is_gated:
            return  # in a batch the request's share is decided by choose_for_batch
        request.meter.add(tokens * plain_s - seconds)
        allowed_s = self._limits.request_loss_tokens * plain_s
        if request.meter.loss_s > allowed_s:
            self._tick += 1
            request.suspended_tick = self._tick
            bucket.num_suspensions += 1
            request.lookout.start(has_paid=request.meter.gain_s > allowed_s)
            request.meter.start()

    def _leave_base(self, bucket: Bucket, now_s: float) -> None:
        if bucket.gate.state != "BASE" or not bucket.has_baseline():
            return
        index = BUCKETS.index(bucket.batch)
        smaller = self._buckets.get((BUCKETS[index - 1], bucket.context_class)) if index else None
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
            self._tick += 1
            bucket.gate.apply("won", reason=f"K={bucket.probe_k} is faster than plain decode", now_s=now_s)
            bucket.turn_on(self._tick)
            return
        bucket.num_probes_lost += 1
        other = self._unmeasured_that_pays(bucket, request)
        if other is not None:
            bucket.start_probe(other)
            return
        bucket.gate.apply("lost", reason=f"K={bucket.probe_k} is slower than plain decode", now_s=now_s)
        bucket.turn_off(has_paid=False)

    def _unmeasured_that_pays(self, bucket: Bucket, request: RequestView) -> int | None:
        plain_s = bucket.plain_s
        assert plain_s is not None
        k = self._promising_k(bucket, request)
        cost_s = bucket.costs.low_seconds(k)
        if bucket.costs.is_measured(k) or cost_s is None:
            return None
        speedup = expected_committed_tokens(self._request_rates(request), k) * plain_s / cost_s
        return k if speedup > 1.0 + self._limits.margin else None

    # ---------------------------------------------------------------- buckets and estimates

    def _prior_rates(self) -> list[float]:
        return self._acceptance.continued_rates(first=self._limits.prior_rate, prior_weight=self._limits.prior_rounds)

    def _request_rates(self, request: RequestView) -> list[float]:
        return request.acceptance.conditional_rates(prior=self._rates, prior_weight=self._limits.request_prior_rounds)

    def _bucket_for(self, batch_size: int, context_len: int, now_s: float) -> Bucket:
        current = self._current
        mean_context = float(context_len)
        if current is not None and batch_size > 1:
            mean_context = current.context_len + (context_len - current.context_len) / batch_size
        size, level = batch_bucket(batch_size), context_class(mean_context)
        if current is not None:
            if size != current.batch and current.batch >= 4 and _is_near(batch_size, current.batch):
                size = current.batch
            is_near_level = (
                context_class(mean_context / _CLASS_SLACK)
                <= current.context_class
                <= context_class(mean_context * _CLASS_SLACK)
            )
            if batch_size > 1 and is_near_level:
                level = current.context_class
        bucket = self._buckets.get((size, level))
        if bucket is None:
            bucket = self._new_bucket(size, level, now_s)
        elif now_s - bucket.last_s > self._limits.stale_after_s:
            bucket.lookout.costs_changed()
            bucket.last_s = now_s
        self._current = bucket
        bucket.context_len = mean_context
        return bucket

    def _new_bucket(self, size: int, level: int, now_s: float) -> Bucket:
        bucket = Bucket(self._limits, batch=size, context_class=level)
        bucket.last_s = bucket.gate.since_s = now_s
        siblings = [other for (other_size, _), other in self._buckets.items() if other_size == size]
        if siblings:
            bucket.inherit(min(siblings, key=lambda other: abs(other.context_class - level)), now_s=now_s)
        self._buckets[size, level] = bucket
        self._align_with_drafter(bucket, now_s)
        return bucket

    def _align_with_drafter(self, bucket: Bucket, now_s: float) -> None:
        gate = bucket.gate
        if not self._is_drafter_up:
            gate.apply("drafter_down", reason=self._drafter_reason, now_s=now_s)
            bucket.chosen = 0
        elif self._limits.mode != "auto":
            if gate.state != "PINNED":
                gate.apply("pinned", reason=f"mode is {self._limits.mode}", now_s=now_s)
        elif gate.state == "FAULT":
            if bucket.has_baseline():
                gate.apply("drafter_up", reason="the drafter is back", now_s=now_s)
                bucket.start_probe(bucket.probe_k)
            else:
                gate.apply("drafter_up_unmeasured", reason="measuring plain decode", now_s=now_s)


def _is_near(batch_size: int, bucket: int) -> bool:
    """Whether a batch is at most one stream outside ``bucket``: load that swings around an edge must not flip."""
    return bucket // 2 <= batch_size <= bucket + 1
