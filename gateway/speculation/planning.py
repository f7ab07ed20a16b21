"""What a round should do, given the state of its bucket and of its request. It opens probes and trials.

A request that is its bucket's only stream speculates or is plain by its belief. With gain and loss the plain tokens
that a round may win and lose, each weighted by its chance (AcceptancePool.prospect), a speculating one goes plain when

    stay_odds * gain + switch_tokens < loss

and a plain one speculates again when return_odds * gain > loss + switch_tokens. Odds above 1 because a gain lasts as
long as the text stays as it is, while a loss ends after the few rounds that show it. Value iteration of the exact
problem with two known levels (benchmarks/controller/informed.py) leaves at odds of 2.7 to 3.2 and returns at 1.6 to
1.9, on five workloads. In a batch a request's share of drafts, 0 included, comes from choose_for_batch instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.speculation.acceptance_pool import AcceptancePool
from gateway.speculation.bucket import Bucket
from gateway.speculation.choose_k import (
    Choice,
    choose_for_batch,
    choose_num_draft_tokens,
    promising_num_draft_tokens,
)
from gateway.speculation.records import ControllerLimits, RoundPlan
from gateway.speculation.request_view import RequestView

__all__ = ["Planner", "Prospect"]

_TRIAL_ROUNDS = 4  # of a suspended request that looks whether costs have changed


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a round with K drafts is believed to do.

    Fields:
        cost_tokens: C(K) / t. gain, loss: plain tokens of time, weighted by their chances: gain - loss is the mean.
    """

    num_draft_tokens: int
    cost_tokens: float
    gain: float
    loss: float


class Planner:
    """Plans the rounds that the gates decide on; pins, client wishes and limits come before it.

    Args:
        pool: acceptance of all requests, borrowed from the controller.
    """

    def __init__(self, limits: ControllerLimits, pool: AcceptancePool) -> None:
        self._limits = limits
        self._pool = pool
        self._index = {k: index for index, k in enumerate(limits.candidates)}

    def plan(self, bucket: Bucket, request: RequestView, most: int, now_s: float) -> RoundPlan:
        """K of the next round of ``request`` in ``bucket``, at most ``most`` (>= 1). Opens probes that are due."""
        state = bucket.gate.state
        if bucket.has_pinned and bucket.batch > 1 and state in ("BASE", "OFF"):
            return self._plan_beside_pinned(bucket, request, most)
        if state == "BASE":
            bucket.gate.reason = "plain decode is being measured"
            return RoundPlan(num_draft_tokens=0, reason="base")
        if state == "OFF":
            plain = self._plan_off(bucket, request, now_s)
            if plain is not None:
                return plain
        if bucket.gate.state == "PROBE":
            return self._plan_probe(bucket, request, most)
        if bucket.refresh_left > 0:
            return RoundPlan(num_draft_tokens=0, reason="refresh")
        return self._plan_on(bucket, request, most)

    def _plan_probe(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        wanted = bucket.probe_k
        tokens_per_draft = self._tokens_per_draft(bucket)
        if tokens_per_draft is not None:
            expected = self._pool.expected_tokens(request.belief.shares)
            share = choose_for_batch(
                expected, self._candidates(most), tokens_per_draft=tokens_per_draft, current=wanted
            )
            wanted = min(wanted, max(share, 1))
        return RoundPlan(num_draft_tokens=self._at_most(wanted, most), reason="probe")

    def _plan_off(self, bucket: Bucket, request: RequestView, now_s: float) -> RoundPlan | None:
        prospect = self.prospect(
            bucket, request, margin_tokens=self._limits.switch_tokens * (1 + min(bucket.lookout.doubts, 2))
        )
        mean = None
        if prospect is not None:
            bucket.learn_outlook(prospect.gain, prospect.loss)
            mean = bucket.outlook_gain - bucket.outlook_loss
        pays = self._limits.return_odds * bucket.outlook_gain > bucket.outlook_loss
        if pays and bucket.lookout.num_shadows > 0:
            bucket.gate.apply("shadow_pays", reason="shadow pays", now_s=now_s)
        elif bucket.lookout.is_probe_due(mean):
            bucket.gate.apply("probe_due", reason="probe due", now_s=now_s)
        else:
            return self._plain_or_shadow(bucket, request, prospect, "below_break_even")
        bucket.start_probe(self._limits.default_num_draft_tokens if prospect is None else prospect.num_draft_tokens)
        return None

    def _plan_beside_pinned(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        """Clients' pins make the batch speculate anyway: plain decode can't be had, only a share of the drafting."""
        tokens_per_draft = self._tokens_per_draft(bucket)
        if tokens_per_draft is None:
            exploring = bucket.explores()
            if not exploring and bucket.may_explore():
                bucket.start_exploring(self._limits.default_num_draft_tokens)
            return RoundPlan(num_draft_tokens=self._at_most(exploring, most) if exploring else 0, reason="measuring")
        expected = self._pool.expected_tokens(request.belief.shares)
        request.last_k = choose_for_batch(
            expected, self._candidates(most), tokens_per_draft=tokens_per_draft, current=request.last_k
        )
        if request.last_k == 0:
            return self._plain_or_shadow(bucket, request, self.prospect(bucket, request), "worth_less_than_batch_time")
        return RoundPlan(num_draft_tokens=request.last_k, reason="beside_pinned")

    def _plan_on(self, bucket: Bucket, request: RequestView, most: int) -> RoundPlan:
        if bucket.batch == 1 and request.is_suspended:
            prospect = self.prospect(bucket, request)
            if not self._may_return(request, prospect):
                return self._plain_or_shadow(bucket, request, prospect, "request_suspended")
            request.is_suspended = False
            bucket.gate.reason = "its request is expected to gain again, or looks whether costs have changed"
        exploring = bucket.explores()
        if exploring:
            return RoundPlan(num_draft_tokens=self._at_most(exploring, most), reason="measuring")
        expected = self._pool.expected_tokens(request.belief.shares)
        candidates = self._candidates(most)
        choice = choose_num_draft_tokens(bucket.costs, expected, candidates, current=request.last_k)
        if choice is None:
            return RoundPlan(num_draft_tokens=self._at_most(bucket.probe_k, most), reason="measuring")
        if bucket.batch == 1 and self._is_losing(bucket, request, choice.num_draft_tokens):
            if len(candidates) < len(self._limits.candidates):
                return RoundPlan(num_draft_tokens=0, reason="limit_near")  # longer drafts might pay
            return self._suspend(bucket, request)
        if bucket.may_explore():
            bar = choice.tok_per_s * (1.0 + self._limits.explore_gain)
            k = choice.num_draft_tokens
            wanted = promising_num_draft_tokens(
                bucket.costs.optimistic_seconds, expected, candidates, above_tok_per_s=bar, current=k
            )
            bucket.start_exploring(wanted)
        request.last_k = self._share_of_batch(bucket, request, expected, choice)
        if request.last_k == 0:
            return self._plain_or_shadow(bucket, request, self.prospect(bucket, request), "worth_less_than_batch_time")
        return RoundPlan(num_draft_tokens=request.last_k, reason="pays")

    # ---------------------------------------------------------------- a request's own gate

    def _is_losing(self, bucket: Bucket, request: RequestView, num_draft_tokens: int) -> bool:
        if request.trial_left > 0:
            request.trial_left -= 1
            return False
        plain_s, cost = bucket.plain_s, bucket.costs.believed(num_draft_tokens)
        assert plain_s is not None
        assert cost is not None
        prospect = self._prospect(request, num_draft_tokens, cost[0] / plain_s)
        return self._limits.stay_odds * prospect.gain + self._limits.switch_tokens < prospect.loss

    def _suspend(self, bucket: Bucket, request: RequestView) -> RoundPlan:
        request.is_suspended = True
        request.last_k = 0
        bucket.num_suspensions += 1
        request.lookout.start(has_paid=True)
        prospect = self.prospect(bucket, request)
        bucket.gate.reason = "its request is plain: its drafts are expected to lose"
        return self._plain_or_shadow(bucket, request, prospect, "request_suspended")

    def _may_return(self, request: RequestView, prospect: Prospect | None) -> bool:
        mean = None if prospect is None else prospect.gain - prospect.loss
        limits = self._limits
        if prospect is not None and limits.return_odds * prospect.gain > prospect.loss + limits.switch_tokens:
            return True
        if request.lookout.is_probe_due(mean):
            request.trial_left = _TRIAL_ROUNDS
            return True
        return False

    def _plain_or_shadow(
        self, bucket: Bucket, request: RequestView, prospect: Prospect | None, reason: str
    ) -> RoundPlan:
        if prospect is not None:
            request.pace.pass_token(gain_tokens=prospect.gain, cost_tokens=prospect.cost_tokens)
        if request.shadow_rounds_left == 0 and request.pace.is_due(overhead_tokens=bucket.overhead_tokens):
            # A longer draft costs the plain stream no more and says more.
            wanted = self._limits.shadow_k
            return RoundPlan(num_draft_tokens=wanted, reason=reason, is_shadow=True)
        return RoundPlan(num_draft_tokens=0, reason=reason)

    # ---------------------------------------------------------------- K

    def prospect(self, bucket: Bucket, request: RequestView, *, margin_tokens: float = 0.0) -> Prospect | None:
        """Of the K that would be best if every cost were as low as it may be; None while no costs are known."""
        expected = self._pool.expected_tokens(request.belief.shares)
        wanted = promising_num_draft_tokens(
            bucket.costs.low_seconds, expected, self._limits.candidates, above_tok_per_s=0.0, current=0
        )
        plain_s = bucket.plain_s
        cost_s = None if wanted is None else bucket.costs.low_seconds(wanted)
        if wanted is None or cost_s is None or plain_s is None:
            return None
        return self._prospect(request, wanted, cost_s / plain_s + margin_tokens)

    def unmeasured_that_pays(self, bucket: Bucket, request: RequestView) -> int | None:
        """A K without measurements that may beat plain decode by the margin; None if there is none."""
        prospect = self.prospect(bucket, request)
        if prospect is None or bucket.costs.is_measured(prospect.num_draft_tokens):
            return None
        pays = prospect.gain > prospect.loss
        return prospect.num_draft_tokens if pays else None

    def _prospect(self, request: RequestView, num_draft_tokens: int, cost_tokens: float) -> Prospect:
        gain, loss = self._pool.prospect(request.belief.shares, self._index[num_draft_tokens], cost_tokens)
        return Prospect(num_draft_tokens, cost_tokens, gain, loss)

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

    def _candidates(self, most: int) -> tuple[int, ...]:
        candidates = self._limits.candidates
        return candidates if most >= candidates[-1] else tuple(k for k in candidates if k <= most)

    def _at_most(self, wanted: int, most: int) -> int:
        return wanted if wanted <= most else max(self._candidates(most), default=most)
