"""Tools and formats over HTTP: what the engine is asked, and what the client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import EOS, Script
from tests.gateway.http.wide_engine import WideEngine
from tests.gateway.sse_reader import chunks, text_of

URL = "/v1/chat/completions"
BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "time"}}]
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("block_lens", [(1,), (7, 3), (500,)])
async def test_streamed_calls_follow_the_rules_of_deltas(start_edge: StartEdge, block_lens: tuple[int, ...]) -> None:
    # C-21, B-12: index always; id, type and name once; then only arguments
    client = await start_edge(WideEngine([Script(text="Sure. " + CALLS, block_lens=block_lens)]))
    response = await client.post(URL, json={**BODY, "tools": TOOLS, "stream": True})
    found = chunks(await response.read())
    fragments = [part for chunk in found for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
    arguments = ["", ""]
    for fragment in fragments:
        arguments[fragment["index"]] += fragment["function"]["arguments"]
    firsts = [fragment for fragment in fragments if "id" in fragment]
    assert [fragment["function"]["name"] for fragment in firsts] == ["weather", "time"]
    assert all(fragment["type"] == "function" and fragment["id"].startswith("call_") for fragment in firsts)
    assert all("name" not in fragment["function"] for fragment in fragments if "id" not in fragment)
    assert [fragment["index"] for fragment in fragments] == sorted(fragment["index"] for fragment in fragments)
    assert [json.loads(text) for text in arguments] == [{"city": "Paris"}, {}]
    assert text_of(found) == "Sure. "
    assert [chunk["choices"][0]["finish_reason"] for chunk in found][-1] == "tool_calls"


async def test_whole_calls(start_edge: StartEdge) -> None:
    engine = WideEngine([Script(text=CALLS)])
    client = await start_edge(engine)
    choice = (await (await client.post(URL, json={**BODY, "tools": TOOLS})).json())["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert second["function"] == {"name": "time", "arguments": "{}"}
    prompt = engine.codec.decode(engine.requests[0].prompt_ids)
    assert '"name": "weather"' in prompt
    assert engine.requests[0].sampling.grammar is None


async def test_a_cut_call_ends_for_length(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=CALLS)]))
    body = {**BODY, "tools": TOOLS, "max_tokens": 60}
    choice = (await (await client.post(URL, json=body)).json())["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_without_tools_the_text_stays_text(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=CALLS)]))
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await (await client.post(URL, json={**BODY, **fields})).json())["choices"][0]
        assert choice["message"]["content"] == CALLS
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "rules"),
    [
        ("required", ["call_0: %json", "call_1: %json"]),
        ({"type": "function", "function": {"name": "time"}}, ["call_0: %json"]),
    ],
)
async def test_a_forced_call_is_a_grammar(start_edge: StartEdge, choice: Any, rules: list[str]) -> None:
    engine = WideEngine([Script(text=CALLS)])
    client = await start_edge(engine)
    await client.post(URL, json={**BODY, "tools": TOOLS, "tool_choice": choice})
    sampling = engine.requests[0].sampling
    assert sampling.grammar is not None
    assert (sampling.grammar.kind, sampling.eos_ids) == ("lark", (EOS,))
    lines = sampling.grammar.text.splitlines()
    assert lines[0] == "start: call"
    assert [line[: len("call_0: %json")] for line in lines[2:]] == rules
    await client.post(URL, json={**BODY, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": True})
    assert engine.requests[1].sampling.grammar.text.startswith('start: call ("\\n" call)*')


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema",
         json.dumps(SCHEMA, separators=(",", ":"))),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_json": '{"const":1}'}, "json_schema", '{"const":1}'),
        ({"guided_choice": ["yes", 'a"b']}, "lark", 'start: "yes" | "a\\"b"'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
    ],
)  # fmt: skip
async def test_every_spelling_of_a_format(start_edge: StartEdge, fields: dict[str, Any], kind: str, text: str) -> None:
    engine = WideEngine()
    client = await start_edge(engine)
    assert (await client.post(URL, json={**BODY, **fields})).status == 200
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)


async def test_a_plain_format_is_no_grammar(start_edge: StartEdge) -> None:
    engine = WideEngine()
    client = await start_edge(engine)
    await client.post(URL, json={**BODY, "response_format": {"type": "text"}})
    assert engine.requests[0].sampling.grammar is None
    assert engine.requests[0].sampling.eos_ids == ()
