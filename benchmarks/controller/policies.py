"""The policies compared. All but ours are re-implemented in simplified form from the rule each project documents."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.controller.simulator import Plan, Policy, Step, StreamRound
from benchmarks.controller.workloads import expected_tokens
from gateway.speculation.controller import Controller, ControllerLimits, Override, RequestView, RoundObserved
from gateway.speculation.costs import batch_bucket

__all__ = ["AcceptanceEma", "Always", "CostGate", "OneWayGate", "Oracle", "Ours", "policies"]

_AUTO = Override()


class _SameK:
    """Base of the policies that give every stream of a step the same K and know no shadows."""

    def __init__(self) -> None:
        self._last_k = 0
        self._switches = 0

    def choose(self, step: Step) -> int:
        """See _SameK."""
        raise NotImplementedError

    def learn(self, step: Step, rounds: list[StreamRound]) -> None:
        """Nothing to learn by default."""

    def plan(self, step: Step) -> list[Plan]:
        """See Policy."""
        k = self.choose(step)
        self._switches += (k > 0) != (self._last_k > 0)
        self._last_k = k
        return [Plan(k)] * step.batch_size

    def observe(self, step: Step, rounds: list[StreamRound]) -> None:
        """See Policy."""
        self.learn(step, rounds)

    def observe_shadow(self, step: Step, index: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Never asked for."""

    @property
    def state(self) -> str:
        """See Policy."""
        return "ON" if self._last_k else "OFF"

    @property
    def num_switches(self) -> int:
        """See Policy."""
        return self._switches


class Oracle:
    """Knows acceptance and mean costs; the K of every stream that is best for the fleet, step by step.

    It does not know single outcomes, and it pays for re-syncs like everybody.
    """

    def __init__(self, candidates: tuple[int, ...]) -> None:
        self._options = (0, *candidates)
        self._cache: dict[tuple[object, ...], list[int]] = {}
        self._last = 0
        self._switches = 0

    def plan(self, step: Step) -> list[Plan]:
        """See Policy."""
        key = (id(step.phase), step.acceptance)
        if key not in self._cache:
            self._cache[key] = self._best(step)
        ks = self._cache[key]
        self._switches += any(ks) != bool(self._last)
        self._last = max(ks)
        return [Plan(k) for k in ks]

    def observe(self, step: Step, rounds: list[StreamRound]) -> None:
        """Knows already."""

    def observe_shadow(self, step: Step, index: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Knows already."""

    def _best(self, step: Step) -> list[int]:
        best = [0] * step.batch_size
        for start in self._options:
            ks = [start] * step.batch_size
            for _ in range(4):
                for index in range(len(ks)):
                    rates = {k: self._rate(step, ks, index, k) for k in self._options}
                    ks[index] = max(self._options, key=rates.__getitem__)
            best = max(best, ks, key=lambda now: self._rate(step, now, 0, now[0]))
        return best

    def _rate(self, step: Step, ks: list[int], index: int, k: int) -> float:
        trial = [*ks[:index], k, *ks[index + 1 :]]
        tokens = sum(expected_tokens(rate, now) for rate, now in zip(step.acceptance, trial, strict=True))
        return tokens / step.phase.costs.step_ms(sum(trial) / len(trial), len(trial))

    @property
    def state(self) -> str:
        """See Policy."""
        return "ON" if self._last else "OFF"

    @property
    def num_switches(self) -> int:
        """See Policy."""
        return self._switches


class Always(_SameK):
    """The same K for ever; 0 is plain decode."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k

    def choose(self, step: Step) -> int:
        """See _SameK."""
        return self._k


class OneWayGate(_SameK):
    """TensorRT-LLM's rule: off for good once accepted / drafted over a window falls below a given threshold."""

    def __init__(self, k: int, threshold: float = 0.35, window: int = 64) -> None:
        super().__init__()
        self._k, self._threshold, self._window = k, threshold, window
        self._rates: list[float] = []
        self._is_off = False

    def choose(self, step: Step) -> int:
        """See _SameK."""
        return 0 if self._is_off else self._k

    def learn(self, step: Step, rounds: list[StreamRound]) -> None:
        """See _SameK."""
        drafted = sum(r.num_draft_tokens for r in rounds)
        if drafted:
            self._rates.append(sum(r.num_accepted_tokens for r in rounds) / drafted)
            del self._rates[: -self._window]
            full = len(self._rates) == self._window
            self._is_off = self._is_off or (full and sum(self._rates) / self._window < self._threshold)


class AcceptanceEma(_SameK):
    """SGLang's adaptive rule with steps [0, K]: an EMA of accepted drafts per batch bucket, no costs.

    Down to 0 at <= 0.5 accepted, up above K - 0.5 ... of the step below; at 0 it tries again every five batches.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self._ema: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._on: dict[int, bool] = {}

    def choose(self, step: Step) -> int:
        """See _SameK."""
        return self._k if self._on.get(batch_bucket(step.batch_size), True) else 0

    def learn(self, step: Step, rounds: list[StreamRound]) -> None:
        """See _SameK."""
        slot = batch_bucket(step.batch_size)
        drafted = [r for r in rounds if r.num_draft_tokens]
        ema = self._ema.setdefault(slot, self._k - 1.0)
        if drafted:
            accepted = sum(r.num_accepted_tokens for r in drafted) / len(drafted)
            ema = self._ema[slot] = ema + 0.2 * (accepted - ema)
        count = self._count[slot] = self._count.get(slot, 0) + 1
        if count > 10 and count % 5 == 0:
            self._on[slot] = not self._on.get(slot, True) or ema > 0.5


class CostGate(_SameK):
    """Atlas' adaptive rule: mean committed tokens of a window of 12 against EWMA(round) / EWMA(plain round).

    Suspended below it, tried again after 256 plain tokens. The ratio is 2.0 until both times exist.
    """

    def __init__(self, k: int, reprobe_tokens: int = 256, window: int = 12) -> None:
        super().__init__()
        self._k, self._reprobe, self._size = k, reprobe_tokens, window
        self._window: list[float] = []
        self._spec_s: float | None = None
        self._plain_s: float | None = None
        self._wait = 0.0

    def choose(self, step: Step) -> int:
        """See _SameK."""
        return 0 if self._wait > 0 else self._k

    def learn(self, step: Step, rounds: list[StreamRound]) -> None:
        """See _SameK."""
        first = rounds[0]
        tokens = sum(r.num_committed_tokens for r in rounds) / len(rounds)
        if not first.num_draft_tokens:
            if not first.is_resync:
                self._plain_s = _ewma(self._plain_s, first.round_s)
            self._wait -= tokens
            return
        self._spec_s = _ewma(self._spec_s, first.round_s)
        self._window.append(tokens)
        del self._window[: -self._size]
        ratio = 2.0 if self._plain_s is None else max(1.0, min(16.0, self._spec_s / self._plain_s))
        if len(self._window) == self._size and sum(self._window) / self._size < ratio:
            self._wait = float(self._reprobe)
            self._window.clear()


def _ewma(old: float | None, new: float) -> float:
    if new > 2.0:
        return old if old is not None else new
    return new if old is None else old + (new - old) / 8


class Ours:
    """The gateway's controller."""

    def __init__(self, limits: ControllerLimits, *, with_shadow: bool = True) -> None:
        self.controller = Controller(limits)
        self.controller.set_drafter(is_up=True, reason="simulated")
        self._with_shadow = with_shadow
        self._views: dict[int, tuple[int, RequestView]] = {}
        self._last = 0

    def plan(self, step: Step) -> list[Plan]:
        """See Policy."""
        plans = []
        for stream in step.streams:
            number, view = self._views.get(stream.index, (0, None))
            if view is None or number != stream.request:
                view = self.controller.new_request()
                self._views[stream.index] = (stream.request, view)
            plan = self.controller.plan_round(
                view,
                batch_size=step.batch_size,
                max_draft_tokens=max(0, step.answer_len - stream.answer_pos - 1),
                context_len=step.context_start + stream.answer_pos,
                override=_AUTO,
                now_s=step.now_s,
            )
            is_shadow = plan.is_shadow and self._with_shadow
            plans.append(Plan(plan.num_draft_tokens if is_shadow or not plan.is_shadow else 0, is_shadow))
            self._last = 0 if plan.is_shadow else plan.num_draft_tokens
        return plans

    def observe(self, step: Step, rounds: list[StreamRound]) -> None:
        """See Policy."""
        for stream, r in zip(step.streams, rounds, strict=True):
            self.controller.observe(
                self._views[stream.index][1],
                RoundObserved(
                    batch_size=step.batch_size,
                    num_draft_tokens=r.num_draft_tokens,
                    num_accepted_tokens=r.num_accepted_tokens,
                    num_committed_tokens=r.num_committed_tokens,
                    round_s=r.round_s,
                    is_cut=r.is_cut,
                    is_clean=True,
                    is_resync=r.is_resync,
                    now_s=step.now_s,
                ),
            )

    def observe_shadow(self, step: Step, index: int, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """See Policy."""
        self.controller.observe_shadow(
            self._views[step.streams[index].index][1],
            batch_size=step.batch_size,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            now_s=step.now_s,
        )

    @property
    def state(self) -> str:
        """See Policy."""
        return "ON" if self._last else "OFF"

    @property
    def num_switches(self) -> int:
        """See Policy."""
        return sum(r.num_switches + 2 * r.num_suspensions for r in self.controller.reports())


def policies(limits: ControllerLimits, k: int) -> dict[str, Callable[[], Policy]]:
    """Makers of fresh instances by name, in the order of the table."""
    return {
        "oracle": lambda: Oracle(limits.candidates),
        "plain": lambda: Always(0),
        "always": lambda: Always(k),
        "one-way": lambda: OneWayGate(k),
        "acc EMA": lambda: AcceptanceEma(k),
        "cost gate": lambda: CostGate(k),
        "ours blind": lambda: Ours(limits, with_shadow=False),
        "ours": lambda: Ours(limits),
    }
