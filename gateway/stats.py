"""The snapshot that /stats, /metrics, the dashboard and the log line all read. Records only.

Counters are raw sums; every ratio stands beside the counters it is computed from. Times are in milliseconds, because
this is a report (STYLE N6). A value that has not been measured yet is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BucketStats",
    "CostStats",
    "DraftCostStats",
    "LatencyStats",
    "PeerStats",
    "RequestStats",
    "SpeculationStats",
    "StatsSnapshot",
    "TokenStats",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyStats:
    """A distribution of wall times: count, recent percentiles and the exponentially weighted mean, in ms."""

    count: int
    p50: float | None
    p95: float | None
    ewma: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStats:
    """One cost cell: a verify round trip of ``num_draft_tokens`` drafts a request, in ms."""

    num_draft_tokens: int
    verify_ms: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCostStats:
    """One cost cell of the drafter: proposing ``num_draft_tokens`` tokens, in ms."""

    num_draft_tokens: int
    draft_ms: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStats:
    """What the controller knows and does for one batch-size bucket.

    break_even_lengths: of every measured K; speedup_se: its standard error; next_probe_in_tokens: None unless OFF.
    """

    batch_size: int
    state: str
    reason: str
    num_draft_tokens: int
    plain_ms: float | None
    break_even_length: float | None
    acceptance_length: float | None
    speedup: float | None
    speedup_se: float | None
    next_probe_in_tokens: int | None
    num_switches: int
    break_even_lengths: dict[str, float]
    verify_costs: tuple[CostStats, ...]
    draft_costs: tuple[DraftCostStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """Speculation over all buckets.

    ``acceptance_length`` is committed / rounds over rounds with at least one draft token and includes the +1.
    ``break_even_length`` is C(K)/t of the busiest bucket at the K in use (or the K that would be tried next).
    """

    state: str
    reason: str
    break_even_length: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    acceptance_rate_per_position: tuple[float, ...]
    num_rounds: int
    num_plain_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    num_drafts_per_position: tuple[int, ...]
    num_accepted_per_position: tuple[int, ...]
    num_shadows: int
    num_shadow_draft_tokens: int
    num_shadow_accepted_tokens: int
    fallbacks: dict[str, int]
    buckets: tuple[BucketStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Requests by where they are and how they ended."""

    running: int
    waiting: int
    finished: dict[str, int]
    failed: dict[str, int]
    client_closed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Token counters over all requests."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """Health of one of the two other processes."""

    state: str
    phase: str
    pid: int | None
    restarts: int
    last_error: str | None
    counters: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSnapshot:
    """Everything the gateway reports about itself at one moment."""

    version: str
    model: str
    uptime_s: float
    requests: RequestStats
    tokens: TokenStats
    speculation: SpeculationStats
    plain_ms: LatencyStats
    verify_ms: LatencyStats
    draft_ms: LatencyStats
    overhead_ms: float | None
    ttft_ms: LatencyStats
    tpot_ms: LatencyStats
    verifier: PeerStats
    drafter: PeerStats
