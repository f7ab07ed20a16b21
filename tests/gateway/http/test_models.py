from __future__ import annotations

from gateway.ports import LoadPhase
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import CONTEXT_LEN, FakeEngine

LOADING = LoadPhase(is_ready=False, is_draining=False, phase="loading target", progress=0.4)


async def test_names_and_aliases_are_listed_also_while_loading(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(phase=LOADING))
    listed = await (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["toy/model", "toy"]
    assert listed["data"][0] == {
        "id": "toy/model",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "breakeven",
        "root": "toy/model",
        "parent": None,
        "max_model_len": CONTEXT_LEN,
    }


async def test_the_context_length_may_not_be_known_yet(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(phase=LOADING, is_size_known=False))
    assert (await (await client.get("/v1/models/toy")).json())["max_model_len"] is None


async def test_one_model_by_name_with_slash_or_alias(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    for url in ("/v1/models/toy/model", "/v1/models/toy%2Fmodel", "/v1/models/toy"):
        assert (await (await client.get(url)).json())["root"] == "toy/model"
    response = await client.get("/v1/models/other")
    assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
