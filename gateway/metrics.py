"""Every Prometheus metric, declared once: name, type, unit, labels, one sentence, and where in the snapshot it stands.

Counters are raw sums and ratios are left to the reader, except the few gauges load tools look for by name. A value that
has not been measured yet has no sample. Milliseconds of the snapshot become seconds here, as Prometheus wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import Metric as MetricFamily
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from gateway.edge_counters import EdgeStats
from gateway.stats import BucketStats, LatencyStats, PeerStats, StatsSnapshot

__all__ = ["METRICS", "Metric", "Observed", "Sample", "render_metrics"]

Sample = tuple[tuple[str, ...], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a scrape sees: the engine's snapshot and the HTTP edge's counters of the same moment."""

    stats: StatsSnapshot
    http: EdgeStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Fields:
        name: without the ``_total`` that counters get.
        unit: of the value, in words; part of the name where Prometheus has a suffix for it.
        labels: label names, in the order in which ``read`` gives their values.
        read: the samples; one whose value is None is left out.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    labels: tuple[str, ...]
    sentence: str
    read: Callable[[Observed], Iterable[Sample]]


def render_metrics(observed: Observed) -> bytes:
    """All metrics in Prometheus' text format 0.0.4."""
    return generate_latest(_Scrape(observed))


class _Scrape(Collector):
    def __init__(self, observed: Observed) -> None:
        self._observed = observed

    def collect(self) -> Iterator[MetricFamily]:
        for metric in METRICS:
            family = MetricFamily(metric.name, metric.sentence, metric.kind)
            sample_name = metric.name + ("_total" if metric.kind == "counter" else "")
            for values, value in metric.read(self._observed):
                if value is not None:
                    family.add_sample(sample_name, dict(zip(metric.labels, values, strict=True)), value)
            yield family


def _one(read: Callable[[StatsSnapshot], float | None]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((), read(observed.stats))]


def _by_key(read: Callable[[StatsSnapshot], Mapping[str, int]]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((key,), value) for key, value in read(observed.stats).items()]


def _by_position(read: Callable[[StatsSnapshot], Iterable[float]]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((str(position),), value) for position, value in enumerate(read(observed.stats))]


def _by_bucket(read: Callable[[BucketStats], float | None]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((str(bucket.batch_size),), read(bucket)) for bucket in observed.stats.speculation.buckets]


def _by_peer(read: Callable[[PeerStats], float | None]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((name,), read(peer)) for name, peer in _peers(observed.stats)]


def _latency(read: Callable[[StatsSnapshot], LatencyStats]) -> Callable[[Observed], Iterable[Sample]]:
    def samples(observed: Observed) -> list[Sample]:
        latency = read(observed.stats)
        return [
            (("p50",), _seconds(latency.p50)),
            (("p95",), _seconds(latency.p95)),
            (("ewma",), _seconds(latency.ewma)),
        ]

    return samples


def _alias(read: Callable[[StatsSnapshot], float | None]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [((observed.stats.model,), read(observed.stats))]


def _alias_by_position(read: Callable[[StatsSnapshot], Iterable[float]]) -> Callable[[Observed], Iterable[Sample]]:
    return lambda observed: [
        ((observed.stats.model, str(position)), value) for position, value in enumerate(read(observed.stats))
    ]


def _peers(stats: StatsSnapshot) -> tuple[tuple[str, PeerStats], ...]:
    return ("verifier", stats.verifier), ("drafter", stats.drafter)


def _peer_states(observed: Observed) -> Iterable[Sample]:
    return [((name, peer.state), 1) for name, peer in _peers(observed.stats)]


def _peer_events(observed: Observed) -> Iterable[Sample]:
    return [((name, key), count) for name, peer in _peers(observed.stats) for key, count in peer.counters.items()]


def _bucket_states(observed: Observed) -> Iterable[Sample]:
    return [((str(bucket.batch_size), bucket.state), 1) for bucket in observed.stats.speculation.buckets]


def _verify_costs(observed: Observed) -> Iterable[Sample]:
    for bucket in observed.stats.speculation.buckets:
        for cost in bucket.verify_costs:
            yield (str(bucket.batch_size), str(cost.num_draft_tokens)), _seconds(cost.verify_ms)


def _draft_costs(observed: Observed) -> Iterable[Sample]:
    for bucket in observed.stats.speculation.buckets:
        for cost in bucket.draft_costs:
            yield (str(bucket.batch_size), str(cost.num_draft_tokens)), _seconds(cost.draft_ms)


def _http_responses(observed: Observed) -> Iterable[Sample]:
    for key, count in observed.http.responses.items():
        route, _, status = key.rpartition(" ")
        yield (route, status), count


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


_STAT = ("stat",)
_BATCH = ("batch_size",)
_COST = ("batch_size", "num_draft_tokens")
_MODEL = ("model_name",)

# fmt: off
METRICS: tuple[Metric, ...] = (
    Metric("breakeven_info", "gauge", "none", ("version", "model"), "Always 1; its labels say what runs.",
           lambda observed: [((observed.stats.version, observed.stats.model), 1)]),
    Metric("breakeven_uptime_seconds", "gauge", "seconds", (), "Time since the gateway started.",
           _one(lambda stats: stats.uptime_s)),
    Metric("breakeven_requests_running", "gauge", "requests", (), "Generations that hold a place at the target.",
           _one(lambda stats: stats.requests.running)),
    Metric("breakeven_requests_waiting", "gauge", "requests", (), "Generations admitted and waiting for a place.",
           _one(lambda stats: stats.requests.waiting)),
    Metric("breakeven_requests_finished", "counter", "requests", ("reason",), "Generations by finish reason.",
           _by_key(lambda stats: stats.requests.finished)),
    Metric("breakeven_requests_failed", "counter", "requests", ("error",), "Generations that ended with an error.",
           _by_key(lambda stats: stats.requests.failed)),
    Metric("breakeven_requests_client_closed", "counter", "requests", (), "Generations aborted as the client left.",
           _one(lambda stats: stats.requests.client_closed)),
    Metric("breakeven_prompt_tokens", "counter", "tokens", (), "Prompt tokens of all generations.",
           _one(lambda stats: stats.tokens.prompt_tokens)),
    Metric("breakeven_cached_tokens", "counter", "tokens", (), "Prompt tokens served from the prefix cache.",
           _one(lambda stats: stats.tokens.cached_tokens)),
    Metric("breakeven_completion_tokens", "counter", "tokens", (), "Tokens delivered, after cutting at stops.",
           _one(lambda stats: stats.tokens.completion_tokens)),
    Metric("breakeven_spec_state", "gauge", "none", ("state",), "1 for the state speculation as a whole is in.",
           lambda observed: [((observed.stats.speculation.state,), 1)]),
    Metric("breakeven_spec_break_even_length", "gauge", "tokens", (),
           "Acceptance length at which speculation costs as much as plain decode.",
           _one(lambda stats: stats.speculation.break_even_length)),
    Metric("breakeven_spec_acceptance_length", "gauge", "tokens", (),
           "Committed tokens per round with drafts, the bonus or recovered token included.",
           _one(lambda stats: stats.speculation.acceptance_length)),
    Metric("breakeven_spec_acceptance_rate", "gauge", "ratio", (), "Accepted share of the draft tokens.",
           _one(lambda stats: stats.speculation.acceptance_rate)),
    Metric("breakeven_spec_rounds", "counter", "rounds", (), "Rounds with at least one draft token.",
           _one(lambda stats: stats.speculation.num_rounds)),
    Metric("breakeven_plain_rounds", "counter", "rounds", (), "Rounds without draft tokens.",
           _one(lambda stats: stats.speculation.num_plain_rounds)),
    Metric("breakeven_spec_draft_tokens", "counter", "tokens", (), "Draft tokens sent to be verified.",
           _one(lambda stats: stats.speculation.num_draft_tokens)),
    Metric("breakeven_spec_accepted_tokens", "counter", "tokens", (), "Draft tokens the target agreed with.",
           _one(lambda stats: stats.speculation.num_accepted_tokens)),
    Metric("breakeven_spec_committed_tokens", "counter", "tokens", (), "Tokens committed by rounds with drafts.",
           _one(lambda stats: stats.speculation.num_committed_tokens)),
    Metric("breakeven_spec_drafts_per_position", "counter", "tokens", ("position",),
           "Draft tokens sent, by position in the draft.",
           _by_position(lambda stats: stats.speculation.num_drafts_per_position)),
    Metric("breakeven_spec_accepted_per_position", "counter", "tokens", ("position",),
           "Draft tokens accepted, by position in the draft.",
           _by_position(lambda stats: stats.speculation.num_accepted_per_position)),
    Metric("breakeven_spec_fallbacks", "counter", "events", ("reason",),
           "Times a request went to plain decode although speculation was wanted.",
           _by_key(lambda stats: stats.speculation.fallbacks)),
    Metric("breakeven_bucket_state", "gauge", "none", ("batch_size", "state"), "1 for the state the bucket is in.",
           _bucket_states),
    Metric("breakeven_bucket_num_draft_tokens", "gauge", "tokens", _BATCH, "Draft length in use; 0 is plain decode.",
           _by_bucket(lambda bucket: bucket.num_draft_tokens)),
    Metric("breakeven_bucket_plain_seconds", "gauge", "seconds", _BATCH, "Plain decode time per token.",
           _by_bucket(lambda bucket: _seconds(bucket.plain_ms))),
    Metric("breakeven_bucket_break_even_length", "gauge", "tokens", _BATCH, "Break-even acceptance length.",
           _by_bucket(lambda bucket: bucket.break_even_length)),
    Metric("breakeven_bucket_acceptance_length", "gauge", "tokens", _BATCH, "Acceptance length.",
           _by_bucket(lambda bucket: bucket.acceptance_length)),
    Metric("breakeven_bucket_speedup", "gauge", "ratio", _BATCH, "Speed against plain decode; above 1 it pays.",
           _by_bucket(lambda bucket: bucket.speedup)),
    Metric("breakeven_bucket_verify_seconds", "gauge", "seconds", _COST, "Verify round trip by draft length.",
           _verify_costs),
    Metric("breakeven_bucket_draft_seconds", "gauge", "seconds", _COST, "Draft time by draft length.",
           _draft_costs),
    Metric("breakeven_plain_seconds", "gauge", "seconds", _STAT, "Plain decode time per token.",
           _latency(lambda stats: stats.plain_ms)),
    Metric("breakeven_verify_seconds", "gauge", "seconds", _STAT, "Verify round trip.",
           _latency(lambda stats: stats.verify_ms)),
    Metric("breakeven_draft_seconds", "gauge", "seconds", _STAT, "Draft time of one round.",
           _latency(lambda stats: stats.draft_ms)),
    Metric("breakeven_ttft_seconds", "gauge", "seconds", _STAT, "Time to the first token.",
           _latency(lambda stats: stats.ttft_ms)),
    Metric("breakeven_tpot_seconds", "gauge", "seconds", _STAT, "Time per output token, the first left out.",
           _latency(lambda stats: stats.tpot_ms)),
    Metric("breakeven_overhead_seconds", "gauge", "seconds", (), "Cost of a round without drafts beyond plain decode.",
           _one(lambda stats: _seconds(stats.overhead_ms))),
    Metric("breakeven_peer_state", "gauge", "none", ("peer", "state"), "1 for the state the process is in.",
           _peer_states),
    Metric("breakeven_peer_restarts", "counter", "restarts", ("peer",), "Times the process was started again.",
           _by_peer(lambda peer: peer.restarts)),
    Metric("breakeven_peer_events", "counter", "events", ("peer", "event"), "The process's own counters.",
           _peer_events),
    Metric("breakeven_http_responses", "counter", "responses", ("route", "status"), "HTTP responses begun.",
           _http_responses),
    Metric("breakeven_http_client_closed", "counter", "requests", (), "Requests whose client left before the end.",
           lambda observed: [((), observed.http.client_closed)]),
    Metric("breakeven_http_open_streams", "gauge", "streams", (), "Streams being answered.",
           lambda observed: [((), observed.http.open_streams)]),
    Metric("breakeven_http_keep_alives", "counter", "comments", (), "Keep-alive comments written.",
           lambda observed: [((), observed.http.keep_alives)]),
    Metric("breakeven_http_stream_errors", "counter", "streams", (), "Streams that ended with an error event.",
           lambda observed: [((), observed.http.stream_errors)]),
    # The names load tools read from an SGLang or vLLM server.
    Metric("sglang:spec_accept_length", "gauge", "tokens", _MODEL, "Same as breakeven_spec_acceptance_length.",
           _alias(lambda stats: stats.speculation.acceptance_length)),
    Metric("sglang:spec_accept_rate", "gauge", "ratio", _MODEL, "Same as breakeven_spec_acceptance_rate.",
           _alias(lambda stats: stats.speculation.acceptance_rate)),
    Metric("sglang:num_running_reqs", "gauge", "requests", _MODEL, "Same as breakeven_requests_running.",
           _alias(lambda stats: stats.requests.running)),
    Metric("sglang:num_queue_reqs", "gauge", "requests", _MODEL, "Same as breakeven_requests_waiting.",
           _alias(lambda stats: stats.requests.waiting)),
    Metric("vllm:spec_decode_num_drafts", "counter", "rounds", _MODEL, "Same as breakeven_spec_rounds.",
           _alias(lambda stats: stats.speculation.num_rounds)),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "tokens", _MODEL, "Same as breakeven_spec_draft_tokens.",
           _alias(lambda stats: stats.speculation.num_draft_tokens)),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "tokens", _MODEL,
           "Same as breakeven_spec_accepted_tokens.",
           _alias(lambda stats: stats.speculation.num_accepted_tokens)),
    Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "tokens", ("model_name", "position"),
           "Same as breakeven_spec_accepted_per_position.",
           _alias_by_position(lambda stats: stats.speculation.num_accepted_per_position)),
)
# fmt: on
