"""POST /v1/responses: the object, the typed events, and the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

from gateway.config import GatewayConfig
from gateway.errors import QueueFull, TargetFailed
from gateway.http import create_app, start_server
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import ByteCodec, Script
from tests.gateway.http.wide_engine import WideEngine

URL = "/v1/responses"
BODY = {"model": "toy", "input": "Hi"}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={**BODY, **fields, "stream": True})
    assert response.status == 200, await response.text()
    blocks = (await response.read()).decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events = []
    for block in blocks[:-2]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_whole_answer(start_edge: StartEdge) -> None:
    engine = WideEngine()
    client = await start_edge(engine)
    fields = {"instructions": "Be kind.", "temperature": 0.5, "metadata": {"a": "b"}, "seed": 5, "user": "me"}
    response = await client.post(URL, json={**BODY, **fields})
    answer = await response.json()
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"] == [
        {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    ]
    assert answer["usage"]["output_tokens"] == 11
    assert (answer["instructions"], answer["temperature"], answer["metadata"]) == ("Be kind.", 0.5, {"a": "b"})
    assert engine.codec.decode(engine.requests[0].prompt_ids) == "system:Be kind.\nuser:Hi\nassistant:"
    assert engine.requests[0].sampling.seed == 5
    assert 'spec;desc="rounds=4 plain=1 drafted=12 accepted=6"' in response.headers["Server-Timing"]


async def test_text_events(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(block_lens=(4,))]))
    events = await stream(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event.get("delta", "") for event in events) == "Hello world"
    assert events[0]["response"]["usage"] is None
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello world"


async def test_an_answer_without_text_has_its_message(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text="")]))
    final = (await stream(client))[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message"]


async def test_a_cut_answer_is_incomplete(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine())
    final = (await stream(client, max_output_tokens=3))[-1]
    assert final["type"] == "response.incomplete"
    assert final["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_calls_are_items(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text="Sure. " + CALL + "\n" + CALL, block_lens=(5,))]))
    events = await stream(client, tools=TOOLS)
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "function_call"]
    assert final["output"][1]["arguments"] == '{"city": "Paris"}'
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas if event["output_index"] == 2) == '{"city": "Paris"}'


async def test_history_of_calls(start_edge: StartEdge) -> None:
    engine = WideEngine()
    client = await start_edge(engine)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is sunny"}]},
    ]
    assert (await client.post(URL, json={"model": "toy", "input": items, "tools": TOOLS})).status == 200
    prompt = engine.codec.decode(engine.requests[0].prompt_ids)
    assert prompt.count("assistant:<tool_call>") == 1
    assert "user:<tool_response>\nsun\n</tool_response>" in prompt


async def test_a_format_and_a_forced_tool_are_grammars(start_edge: StartEdge) -> None:
    engine = WideEngine()
    client = await start_edge(engine)
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    await client.post(URL, json={**BODY, "text": text})
    await client.post(URL, json={**BODY, "tools": TOOLS, "tool_choice": {"type": "function", "name": "weather"}})
    kinds = [request.sampling.grammar.kind for request in engine.requests if request.sampling.grammar]
    assert kinds == ["json_schema", "lark"]


async def test_errors_before_and_inside_the_stream(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(error=TargetFailed("lost"), error_after=3)])
    client = await start_edge(engine)
    events = await stream(client)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["error"]["message"] == "lost"
    assert (events[-1]["response"]["status"], events[-1]["response"]["error"]["message"]) == ("failed", "lost")
    engine.admit_error = QueueFull("full", retry_after_s=1)
    assert (await client.post(URL, json={**BODY, "stream": True})).status == 429


@pytest.mark.parametrize("text", ["Hello world", "Sure. " + CALL])
async def test_the_official_client(text: str) -> None:
    config = GatewayConfig(port=0)
    runner = await start_server(create_app(WideEngine([Script(text=text)]), ByteCodec(), config), config)
    host, port = runner.addresses[0][:2]
    async with AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="x", max_retries=0) as client:
        whole = await client.responses.create(model="toy", input="Hi", tools=TOOLS)
        async with client.responses.stream(model="toy", input="Hi", tools=TOOLS) as events:
            async for _ in events:
                pass
            final = await events.get_final_response()
    await runner.cleanup()
    assert whole.output_text == final.output_text == text.removesuffix(CALL)
    assert [item.type for item in whole.output] == [item.type for item in final.output]
