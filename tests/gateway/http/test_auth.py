from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import AuthenticationFailed
from gateway.http.key_ring import KeyRing
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine

KEYS = ("first-key", "second-key")


@pytest.mark.parametrize("header", ["Bearer first-key", "bearer second-key", "Bearer  first-key "])
def test_right_keys(header: str) -> None:
    KeyRing(KEYS).check(header)


@pytest.mark.parametrize(
    "header", [None, "", "first-key", "Basic first-key", "Bearer ", "Bearer first-keyy", "Bearer é"]
)
def test_wrong_keys(header: str | None) -> None:
    with pytest.raises(AuthenticationFailed):
        KeyRing(KEYS).check(header)


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


def test_a_key_has_an_id_that_is_not_the_key() -> None:
    ring = KeyRing(KEYS)
    ids = {ring.check(f"Bearer {key}") for key in KEYS}
    assert len(ids) == 2
    assert not any(key in key_id for key in KEYS for key_id in ids)
    assert not KeyRing(())


async def test_keys_of_a_file_are_accepted_too(start_edge: StartEdge, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team a\nteam-a-key\n\n  team-b-key \n", encoding="utf-8")
    client = await start_edge(FakeEngine(), api_keys=("first-key",), api_key_file=path)
    for key, status in (("team-a-key", 200), ("team-b-key", 200), ("first-key", 200), ("# team a", 401)):
        assert (await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status == status
