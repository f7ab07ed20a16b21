from __future__ import annotations

import re

from gateway.http.dashboard import load_page
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine


async def test_the_page_is_served_at_the_root(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    for url in ("/", "/dashboard"):
        response = await client.get(url)
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = load_page().decode()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    assert "@import" not in page


async def test_every_field_the_page_reads_is_in_stats(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    stats = await (await client.get("/stats")).json()
    paths = set(re.findall(r"\bs\.([a-z_]+(?:\.[a-z_]+)*)", load_page().decode()))
    assert len(paths) > 10
    for path in paths:
        value = stats
        for name in path.split("."):
            if isinstance(value, dict) and name not in ("length", "map", "join"):
                assert name in value, f"/stats has no {path}"
                value = value[name]
