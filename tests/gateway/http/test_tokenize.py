from __future__ import annotations

import pytest

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import BOS, CONTEXT_LEN, FakeEngine


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_to_ids_and_back(start_edge: StartEdge, prefix: str) -> None:
    client = await start_edge(FakeEngine())
    answer = await (await client.post(f"{prefix}/tokenize", json={"prompt": "hé"})).json()
    assert answer == {"tokens": [BOS, 104, 195, 169], "count": 4, "max_model_len": CONTEXT_LEN}
    answer = await (await client.post(f"{prefix}/detokenize", json={"tokens": answer["tokens"]})).json()
    assert answer == {"prompt": "<s>hé"}


async def test_messages(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    messages = [{"role": "user", "content": "x" * 3000}]
    short = await (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    long = await (await client.post("/tokenize", json={"messages": messages})).json()
    assert long["count"] - short["count"] == len("assistant:")


async def test_prompt_and_messages_together_are_refused(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    body = {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}
    assert (await client.post("/tokenize", json=body)).status == 400
    assert (await client.post("/tokenize", json={"prompt": "a", "model": "gpt-9"})).status == 404
