"""What a round should do, given the state of its bucket and of its request. Learns nothing; it only opens probes."""

from __future__ import annotations

from gateway.speculation.acceptance_estimate import expected_committed_tokens
from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.bucket import Bucket
from gateway.speculation.choose_k import (
    Choice,
    choose_for_batch,
    choose_num_draft_tokens,
    expected_by_candidate,
    promising_num_draft_tokens,
)
from gateway.speculation.records import ControllerLimits, RoundPlan
from gateway.speculation.request_view import RequestView

__all__ = ["Planner"]


class Planner:
    """Plans the rounds that the gates decide on; pins, client wishes and limits come before it.

    Args:
        pool: acceptance of all requests, borrowed from the controller.
    """

    def __init__(self, limits: ControllerLimits, pool: AcceptancePool) -> None:
        self._limits = limits
        self._pool = pool

    def plan(self, bucket: Bucket, request: RequestView, most: int, now_s: float) -> RoundPlan:
        """K of the next round of ``request`` in ``bucket``, at most ``most`` (>= 1). Opens probes that are due."""
        state = bucket.gate.state
        if state == "BASE":
            return RoundPlan(num_draft_tokens=0, reason="base")
        if state == "OFF":
            plain = self._plan_off(bucket, request, now_s)
            if plain is not None:
                return plain
        if bucket.gate.state == "PROBE":
            return self._plan_probe(bucket, request, most)
        if bucket.refresh_left > 0:
            return RoundPlan(num_draft_tokens=0, reason="refresh")
        if request.is_suspended_in(bucket):
            plain = self._plan_suspended(bucket, request)
            if plain is not None:
                return plain
        return self._plan_on(bucket, request, most)

    def _plan_probe(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        wanted = bucket.probe_k
        tokens_per_draft = self._tokens_per_draft(bucket)
        if tokens_per_draft is not None:
            candidates = [k for k in self._limits.candidates if k <= most]
            expected = expected_by_candidate(self._pool.request_rates(request.acceptance), candidates)
            share = choose_for_batch(expected, candidates, tokens_per_draft=tokens_per_draft, current=wanted)
            wanted = min(wanted, max(share, 1))
        return RoundPlan(num_draft_tokens=self._at_most(wanted, most), reason="probe")

    def _plan_off(self, bucket: Bucket, request: RequestView, now_s: float) -> RoundPlan | None:
        plain_s = bucket.plain_s
        assert plain_s is not None
        event = bucket.lookout.verdict(plain_s)
        if event is None:
            return self._plain_or_shadow(bucket, request, bucket, "below_break_even")
        bucket.gate.apply(event, reason=event.replace("_", " "), now_s=now_s)
        bucket.start_probe(self.promising_k(bucket, request))
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
            request.shadow_k = self.promising_k(bucket, request)
            # A longer draft costs the plain stream no more and says more.
            drafted = max(request.shadow_k, self._limits.default_num_draft_tokens)
            if watcher.lookout.takes_shadow(num_draft_tokens=drafted, overhead_tokens=bucket.overhead_tokens):
                return RoundPlan(num_draft_tokens=drafted, reason=reason, is_shadow=True)
        return RoundPlan(num_draft_tokens=0, reason=reason)

    def _plan_on(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        exploring = bucket.explores()
        if exploring:
            return RoundPlan(num_draft_tokens=self._at_most(exploring, most), reason="measuring")
        candidates = self._limits.candidates
        expected = expected_by_candidate(
            self._pool.request_rates(request.acceptance), [k for k in candidates if k <= most]
        )
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
        tokens_per_draft = self._tokens_per_draft(bucket)
        if tokens_per_draft is None:
            return choice.num_draft_tokens
        return choose_for_batch(
            expected, self._limits.candidates, tokens_per_draft=tokens_per_draft, current=request.last_k
        )

    def _tokens_per_draft(self, bucket: Bucket) -> float | None:
        """What one stream's draft token costs the fleet of a batch, in tokens; None if unknown or no batch."""
        rate = bucket.spec_rate.tok_per_s if bucket.batch > 1 else None
        slope_s = bucket.costs.slope_s() if rate is not None else None
        return None if rate is None or slope_s is None else rate * slope_s

    def promising_k(self, bucket: Bucket, request: RequestView) -> int:
        """The K to probe or to score shadows for: the best one if every cost is as low as it may be."""
        expected = expected_by_candidate(self._pool.request_rates(request.acceptance), self._limits.candidates)
        wanted = promising_num_draft_tokens(
            bucket.costs.low_seconds, expected, self._limits.candidates, above_tok_per_s=0.0, current=0
        )
        return self._limits.default_num_draft_tokens if wanted is None else wanted

    def _at_most(self, wanted: int, most: int) -> int:
        return wanted if wanted <= most else max((k for k in self._limits.candidates if k <= most), default=most)

    def unmeasured_that_pays(self, bucket: Bucket, request: RequestView) -> int | None:
        """A K without measurements that may beat plain decode by the margin; None if there is none."""
        plain_s = bucket.plain_s
        assert plain_s is not None
        k = self.promising_k(bucket, request)
        cost_s = bucket.costs.low_seconds(k)
        if bucket.costs.is_measured(k) or cost_s is None:
            return None
        rates = self._pool.request_rates(request.acceptance)
        speedup = expected_committed_tokens(rates, k) * plain_s / cost_s
        return k if speedup > 1.0 + self._limits.margin else None
