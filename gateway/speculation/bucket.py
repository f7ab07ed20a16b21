"""What is known of a bucket (batch bucket, context class): costs, rates, gate, lookout. It learns; it plans nothing."""

from __future__ import annotations

import math

from gateway.speculation.batch_round import BatchRounds
from gateway.speculation.costs import CostTable
from gateway.speculation.gate import Gate
from gateway.speculation.lookout import Lookout
from gateway.speculation.loss_meter import LossMeter
from gateway.speculation.rate_estimate import RatioEstimate, log_speedup
from gateway.speculation.records import ControllerLimits

__all__ = ["Bucket"]

_FEW_STREAMS = 4  # above it a batch's rows cost time
_PAID = 2.0  # a stretch has paid when its net gain exceeds so many times the loss that would have ended it


class Bucket:
    """State of one bucket.

    Args:
        batch: streams it stands for. context_class: see costs.context_class.
    """

    def __init__(self, limits: ControllerLimits, *, batch: int, context_class: int) -> None:
        self.limits = limits
        self.batch, self.context_class = batch, context_class
        self.costs = CostTable(slope_share=0.0 if batch <= _FEW_STREAMS else 0.5)
        self.rounds = BatchRounds(batch)
        self.context_len = 0.0  # of its streams, a running mean over about one round of each
        self.gate = Gate()
        self.lookout = Lookout(limits)
        self.meter = LossMeter()
        self.plain_rate = RatioEstimate(half_life_rounds=limits.rate_half_life_rounds)
        self.spec_rate = RatioEstimate(half_life_rounds=limits.rate_half_life_rounds)
        self.probe_rate = RatioEstimate(half_life_rounds=math.inf)
        self.probe_k = limits.default_num_draft_tokens
        self.chosen = 0
        self.refresh_left = 0
        self.settle_left = 0
        self.tokens_since_refresh = 0.0
        self.rounds_since_explore = 0
        self.explore_k = 0
        self.explore_left = 0
        self._explore_wait = limits.explore_every_rounds
        self.outlook_gain = self.outlook_loss = 0.0  # of its requests' rounds while OFF, running means
        self.last_s = 0.0
        self.has_pinned = False  # in its last round a client's pin made a stream draft
        self.shadow_overhead_s = self.shadow_overhead_dev_s = 0.0
        self.num_shadow_overheads = 0
        self.num_suspensions = self.num_probes_won = self.num_probes_lost = self.num_shadows = 0

    @property
    def plain_s(self) -> float | None:
        """t: seconds of a plain round; None before the first."""
        return self.costs.seconds(0)

    @property
    def overhead_tokens(self) -> float:
        """What one shadow costs the plain stream, in plain tokens of time."""
        plain_s, count = self.plain_s, self.num_shadow_overheads
        if not plain_s or count < 2:
            return 0.0
        # Less one standard error: a few noisy rounds must not slow the shadows down.
        sure_s = self.shadow_overhead_s - self.shadow_overhead_dev_s * math.sqrt(max(0.02, 1.0 / count))
        return max(0.0, sure_s / plain_s)

    def has_baseline(self) -> bool:
        """Whether plain decode was measured often enough to compare with."""
        return self.costs.is_measured(0) and self.plain_rate.count >= self.limits.base_rounds

    def learn_cost(self, num_draft_tokens: int, round_s: float) -> float | None:
        """Count a fair sample of the batch's K.

        Returns:
            What the sample counts as for rates and losses, seconds; None if it must not count (first of its shape, or a
            stall).
        """
        cell = self.costs.cell(num_draft_tokens)
        was_warm, used = cell.is_warm, cell.clamp(round_s)
        is_changed = cell.observe(round_s)
        self.costs.samples_changed(num_draft_tokens)
        if is_changed:
            self._on_costs_changed()
        return used if was_warm else None

    def learn_shadow_overhead(self, seconds: float) -> None:
        """The rounds beside one shadow took ``seconds`` more than plain rounds do."""
        self.num_shadow_overheads += 1
        weight = max(0.02, 1.0 / self.num_shadow_overheads)
        self.shadow_overhead_s += weight * (seconds - self.shadow_overhead_s)
        self.shadow_overhead_dev_s += weight * (
            1.25 * abs(seconds - self.shadow_overhead_s) - self.shadow_overhead_dev_s
        )

    def learn_outlook(self, gain_tokens: float, loss_tokens: float) -> None:
        """One stream's next round may gain and lose so much (Prospect); the means are over about one round of each."""
        self.outlook_gain += (gain_tokens - self.outlook_gain) / self.batch
        self.outlook_loss += (loss_tokens - self.outlook_loss) / self.batch

    def learn_plain(self, seconds: float) -> None:
        """A round of a plain batch took ``seconds``."""
        self.plain_rate.observe(1.0, seconds)
        worth = self.limits.refresh_tokens / self.limits.refresh_rounds
        self.tokens_since_refresh = max(0.0, self.tokens_since_refresh - worth)

    def learn_spec(self, tokens: float, seconds: float, *, now_s: float) -> None:
        """A round of a speculating batch delivered ``tokens`` a stream in ``seconds``."""
        self.spec_rate.observe(tokens, seconds)
        self.rounds_since_explore += 1
        if self.gate.state == "PROBE":
            self.probe_rate.observe(tokens, seconds)
        elif self.gate.state == "ON":
            self._count_on(tokens)
            plain_s = self.plain_s
            if plain_s is not None:
                self.meter.add(tokens * plain_s - seconds)
                self._stop_if_losing(plain_s, now_s)

    def charge(self, seconds: float, *, now_s: float) -> None:
        """Speculation cost one stream ``seconds`` and delivered nothing for them."""
        seconds /= self.batch
        self.spec_rate.charge(seconds)
        if self.gate.state == "PROBE":
            self.probe_rate.charge(seconds)
        elif self.gate.state == "ON" and self.plain_s is not None:
            self.meter.add(-seconds)
            self._stop_if_losing(self.plain_s, now_s)

    def explores(self) -> int:
        """The K whose measurement is under way, 0 for none."""
        if self.explore_left == 0:
            return 0
        self.explore_left -= 1
        return self.explore_k

    def may_explore(self) -> bool:
        """Whether it is time to look for a K to measure."""
        return self.rounds_since_explore >= self._explore_wait

    def start_exploring(self, num_draft_tokens: int | None) -> None:
        """Measure this K now: one round of one stream, or three of each in a batch. None: there is no need soon."""
        self.rounds_since_explore = 0
        every = self.limits.explore_every_rounds
        if num_draft_tokens is None:
            self._explore_wait = 4 * every
            return
        self.explore_k = num_draft_tokens
        self.explore_left = 1 if self.batch == 1 else 3 * self.batch
        cell = self.costs.cells.get(num_draft_tokens)
        self._explore_wait = every if cell is None or cell.count < 8 else 4 * every

    def start_probe(self, num_draft_tokens: int) -> None:
        """PROBE begins, with this K."""
        self.probe_k = num_draft_tokens
        self.probe_rate = RatioEstimate(half_life_rounds=math.inf)
        self.settle()

    def settle(self) -> None:
        """The mode changes. In a batch the rounds under way belong to the one before: skip the next batch round."""
        self.rounds.clear()
        self.settle_left = 1 if self.batch > 1 else 0

    def probe_verdict(self) -> bool | None:
        """True: won. False: lost. None: more rounds are needed."""
        count = self.probe_rate.count
        if count < self.limits.probe_min_rounds:
            return None
        plain_s = self.plain_s
        if plain_s is not None and self.probe_rate.lost_tokens(plain_s) > self.limits.probe_loss_tokens:
            return False
        gain, error = log_speedup(self.probe_rate, self.plain_rate, batch=self.batch)
        if gain - error > self.limits.margin:
            return True
        if gain + error < 0.0:
            return False
        return None if count < self.limits.probe_max_rounds else gain > self.limits.margin

    def turn_on(self) -> None:
        """The probe won."""
        self.num_probes_won += 1
        allowed_s = self.limits.bucket_loss_tokens * (self.plain_s or 0.0)
        # On probation if speculation failed here lately: half the allowed loss is already on the meter.
        self.meter.start(loss_s=0.5 * allowed_s if self.lookout.doubts else 0.0)
        self.tokens_since_refresh = 0.0
        self.spec_rate.shrink(self.limits.alarm_keep)

    def turn_off(self, *, has_paid: bool) -> None:
        """A plain stretch begins."""
        self.chosen = 0
        self.refresh_left = 0
        self.outlook_gain = self.outlook_loss = 0.0
        self.lookout.start(has_paid=has_paid)
        self.settle()

    def inherit(self, other: Bucket, *, now_s: float) -> None:
        """Start from the bucket of another context class: its costs as first guesses, its state, a fresh back-off."""
        self.costs.inherit(other.costs)
        plain_s = self.plain_s
        if plain_s is None:
            return
        for _ in range(self.limits.base_rounds):
            self.plain_rate.observe(1.0, plain_s)
        self.gate.state, self.gate.reason, self.gate.since_s = other.gate.state, other.gate.reason, now_s
        self.probe_k = other.probe_k
        self.shadow_overhead_s, self.num_shadow_overheads = other.shadow_overhead_s, other.num_shadow_overheads
        self.shadow_overhead_dev_s = other.shadow_overhead_dev_s
        self.tokens_since_refresh = self.limits.refresh_tokens * 0.75

    def _count_on(self, tokens: float) -> None:
        self.tokens_since_refresh += tokens
        if self.tokens_since_refresh >= self.limits.refresh_tokens:
            self._start_refresh()

    def _start_refresh(self) -> None:
        self.refresh_left = self.limits.refresh_rounds + (1 if self.batch > 1 else 0)
        self.tokens_since_refresh = 0.0
        self.settle()

    def _stop_if_losing(self, plain_s: float, now_s: float) -> None:
        allowed_s = self.limits.bucket_loss_tokens * plain_s
        if self.meter.loss_s <= allowed_s:
            return
        has_paid = self.meter.gain_s > (_PAID - 1.0) * allowed_s
        lost = self.meter.loss_s / plain_s
        self.gate.apply("losing", reason=f"lost {lost:.0f} plain tokens of time since its best moment", now_s=now_s)
        self.turn_off(has_paid=has_paid)

    def _on_costs_changed(self) -> None:
        self.costs.age()
        self.plain_rate.shrink(self.limits.alarm_keep)
        self.spec_rate.shrink(self.limits.alarm_keep)
        self.lookout.costs_changed()
        if self.gate.state == "ON":
            self._start_refresh()
