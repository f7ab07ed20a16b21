from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine


async def test_stats_is_the_snapshot_and_the_edges_counters(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    stats = await (await client.get("/stats")).json()
    assert stats["speculation"]["break_even_length"] == 1.9
    assert stats["speculation"]["buckets"][0]["verify_costs"][0]["verify_ms"] == 30.0
    assert stats["overhead_ms"] is None
    assert stats["drafter"]["counters"] == {"resyncs": 2}
    assert stats["http"]["client_closed"] == 0


async def test_metrics_are_prometheus_text_with_the_names_load_tools_read(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    response = await client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert families["sglang:spec_accept_length"].samples[0].value == 2.5
    assert families["sglang:spec_accept_rate"].samples[0].labels == {"model_name": "toy/model"}
    assert families["breakeven_verify_seconds"].samples[0].value == 0.0125
    assert families["breakeven_overhead_seconds"].samples == []
    assert (await client.head("/metrics")).status == 200


async def test_server_info_has_the_accept_length(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    for url in ("/server_info", "/get_server_info"):
        info = await (await client.get(url)).json()
        assert info["internal_states"][0]["avg_spec_accept_length"] == 2.5
        assert info["version"] == "0.1.0"
