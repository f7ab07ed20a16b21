"""Stored and background responses: read, continue, cancel, forget, list; by the official client too."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.config import GatewayConfig
from gateway.errors import QueueFull, TargetFailed
from gateway.http import create_app, start_server
from gateway.http.edge import EDGE
from tests.gateway.conftest import StartEdge, until
from tests.gateway.fakes import ByteCodec, Script
from tests.gateway.http.wide_engine import WideEngine

URL = "/v1/responses"
BODY = {"model": "toy", "input": "Hi"}
KEYS = ("first-key", "second-key")


async def create(client: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={**BODY, **fields})
    assert response.status == 200, await response.text()
    return await response.json()


async def read(client: Any, response_id: str) -> dict[str, Any]:
    return await (await client.get(f"{URL}/{response_id}")).json()


async def ended(client: Any, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (found := await read(client, response_id))["status"] in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return found


async def refused(response: Any) -> tuple[int, str]:
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status, error["code"]


async def test_a_stored_response_is_read_listed_and_forgotten(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    answer = await create(client)
    assert answer["store"] is True
    assert await read(client, answer["id"]) == answer
    items = await (await client.get(f"{URL}/{answer['id']}/input_items")).json()
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "Hi"}]
    assert (items["first_id"], items["has_more"]) == (items["data"][0]["id"], False)
    gone = await (await client.delete(f"{URL}/{answer['id']}")).json()
    assert gone == {"id": answer["id"], "object": "response", "deleted": True}
    assert await refused(await client.get(f"{URL}/{answer['id']}")) == (404, "response_not_found")


async def test_a_streamed_response_is_stored_too(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    raw = await (await client.post(URL, json={**BODY, "stream": True})).text()
    response_id = raw.split('"id":"')[1].split('"')[0]
    assert (await read(client, response_id))["output"][0]["content"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("method", "tail"), [("get", ""), ("delete", ""), ("post", "/cancel"), ("get", "/input_items")]
)
async def test_an_unknown_id_is_a_404(start_edge: StartEdge, method: str, tail: str) -> None:
    client = await start_edge(WideEngine())
    answer = await create(client, store=False)
    assert answer["store"] is False
    for response_id in ("resp_1", answer["id"]):
        response = await getattr(client, method)(f"{URL}/{response_id}{tail}")
        assert await refused(response) == (404, "response_not_found")


async def test_nothing_is_stored_if_the_configuration_says_so(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine(), max_stored_responses=0)
    assert (await create(client))["store"] is False
    response = await client.post(URL, json={**BODY, "background": True})
    assert await refused(response) == (400, "unsupported_value")


async def test_a_key_sees_its_own_responses_only(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine(), api_keys=KEYS)
    first, second = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    answer = await (await client.post(URL, json=BODY, headers=first)).json()
    assert (await client.get(f"{URL}/{answer['id']}", headers=first)).status == 200
    assert (await client.get(f"{URL}/{answer['id']}", headers=second)).status == 404
    chained = {**BODY, "previous_response_id": answer["id"]}
    response = await client.post(URL, json=chained, headers=second)
    assert await refused(response) == (400, "previous_response_not_found")


async def test_a_conversation_is_continued_without_its_instructions(start_edge: StartEdge) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    engine = WideEngine([Script(text="Sure. " + call), Script(text="It is 1."), Script(text="Bye")])
    client = await start_edge(engine)
    tools = [{"type": "function", "name": "f"}]
    first = await create(client, instructions="Be kind.", tools=tools)
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "1"}
    second = await create(client, input=[result], previous_response_id=first["id"])
    third = await create(client, input="Thanks", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    prompts = [engine.codec.decode(request.prompt_ids) for request in engine.requests]
    assert prompts[0].startswith("system:Be kind.")
    assert "Be kind" not in prompts[1] + prompts[2]
    assert prompts[2] == "user:Hi\nassistant:Sure. \ntool:1\nassistant:It is 1.\nuser:Thanks\nassistant:"


async def test_pages_of_input_items(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    items = [{"role": "user", "content": f"{number}", "id": f"msg_{number}"} for number in range(5)]
    answer = await create(client, input=items)

    async def page(query: str) -> tuple[list[str], bool]:
        found = await (await client.get(f"{URL}/{answer['id']}/input_items?{query}")).json()
        return [item["id"].removeprefix("msg_") for item in found["data"]], found["has_more"]

    assert await page("limit=2") == (["4", "3"], True)
    assert await page("limit=2&after=msg_3") == (["2", "1"], True)
    assert await page("order=asc&after=msg_2") == (["3", "4"], False)
    assert await page("after=msg_0") == ([], False)
    for query in ("limit=0", "limit=x", "limit=101", "order=up", "after=msg_9"):
        response = await client.get(f"{URL}/{answer['id']}/input_items?{query}")
        assert await refused(response) == (400, "invalid_value")


async def test_a_background_response_runs_alone(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=3)])
    client = await start_edge(engine)
    answer = await create(client, background=True)
    assert (answer["status"], answer["background"]) == ("queued", True)
    await engine.held.wait()
    assert (await read(client, answer["id"]))["status"] == "in_progress"
    response = await client.post(URL, json={**BODY, "previous_response_id": answer["id"]})
    assert await refused(response) == (400, "invalid_value")
    engine.hold.set()
    found = await ended(client, answer["id"])
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "Hello world")
    cancelled = await (await client.post(f"{URL}/{answer['id']}/cancel")).json()
    assert cancelled == found
    assert (engine.num_admitted, engine.num_running) == (0, 0)


async def test_cancel_stops_the_engine_and_keeps_what_there_is(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=5)])
    client = await start_edge(engine)
    answer = await create(client, background=True)
    await engine.held.wait()
    cancelled = await (await client.post(f"{URL}/{answer['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "Hello")
    assert cancelled["output"][0]["status"] == "incomplete"
    assert (engine.num_closed_early, engine.num_admitted) == (1, 0)
    assert await read(client, answer["id"]) == cancelled


async def test_a_response_of_a_request_can_not_be_cancelled(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    answer = await create(client)
    assert await refused(await client.post(f"{URL}/{answer['id']}/cancel")) == (400, "invalid_value")


async def test_forgetting_stops_what_runs(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=5)])
    client = await start_edge(engine)
    answer = await create(client, background=True)
    await engine.held.wait()
    assert (await client.delete(f"{URL}/{answer['id']}")).status == 200
    assert (engine.num_closed_early, engine.num_admitted) == (1, 0)
    assert (await client.get(f"{URL}/{answer['id']}")).status == 404


@pytest.mark.parametrize(("error", "code"), [(TargetFailed("lost"), "upstream_error"), (OSError(), "internal_error")])
async def test_a_failure_in_the_background_is_found_there(start_edge: StartEdge, error: Exception, code: str) -> None:
    engine = WideEngine([Script(error=error, error_after=2)])
    client = await start_edge(engine)
    found = await ended(client, (await create(client, background=True))["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", code)
    assert engine.num_admitted == 0


async def test_room_is_asked_for_before_the_answer(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine(admit_error=QueueFull("full", retry_after_s=1)))
    assert (await client.post(URL, json={**BODY, "background": True})).status == 429
    assert len(client.app[EDGE].responses) == 0


async def test_a_key_holds_its_place_until_the_end(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=1)])
    client = await start_edge(engine, max_running_per_key=1)
    answer = await create(client, background=True)
    await engine.held.wait()
    assert (await client.post(URL, json=BODY)).status == 429
    await client.post(f"{URL}/{answer['id']}/cancel")
    engine.scripts = [Script()]
    assert (await client.post(URL, json=BODY)).status == 200


async def test_the_end_of_the_application_ends_what_runs(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=1)])
    client = await start_edge(engine)
    await create(client, background=True)
    await engine.held.wait()
    await client.close()
    assert (engine.num_closed_early, engine.num_admitted) == (1, 0)


async def test_a_client_that_left_leaves_no_response(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=1)])
    client = await start_edge(engine)
    post = asyncio.ensure_future(client.post(URL, json=BODY))
    await engine.held.wait()
    assert len(client.app[EDGE].responses) == 1
    post.cancel()
    await until(lambda: len(client.app[EDGE].responses) == 0)


async def test_a_background_stream_is_read_again_from_any_event(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=6)])
    client = await start_edge(engine)
    response = await client.post(URL, json={**BODY, "background": True, "stream": True})
    await response.content.readuntil(b'"response.output_text.delta"')
    response.close()  # leaving ends nothing
    (response_id,) = client.app[EDGE].responses._entries
    await engine.held.wait()
    assert engine.num_closed_early == 0
    again = await client.get(f"{URL}/{response_id}?stream=true&starting_after=2")
    engine.hold.set()
    blocks = (await again.text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    numbers = [int(block.split('"sequence_number":')[1].split(",")[0]) for block in blocks[:-2]]
    assert numbers == list(range(3, 3 + len(numbers)))
    assert "response.completed" in blocks[-3]
    whole = await (await client.get(f"{URL}/{response_id}?stream=true")).text()
    assert whole.endswith("\n\n".join(blocks))
    past = await (await client.get(f"{URL}/{response_id}?stream=true&starting_after=9999")).text()
    assert past == ""


async def test_a_stream_of_a_cancelled_response_ends(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(hold_after=3)])
    client = await start_edge(engine, keep_alive_s=0)
    response = await client.post(URL, json={**BODY, "background": True, "stream": True})
    await engine.held.wait()
    (response_id,) = client.app[EDGE].responses._entries
    await client.post(f"{URL}/{response_id}/cancel")
    assert (await response.text()).endswith("data: [DONE]\n\n")


async def test_only_a_background_stream_can_be_streamed_again(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    answer = await create(client)
    for query in ("stream=true", "stream=yes"):
        assert await refused(await client.get(f"{URL}/{answer['id']}?{query}")) == (400, "invalid_value")


@pytest.mark.parametrize("block_lens", [(1,), (4, 3), (500,)])
async def test_logprobs_belong_to_the_text(start_edge: StartEdge, block_lens: tuple[int, ...]) -> None:
    text = '<think>hm</think>Hi <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine = WideEngine([Script(text=text, block_lens=block_lens, top=((72, -0.25),))])
    client = await start_edge(engine, reasoning_markers=("<think>", "</think>"))
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = await create(client, tools=[{"type": "function", "name": "f"}], **fields)
    assert answer["top_logprobs"] == 1
    message = next(item for item in answer["output"] if item["type"] == "message")
    entries = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == "Hi "
    assert entries[0] == {
        "token": "H", "logprob": -0.5, "bytes": [72],
        "top_logprobs": [{"token": "H", "logprob": -0.25, "bytes": [72]}],
    }  # fmt: skip


async def test_logprobs_of_a_stream(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text="Hi there", block_lens=(3,))]))
    raw = await (await client.post(URL, json={**BODY, "stream": True, "top_logprobs": 1})).text()
    assert raw.count('"response.output_text.delta"') == 3
    assert raw.count('"bytes"') == 3 * len("Hi there")  # the part, the item and the response when they are done


async def test_the_official_client() -> None:
    config = GatewayConfig(port=0)
    engine = WideEngine([Script(), Script(text="Again"), Script(hold_after=1)])
    runner = await start_server(create_app(engine, ByteCodec(), config), config)
    host, port = runner.addresses[0][:2]
    async with AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client:
        first = await client.responses.create(model="toy", input="Hi", include=["message.output_text.logprobs"])
        second = await client.responses.create(model="toy", input="More", previous_response_id=first.id)
        assert (await client.responses.retrieve(second.id)).output_text == "Again"
        items = [item async for item in client.responses.input_items.list(first.id)]
        background = await client.responses.create(model="toy", input="Hi", background=True)
        assert background.status == "queued"
        await engine.held.wait()
        cancelled = await client.responses.cancel(background.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve(first.id)
    await runner.cleanup()
    assert items[0].content[0].text == "Hi"
    assert cancelled.status == "cancelled"
    assert caught.value.code == "response_not_found"
