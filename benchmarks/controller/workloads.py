"""The worlds that policies are tried in: costs, acceptance over time, load over time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

__all__ = [
    "CostModel",
    "Noise",
    "Phase",
    "Workload",
    "acceptance_for_length",
    "all_workloads",
    "expected_tokens",
    "seed_workloads",
    "smoke_workloads",
    "variant_workloads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Mean milliseconds of a batch step.

    plain: plain_ms + (B - 1) * plain_row_ms. speculating: verify_ms[K] + draft_ms * K + (B - 1) * (1 + K) *
    verify_row_ms, linear between the listed K. resync_ms: what fetching features adds to the plain round before
    speculation starts. shadow_ms: what a shadow draft adds to the plain stream.
    """

    plain_ms: float
    verify_ms: dict[int, float]
    draft_ms: float = 0.0
    plain_row_ms: float = 0.0
    verify_row_ms: float = 0.0
    resync_ms: float = 6.0
    shadow_ms: float = 0.5

    def step_ms(self, mean_k: float, batch_size: int) -> float:
        """Mean time of a step in which the streams verify ``mean_k`` drafts on average; 0 = plain."""
        if mean_k <= 0.0:
            return self.plain_ms + (batch_size - 1) * self.plain_row_ms
        rows_ms = (batch_size - 1) * (1.0 + mean_k) * self.verify_row_ms
        return self._verify(mean_k) + self.draft_ms * mean_k + rows_ms

    def _verify(self, k: float) -> float:
        points = sorted(self.verify_ms.items())
        if k <= points[0][0]:
            return points[0][1]
        for (low_k, low), (high_k, high) in itertools.pairwise(points):
            if k <= high_k:
                return low + (high - low) * (k - low_k) / (high_k - low_k)
        return points[-1][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Scatter of a step: lognormal with these coefficients of variation, and rare stalls.

    Defaults: those of the prototype study this controller started from (25 and 35 %, 0.3 % stalls of 12 times).
    """

    plain_cv: float = 0.25
    spec_cv: float = 0.35
    stall_rate: float = 0.003
    stall_factor: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch in which nothing changes: tokens of one stream, acceptance of each kind of stream, costs, load."""

    tokens: int
    acceptance: tuple[float, ...]
    costs: CostModel
    batch_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Phases one after another; every stream's answers end after ``answer_len`` tokens and the next request starts.

    kinds: stream i takes acceptance i modulo their number; with one stream its answers take turns.
    """

    name: str
    phases: tuple[Phase, ...]
    answer_len: int = 1_000_000
    noise: Noise = field(default_factory=Noise)
    context_start: int = 200

    @property
    def is_steady(self) -> bool:
        """Nothing changes over time."""
        return len(self.phases) == 1


def expected_tokens(acceptance: float, k: int) -> float:
    """E(K) with each draft accepted independently."""
    return sum(acceptance**i for i in range(k + 1))


def acceptance_for_length(length: float, k: int) -> float:
    """The acceptance that gives E(K) = ``length``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < length else (low, middle)
    return low


def tie_acceptance(costs: CostModel, candidates: tuple[int, ...]) -> float:
    """The acceptance at which the best K is exactly as fast as plain decode."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        best = max(expected_tokens(middle, k) / costs.step_ms(k, 1) for k in candidates)
        low, high = (middle, high) if best < 1.0 / costs.plain_ms else (low, middle)
    return low


# plain 12 ms, 26 ms at K = 4: break-even length 2.17, the founding case with a somewhat better verifier.
BASE = CostModel(plain_ms=12.0, verify_ms={1: 22.0, 8: 22.0}, draft_ms=1.0)
# The embedded engine on two CPU cores, as measured: verify of 2/3/4/6/9 rows at 1.00/1.03/1.13/1.18/1.43 of plain.
EMBEDDED = CostModel(
    plain_ms=24.0, verify_ms={1: 24.0, 2: 24.7, 3: 27.1, 5: 28.3, 8: 34.3}, draft_ms=0.9, resync_ms=1.0, shadow_ms=3.0
)
# A batch server: rows cost 0.25 ms each, so that speculation pays up to about 8 streams.
BATCHED = CostModel(plain_ms=12.0, verify_ms={1: 17.0, 8: 17.0}, draft_ms=0.5, plain_row_ms=0.15, verify_row_ms=0.25)
# A step of a batch averages over its rows.
_BATCH_NOISE = Noise(plain_cv=0.1, spec_cv=0.15)
_QUIET = Noise(plain_cv=0.05, spec_cv=0.07, stall_rate=0.001)


def _phase(tokens: int, acceptance: float, costs: CostModel = BASE, batch_size: int = 1) -> Phase:
    return Phase(tokens=tokens, acceptance=(acceptance,), costs=costs, batch_size=batch_size)


def _scaled(costs: CostModel, factor: float) -> CostModel:
    return CostModel(
        plain_ms=costs.plain_ms,
        verify_ms={k: ms * factor for k, ms in costs.verify_ms.items()},
        draft_ms=costs.draft_ms,
        resync_ms=costs.resync_ms,
        shadow_ms=costs.shadow_ms,
    )


def all_workloads(candidates: tuple[int, ...]) -> list[Workload]:
    """The trace set of the result table."""
    tie = tie_acceptance(BASE, candidates)
    ramp = tuple(_phase(1200 // max(1, b // 8), 0.7, BATCHED, b) for b in (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1))
    mixed = Phase(tokens=2500, acceptance=(0.85, 0.25), costs=BATCHED, batch_size=8)
    kinds = Phase(tokens=12_000, acceptance=(0.8, 0.3), costs=BASE)
    short = Phase(tokens=12_000, acceptance=(0.7,), costs=BASE)
    embedded = Phase(tokens=8_000, acceptance=(0.5,), costs=EMBEDDED)
    return [
        Workload(name="steady high (0.75)", phases=(_phase(12_000, 0.75),)),
        Workload(name="steady low (0.35)", phases=(_phase(12_000, 0.35),)),
        Workload(name=f"tie ({tie:.2f})", phases=(_phase(12_000, tie),)),
        Workload(name="alternating 0.8/0.3 every 600", phases=(_phase(600, 0.8), _phase(600, 0.3)) * 10),
        Workload(name="bad 2k then good", phases=(_phase(2000, 0.25), _phase(8000, 0.8))),
        Workload(name="bursts 0.8/500 + 0.2/150", phases=(_phase(500, 0.8), _phase(150, 0.2)) * 18),
        Workload(
            name="verify cost x1.6 and back",
            phases=(_phase(4000, 0.72), _phase(4000, 0.72, _scaled(BASE, 1.6)), _phase(4000, 0.72)),
        ),
        Workload(
            name="10k answer, bad in the middle",
            phases=(_phase(4000, 0.75), _phase(1500, 0.25), _phase(4500, 0.75)),
        ),
        Workload(name="short answers (120), 0.7", phases=(short,), answer_len=120),
        Workload(name="answers of 400, 0.8 and 0.3 in turn", phases=(kinds,), answer_len=400),
        Workload(name="load ramp 1..32..1, 0.7", phases=ramp, answer_len=500, noise=_BATCH_NOISE),
        Workload(name="batch of 8, half 0.85 half 0.25", phases=(mixed,), answer_len=600, noise=_BATCH_NOISE),
        Workload(name="embedded engine, 0.5", phases=(embedded,), answer_len=200, noise=_QUIET),
        Workload(name="embedded engine, 0.2", phases=(_phase(8_000, 0.2, EMBEDDED),), answer_len=200, noise=_QUIET),
    ]


def smoke_workloads(candidates: tuple[int, ...]) -> list[Workload]:
    """Short versions for CI."""
    tie = tie_acceptance(BASE, candidates)
    return [
        Workload(name="steady high (0.75)", phases=(_phase(2500, 0.75),)),
        Workload(name="steady low (0.35)", phases=(_phase(2500, 0.35),)),
        Workload(name=f"tie ({tie:.2f})", phases=(_phase(2500, tie),)),
        Workload(name="alternating 0.8/0.3 every 600", phases=(_phase(600, 0.8), _phase(600, 0.3)) * 2),
    ]


def variant_workloads() -> list[Workload]:
    """Relatives of the changing workloads with other levels, periods and costs. Nothing was tuned on them."""
    kinds = Phase(tokens=10_000, acceptance=(0.85, 0.4), costs=BASE)
    mixed = Phase(tokens=2500, acceptance=(0.8, 0.35), costs=BATCHED, batch_size=4)
    return [
        Workload(name="variant: alternating 0.75/0.25 every 900", phases=(_phase(900, 0.75), _phase(900, 0.25)) * 7),
        Workload(name="variant: alternating 0.85/0.4 every 350", phases=(_phase(350, 0.85), _phase(350, 0.4)) * 17),
        Workload(name="variant: bursts 0.75/700 + 0.3/250", phases=(_phase(700, 0.75), _phase(250, 0.3)) * 12),
        Workload(name="variant: mostly bad, 0.8/200 + 0.3/1000", phases=(_phase(200, 0.8), _phase(1000, 0.3)) * 10),
        Workload(
            name="variant: verify cost x1.4 and back, 0.68",
            phases=(_phase(3000, 0.68), _phase(5000, 0.68, _scaled(BASE, 1.4)), _phase(4000, 0.68)),
        ),
        Workload(name="variant: answers of 250, 0.85 and 0.4 in turn", phases=(kinds,), answer_len=250),
        Workload(name="variant: batch of 4, half 0.8 half 0.35", phases=(mixed,), answer_len=300, noise=_BATCH_NOISE),
    ]


# The founding case: 12.2 ms plain, 30 ms verify of which 24 are all-reduce latency, so K hardly matters; 1 ms draft.
SEED_K = 3


def _seed_costs(verify_ms: float) -> CostModel:
    return CostModel(plain_ms=12.2, verify_ms={1: verify_ms, 8: verify_ms}, draft_ms=1.0 / SEED_K, resync_ms=2.0)


def seed_workloads() -> list[Workload]:
    """The founding case at acceptance lengths 2.0 to 3.0 (of K = 3), and the shift from 2.0 to 3.0 in one answer."""
    noise = Noise(plain_cv=0.05, spec_cv=0.1, stall_rate=0.001)
    loads = [
        Workload(
            name=f"seed, verify {verify_ms:.0f} ms, length {length}",
            phases=(_phase(6000, acceptance_for_length(length, SEED_K), _seed_costs(verify_ms)),),
            answer_len=2000,
            noise=noise,
        )
        for verify_ms in (30.0, 20.0, 15.0)
        for length in (2.0, 2.3, 2.46, 2.7, 3.0)
    ]
    low, high = acceptance_for_length(2.0, SEED_K), acceptance_for_length(3.0, SEED_K)
    shift = (_phase(3000, low, _seed_costs(30.0)), _phase(3000, high, _seed_costs(30.0)))
    return [*loads, Workload(name="seed, shift 2.0 to 3.0", phases=shift, noise=noise)]
