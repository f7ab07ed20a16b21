from __future__ import annotations

import pytest

from gateway.errors import AuthenticationFailed
from gateway.http.auth import check_api_key
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer second-key", "Bearer  first-key "])
def test_right_keys(header: str) -> None:
    check_api_key(header, KEYS)


@pytest.mark.parametrize(
    "header", [None, "", "first-key", "Basic first-key", "Bearer ", "Bearer first-keyy", "Bearer é"]
)
def test_wrong_keys(header: str | None) -> None:
    with pytest.raises(AuthenticationFailed):
        check_api_key(header, KEYS)


@pytest.mark.parametrize("url", ["/v1/models", "/stats", "/metrics", "/server_info", "/nowhere"])
async def test_a_key_is_needed(start_edge: StartEdge, url: str) -> None:
    client = await start_edge(FakeEngine(), api_keys=KEYS)
    response = await client.get(url)
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "missing_api_key")
    assert (await client.get(url, headers={"Authorization": "Bearer second-key"})).status in (200, 404)


@pytest.mark.parametrize("url", ["/health", "/ready", "/ping", "/"])
async def test_probes_and_the_page_are_open(start_edge: StartEdge, url: str) -> None:
    client = await start_edge(FakeEngine(), api_keys=KEYS)
    assert (await client.get(url)).status == 200


async def test_no_keys_no_lock(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    assert (await client.get("/stats")).status == 200
