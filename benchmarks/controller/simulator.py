"""Runs one policy through one workload, in steps of the whole batch.

Whether the draft at output position p of a stream would be accepted is drawn once per seed and is the same for every
policy: the text decides it, not the clock. Policies see noisy step times; the score adds up mean step times, so that a
lucky stall pattern decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from benchmarks.controller.workloads import Phase, Workload

__all__ = ["Plan", "Policy", "Result", "Sample", "Step", "StreamRound", "simulate"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy wants of one stream: K drafts verified, or, as shadow, drafted beside a plain round."""

    num_draft_tokens: int
    is_shadow: bool = False


@dataclass(slots=True)
class Stream:
    """One client: its current request, counted from 1, and how far the answer is."""

    index: int
    request: int = 1
    position: int = 0  # tokens of this phase and all before it
    answer_pos: int = 0
    is_synced: bool = False
    shadow_k: int = 0
    shadow_from: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What policies may know when they plan, and, for the oracle only, the truth."""

    now_s: float
    batch_size: int
    streams: tuple[Stream, ...]
    answer_len: int
    context_start: int
    phase: Phase
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StreamRound:
    """What one stream's round was."""

    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    round_s: float
    is_cut: bool
    is_resync: bool


class Policy(Protocol):
    """A way to choose K."""

    def plan(self, step: Step) -> list[Plan]:
        """One plan per stream."""
        ...

    def observe(self, step: Step, rounds: list[StreamRound]) -> None:
        """The step is over."""
        ...

    def observe_shadow(self, step: Step, index: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """A shadow of stream ``index`` was scored."""
        ...

    @property
    def state(self) -> str:
        """For the plot."""
        ...

    @property
    def num_switches(self) -> int:
        """Changes between speculating and plain so far, as the policy counts them."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """A point of the time line."""

    token: int
    state: str
    acceptance: float
    tok_per_s: float


@dataclass(slots=True)
class Result:
    """One run. ms_per_token: mean step time per token of one stream."""

    ms_per_token: float
    num_rounds: int
    num_switches: int
    shift_tokens: list[int] = field(default_factory=list)  # tokens from each phase's begin until its first K > 0
    samples: list[Sample] = field(default_factory=list)


class _Text:
    """Which draft positions would be accepted, per stream; drawn as the run goes on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._uniform: dict[int, list[float]] = {}

    def accepted(self, stream: int, position: int, k: int, rate: float) -> int:
        """How many of K drafts from ``position`` on are accepted."""
        values = self._uniform.get(stream)
        if values is None or len(values) < position + k:
            rng = np.random.default_rng((self._seed, stream))
            values = self._uniform[stream] = rng.random(2 * (position + k) + 4096).tolist()
        count = 0
        while count < k and values[position + count] < rate:
            count += 1
        return count


class _Times:
    """Noisy factors around a mean of one."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._noise = workload.noise
        self._rng = np.random.default_rng((seed, 99))
        self._pool: list[tuple[float, float]] = []

    def factor(self, cv: float) -> float:
        if not self._pool:
            normal = self._rng.standard_normal(4096).tolist()
            self._pool = list(zip(normal, self._rng.random(4096).tolist(), strict=True))
        z, stall = self._pool.pop()
        sigma = math.sqrt(math.log1p(cv * cv))
        value = math.exp(sigma * z - sigma * sigma / 2)
        return value * self._noise.stall_factor if stall < self._noise.stall_rate else value


def simulate(workload: Workload, policy: Policy, *, seed: int, sample_every: int = 0) -> Result:
    """Run it.

    Args:
        sample_every: tokens between points of the time line; 0 = none.
    """
    return _Run(workload, policy, seed, sample_every).run()


class _Run:
    def __init__(self, workload: Workload, policy: Policy, seed: int, sample_every: int) -> None:
        self.workload, self.policy = workload, policy
        self.text, self.times = _Text(seed), _Times(workload, seed)
        self.sample_every = sample_every
        self.streams: list[Stream] = []
        self.now_s = 0.0
        self.mean_s = 0.0
        self.stream_s = 0.0
        self.tokens = 0
        self.rounds = 0
        self.result = Result(0.0, 0, 0)
        self._window = (0, 0.0)

    def run(self) -> Result:
        for phase in self.workload.phases:
            self._phase(phase)
        result = self.result
        result.ms_per_token = 1e3 * self.stream_s / self.tokens
        result.num_rounds, result.num_switches = self.rounds, self.policy.num_switches
        return result

    def _phase(self, phase: Phase) -> None:
        while len(self.streams) < phase.batch_size:
            self.streams.append(Stream(len(self.streams)))
        active = tuple(self.streams[: phase.batch_size])
        begin = self.tokens
        first_spec: int | None = None
        while self.tokens - begin < phase.tokens * phase.batch_size:
            speculated = self._step(phase, active)
            if speculated and first_spec is None:
                first_spec = self.tokens - begin
        self.result.shift_tokens.append(first_spec if first_spec is not None else phase.tokens)

    def _step(self, phase: Phase, active: tuple[Stream, ...]) -> bool:
        rates = tuple(self._rate(phase, stream) for stream in active)
        step = Step(
            self.now_s,
            len(active),
            active,
            self.workload.answer_len,
            self.workload.context_start,
            phase,
            rates,
        )
        plans = self.policy.plan(step)
        ks, resyncs, extra_ms = self._carry_out(phase, active, plans)
        mean_k = sum(ks) / len(ks)
        mean_s = (phase.costs.step_ms(mean_k, len(active)) + extra_ms) * 1e-3
        noise = self.workload.noise
        step_s = mean_s * self.times.factor(noise.spec_cv if mean_k > 0 else noise.plain_cv)
        self.now_s += step_s
        self.stream_s += mean_s * len(active)
        rounds = [
            self._commit(stream, k, rate, step_s, is_resync)
            for stream, k, rate, is_resync in zip(active, ks, rates, resyncs, strict=True)
        ]
        self.policy.observe(step, rounds)
        self._score_shadows(step, active, rates)
        for stream, round_ in zip(active, rounds, strict=True):
            if round_.is_cut:
                stream.request, stream.answer_pos, stream.is_synced, stream.shadow_k = stream.request + 1, 0, False, 0
        self._sample(ks, rates, mean_s)
        return mean_k > 0

    def _rate(self, phase: Phase, stream: Stream) -> float:
        kinds = phase.acceptance
        return kinds[(stream.index if phase.batch_size > 1 else stream.request) % len(kinds)]

    def _carry_out(
        self, phase: Phase, active: tuple[Stream, ...], plans: list[Plan]
    ) -> tuple[list[int], list[bool], float]:
        ks, resyncs, extra_ms = [], [], 0.0
        for stream, plan in zip(active, plans, strict=True):
            room = max(0, self.workload.answer_len - stream.answer_pos - 1)
            k = min(plan.num_draft_tokens, room)
            is_resync = k > 0 and not plan.is_shadow and not stream.is_synced
            if plan.is_shadow and k > 0:
                stream.shadow_k, stream.shadow_from = k, stream.position
                extra_ms += phase.costs.shadow_ms / len(active)
            if is_resync:
                extra_ms += phase.costs.resync_ms / len(active)
            ks.append(0 if plan.is_shadow or is_resync else k)
            resyncs.append(is_resync)
            stream.is_synced = k > 0 and not plan.is_shadow
        return ks, resyncs, extra_ms

    def _commit(self, stream: Stream, k: int, rate: float, step_s: float, is_resync: bool) -> StreamRound:
        accepted = self.text.accepted(stream.index, stream.position, k, rate)
        left = self.workload.answer_len - stream.answer_pos
        committed = min(accepted + 1, left)
        is_cut = committed >= left
        stream.position += committed
        stream.answer_pos += committed
        self.tokens += committed
        self.rounds += 1
        return StreamRound(k, min(accepted, committed), committed, step_s, is_cut, is_resync)

    def _score_shadows(self, step: Step, active: tuple[Stream, ...], rates: tuple[float, ...]) -> None:
        for index, (stream, rate) in enumerate(zip(active, rates, strict=True)):
            if stream.shadow_k == 0:
                continue
            # The round that started the shadow committed the token before its first draft.
            begin = stream.shadow_from + 1
            accepted = self.text.accepted(stream.index, begin, stream.shadow_k, rate)
            if stream.position >= begin + min(accepted + 1, stream.shadow_k):
                self.policy.observe_shadow(step, index, stream.shadow_k, accepted)
                stream.shadow_k = 0

    def _sample(self, ks: list[int], rates: tuple[float, ...], mean_s: float) -> None:
        self.mean_s += mean_s
        if not self.sample_every:
            return
        tokens, begin_s = self._window
        if self.tokens - tokens >= self.sample_every:
            rate = (self.tokens - tokens) / (self.mean_s - begin_s)
            self.result.samples.append(
                Sample(self.tokens, self.policy.state, sum(rates) / len(rates), rate / len(rates))
            )
            self._window = (self.tokens, self.mean_s)
