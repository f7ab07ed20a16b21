from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from gateway.edge_counters import EdgeCounters
from gateway.metrics import METRICS, Observed, render_metrics
from tests.gateway.fakes import make_snapshot


def observed() -> Observed:
    counters = EdgeCounters()
    counters.responses["/v1/chat/completions 200"] += 3
    return Observed(stats=make_snapshot(), http=counters.snapshot())


def test_every_metric_is_declared_once_and_fully() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert re.fullmatch(r"(breakeven_|sglang:|vllm:)[a-z_]+", metric.name)
        assert not metric.name.endswith("_total")
        assert metric.sentence.endswith(".")
        assert metric.unit
        assert (metric.unit == "seconds") is metric.name.endswith("_seconds")


def test_every_metric_that_was_measured_has_a_sample_with_its_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(render_metrics(observed()).decode())}
    for metric in METRICS:
        family = families[metric.name]
        assert family.type == metric.kind
        assert family.samples or metric.name in ("breakeven_overhead_seconds", "breakeven_tpot_seconds")
        assert all(set(sample.labels) == set(metric.labels) for sample in family.samples)


def test_routes_with_their_status() -> None:
    text = render_metrics(observed()).decode()
    assert 'breakeven_http_responses_total{route="/v1/chat/completions",status="200"} 3.0' in text
    assert 'breakeven_spec_fallbacks_total{reason="drafter_late"} 2.0' in text
