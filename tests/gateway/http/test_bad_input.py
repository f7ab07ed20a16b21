"""Whatever comes in: the right status, a nested OpenAI error object, and a server that still answers."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any

import pytest

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import FakeEngine

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "toy", "messages": HI, **fields}).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": "toy", "prompt": "Hi", **fields}).encode()


CASES: list[tuple[str, str, bytes, int, str, str | None]] = [
    ("empty body", CHAT, b"", 400, "invalid_json", None),
    ("cut JSON", CHAT, b'{"messages": [', 400, "invalid_json", None),
    ("not UTF-8", CHAT, b'{"messages": "\xff"}', 400, "invalid_json", None),
    ("NaN literal", CHAT, b'{"messages":[],"temperature":NaN}', 400, "invalid_json", None),
    ("infinity", CHAT, b'{"messages":[],"temperature":1e999}', 400, "invalid_json", None),
    ("lone surrogate", CHAT, b'{"messages":[{"role":"user","content":"\\ud83d"}]}', 400, "invalid_json", None),
    ("deep nesting", CHAT, b"[" * 100_000, 400, "invalid_json", None),
    ("array body", CHAT, b"[]", 400, "invalid_json", None),
    ("string body", TEXT, b'"x"', 400, "invalid_json", None),
    ("null body", TEXT, b"null", 400, "invalid_json", None),
    ("twice", CHAT, b'{"n":1,"n":2,"messages":[]}', 400, "duplicate_field", "n"),
    ("no messages", CHAT, b'{"model":"toy"}', 400, "missing_required_parameter", "messages"),
    ("null messages", CHAT, chat(messages=None), 400, "missing_required_parameter", "messages"),
    ("empty messages", CHAT, chat(messages=[]), 400, "invalid_value", "messages"),
    ("messages no array", CHAT, chat(messages="Hi"), 400, "invalid_type", "messages"),
    ("message no object", CHAT, chat(messages=["Hi"]), 400, "invalid_type", "messages[0]"),
    ("no role", CHAT, chat(messages=[{"content": "x"}]), 400, "missing_required_parameter", "messages[0].role"),
    ("odd role", CHAT, chat(messages=[{"role": "x", "content": ""}]), 400, "invalid_value", "messages[0].role"),
    ("role no string", CHAT, chat(messages=[{"role": {}, "content": ""}]), 400, "invalid_value", "messages[0].role"),
    ("user null", CHAT, chat(messages=[*HI, {"role": "user", "content": None}]), 400, "missing_required_parameter",
     "messages[1].content"),
    ("content number", CHAT, chat(messages=[{"role": "user", "content": 1}]), 400, "invalid_type",
     "messages[0].content"),
    ("no parts", CHAT, chat(messages=[{"role": "user", "content": []}]), 400, "invalid_value", "messages[0].content"),
    ("image part", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400,
     "unsupported_value", "messages[0].content[0].type"),
    ("text number", CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}]), 400,
     "invalid_type", "messages[0].content[0].text"),
    ("tool calls of user", CHAT,
     chat(messages=[{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]), 400,
     "invalid_value", "messages[0].tool_calls"),
    ("no model", CHAT, chat(model=None), 400, "missing_required_parameter", "model"),
    ("unknown model", CHAT, chat(model="gpt-9"), 404, "model_not_found", "model"),
    ("model number", CHAT, chat(model=7), 400, "invalid_type", "model"),
    ("temperature text", CHAT, chat(temperature="1"), 400, "invalid_type", "temperature"),
    ("temperature true", CHAT, chat(temperature=True), 400, "invalid_type", "temperature"),
    ("temperature high", CHAT, chat(temperature=2.1), 400, "invalid_value", "temperature"),
    ("temperature low", CHAT, chat(temperature=-0.1), 400, "invalid_value", "temperature"),
    ("top_p", CHAT, chat(top_p=1.5), 400, "invalid_value", "top_p"),
    ("top_k", CHAT, chat(top_k=-2), 400, "invalid_value", "top_k"),
    ("top_k fraction", CHAT, chat(top_k=1.5), 400, "invalid_type", "top_k"),
    ("min_p", CHAT, chat(min_p=-1), 400, "invalid_value", "min_p"),
    ("penalty", CHAT, chat(presence_penalty=3), 400, "invalid_value", "presence_penalty"),
    ("penalty low", CHAT, chat(frequency_penalty=-3), 400, "invalid_value", "frequency_penalty"),
    ("repetition", CHAT, chat(repetition_penalty=0), 400, "invalid_value", "repetition_penalty"),
    ("n zero", CHAT, chat(n=0), 400, "invalid_value", "n"),
    ("n many", CHAT, chat(n=1000), 400, "invalid_value", "n"),
    ("best_of", CHAT, chat(best_of=4), 400, "unsupported_value", "best_of"),
    ("seed wide", CHAT, chat(seed=2**63), 400, "invalid_value", "seed"),
    ("seed wider", CHAT, chat(seed=2**70), 400, "invalid_type", "seed"),
    ("max_tokens zero", CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    ("max_tokens text", CHAT, chat(max_tokens="9"), 400, "invalid_type", "max_tokens"),
    ("too long", CHAT, chat(messages=[{"role": "user", "content": "x" * 5000}]), 400, "context_length_exceeded",
     "messages"),
    ("too long stream", CHAT, chat(stream=True, messages=[{"role": "user", "content": "x" * 5000}]), 400,
     "context_length_exceeded", "messages"),
    ("stop count", CHAT, chat(stop=["a"] * 5), 400, "invalid_value", "stop"),
    ("stop empty", CHAT, chat(stop=[""]), 400, "invalid_value", "stop"),
    ("stop number", CHAT, chat(stop=[1]), 400, "invalid_type", "stop"),
    ("stop long", CHAT, chat(stop="x" * 2000), 400, "invalid_value", "stop"),
    ("stop id", CHAT, chat(stop_token_ids=[151_645]), 400, "invalid_value", "stop_token_ids"),
    ("stop ids no array", CHAT, chat(stop_token_ids=5), 400, "invalid_type", "stop_token_ids"),
    ("bias id", CHAT, chat(logit_bias={"191222": -100}), 400, "invalid_value", "logit_bias"),
    ("bias key", CHAT, chat(logit_bias={"foo": 0}), 400, "invalid_value", "logit_bias"),
    ("bias digit", CHAT, chat(logit_bias={"²": 0}), 400, "invalid_value", "logit_bias"),
    ("bias twice", CHAT, chat(logit_bias={"5": 0, "05": 1}), 400, "invalid_value", "logit_bias"),
    ("bias value", CHAT, chat(logit_bias={"5": 101}), 400, "invalid_value", "logit_bias.5"),
    ("bias null", CHAT, chat(logit_bias={"5": None}), 400, "invalid_value", "logit_bias"),
    ("bias array", CHAT, chat(logit_bias=[]), 400, "invalid_type", "logit_bias"),
    ("top_logprobs", CHAT, chat(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs"),
    ("top_logprobs alone", CHAT, chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    ("logprobs number", CHAT, chat(logprobs=5), 400, "invalid_type", "logprobs"),
    ("stream text", CHAT, chat(stream="yes"), 400, "invalid_type", "stream"),
    ("stream_options", CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    ("usage text", CHAT, chat(stream=True, stream_options={"include_usage": "x"}), 400, "invalid_type",
     "stream_options.include_usage"),
    ("tools", CHAT, chat(tools=[{"type": "function"}]), 400, "missing_required_parameter", "tools[0].function"),
    ("tools kind", CHAT, chat(tools=[{"type": "web"}]), 400, "unsupported_value", "tools[0].type"),
    ("tools no array", CHAT, chat(tools={}), 400, "invalid_type", "tools"),
    ("tool name", CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), 400, "invalid_value",
     "tools[0].function.name"),
    ("tools twice", CHAT, chat(tools=[TOOL, TOOL]), 400, "invalid_value", "tools"),
    ("choice alone", CHAT, chat(tool_choice="required"), 400, "invalid_value", "tool_choice"),
    ("choice unknown", CHAT, chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400,
     "invalid_value", "tool_choice"),
    ("choice odd", CHAT, chat(tools=[TOOL], tool_choice="any"), 400, "invalid_value", "tool_choice"),
    ("tools and format", CHAT, chat(tools=[TOOL], response_format={"type": "json_object"}), 400, "invalid_value",
     "tools"),
    ("forced and eos", CHAT, chat(tools=[TOOL], tool_choice="required", ignore_eos=True), 400, "invalid_value",
     "tool_choice"),
    ("format type", CHAT, chat(response_format={"type": "xml"}), 400, "invalid_value", "response_format.type"),
    ("format no type", CHAT, chat(response_format={"a": 1}), 400, "missing_required_parameter",
     "response_format.type"),
    ("format no schema", CHAT, chat(response_format={"type": "json_schema"}), 400, "missing_required_parameter",
     "response_format.json_schema"),
    ("schema no object", CHAT, chat(response_format={"type": "json_schema", "json_schema": {"schema": [1]}}), 400,
     "invalid_type", "response_format.json_schema.schema"),
    ("schema too long", CHAT, chat(guided_json={"const": "x" * 70_000}), 400, "invalid_value", "guided_json"),
    ("two formats", CHAT, chat(regex="a", guided_choice=["a"]), 400, "invalid_value", "guided_choice"),
    ("format and eos", TEXT, text(regex="a", ignore_eos=True), 400, "unsupported_value", "regex"),
    ("format and minimum", TEXT, text(regex="a", min_tokens=3), 400, "unsupported_value", "regex"),
    ("no choices", TEXT, text(guided_choice=[]), 400, "invalid_type", "guided_choice"),
    ("structured odd", TEXT, text(structured_outputs={"xml": "a"}), 400, "unsupported_parameter",
     "structured_outputs.xml"),
    ("structured two", TEXT, text(structured_outputs={"regex": "a", "choice": ["a"]}), 400, "invalid_value",
     "structured_outputs"),
    ("interval", CHAT, chat(stream_interval=0), 400, "invalid_value", "stream_interval"),
    ("no input", RESPONSES, b'{"model":"toy"}', 400, "missing_required_parameter", "input"),
    ("input number", RESPONSES, b'{"model":"toy","input":1}', 400, "invalid_type", "input"),
    ("no items", RESPONSES, b'{"model":"toy","input":[]}', 400, "invalid_value", "input"),
    ("item kind", RESPONSES, b'{"model":"toy","input":[{"type":"item_reference"}]}', 400, "unsupported_value",
     "input[0].type"),
    ("item no object", RESPONSES, b'{"model":"toy","input":["a"]}', 400, "invalid_type", "input[0]"),
    ("item role", RESPONSES, b'{"model":"toy","input":[{"role":"x","content":"a"}]}', 400, "invalid_value",
     "input[0].role"),
    ("image input", RESPONSES, b'{"model":"toy","input":[{"role":"user","content":[{"type":"input_image"}]}]}', 400,
     "unsupported_value", "input[0].content[0].type"),
    ("previous", RESPONSES, b'{"model":"toy","input":"a","previous_response_id":"resp_1"}', 400,
     "previous_response_not_found", "previous_response_id"),
    ("background", RESPONSES, b'{"model":"toy","input":"a","background":true,"store":false}', 400,
     "unsupported_value", "background"),
    ("responses n", RESPONSES, b'{"model":"toy","input":"a","n":2}', 400, "invalid_value", "n"),
    ("responses logprobs", RESPONSES, b'{"model":"toy","input":"a","top_logprobs":21}', 400, "invalid_value",
     "top_logprobs"),
    ("truncation", RESPONSES, b'{"model":"toy","input":"a","truncation":"left"}', 400, "invalid_value", "truncation"),
    ("text format", RESPONSES, b'{"model":"toy","input":"a","text":{"format":{"type":"xml"}}}', 400, "invalid_value",
     "text.format.type"),
    ("output tokens", RESPONSES, b'{"model":"toy","input":"a","max_output_tokens":999999}', 400,
     "context_length_exceeded", "max_output_tokens"),
    ("speculation mode", CHAT, chat(speculation={"mode": "maybe"}), 400, "invalid_value", "speculation.mode"),
    ("speculation K", CHAT, chat(speculation={"num_draft_tokens": 0}), 400, "invalid_value",
     "speculation.num_draft_tokens"),
    ("speculation field", CHAT, chat(speculation={"k": 1}), 400, "unknown_parameter", "speculation.k"),
    ("no prompt", TEXT, b'{"model":"toy"}', 400, "missing_required_parameter", "prompt"),
    ("prompt number", TEXT, text(prompt=5), 400, "invalid_value", "prompt"),
    ("prompt empty", TEXT, text(prompt=""), 400, "invalid_value", "prompt"),
    ("prompt empty array", TEXT, text(prompt=[]), 400, "invalid_value", "prompt"),
    ("prompt empty ids", TEXT, text(prompt=[[]]), 400, "invalid_value", "prompt[0]"),
    ("prompt mixed", TEXT, text(prompt=["a", 1]), 400, "invalid_type", "prompt[1]"),
    ("prompt mixed ids", TEXT, text(prompt=[1, "a"]), 400, "invalid_value", "prompt"),
    ("prompt true", TEXT, text(prompt=[1, True]), 400, "invalid_value", "prompt"),
    ("prompt negative", TEXT, text(prompt=[-1]), 400, "invalid_value", "prompt"),
    ("prompt vocabulary", TEXT, text(prompt=[[5], [258]]), 400, "invalid_value", "prompt[1]"),
    ("prompt count", TEXT, text(prompt=["a"] * 100), 400, "invalid_value", "prompt"),
    ("suffix", TEXT, text(suffix="x"), 400, "unsupported_parameter", "suffix"),
    ("logprobs true", TEXT, text(logprobs=True), 400, "invalid_type", "logprobs"),
    ("logprobs many", TEXT, text(logprobs=21), 400, "invalid_value", "logprobs"),
    ("no tokens", TEXT, text(max_tokens=0), 400, "invalid_value", "max_tokens"),
    ("echo text", TEXT, text(echo="yes"), 400, "invalid_type", "echo"),
    ("tokens text", "/detokenize", b'{"tokens":["a"]}', 400, "invalid_value", "tokens"),
    ("tokens missing", "/detokenize", b"{}", 400, "missing_required_parameter", "tokens"),
    ("nothing to tokenize", "/tokenize", b"{}", 400, "invalid_value", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "raw", "status", "code", "param"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
async def test_a_bad_body_is_refused_by_name(
    start_edge: StartEdge, url: str, raw: bytes, status: int, code: str, param: str | None
) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    response = await client.post(url, data=raw, headers=JSON)
    error = (await response.json())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status, error["code"], error["param"]) == (status, code, param)
    assert len(error["message"]) < 700
    assert (engine.num_admitted, engine.requests) == (0, [])
    assert (await client.post(CHAT, data=chat(), headers=JSON)).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"}]},
        {"messages": [*HI, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *HI]},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
        {"best_of": 1, "top_k": -1, "top_p": 0, "seed": -(2**63), "max_tokens": 16.0, "stop": None, "n": None},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low",
         "parallel_tool_calls": True, "prompt_cache_key": "k", "verbosity": "low", "made_up": 1},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"logit_bias": {"65": -100, "66": 5.5}, "stop": ["a", "a"], "model": "toy"},
    ],
    ids=["B-22 null", "B-22 empty", "parts", "neutral", "edges", "ignored", "obfuscation", "bias"],
)  # fmt: skip
async def test_what_clients_really_send_is_accepted(start_edge: StartEdge, fields: dict[str, Any]) -> None:
    client = await start_edge(FakeEngine())
    response = await client.post(CHAT, data=chat(**fields), headers=JSON)
    assert response.status == 200, await response.text()


async def test_strict_mode_refuses_unknown_fields(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(), is_strict=True)
    response = await client.post(CHAT, json={"model": "toy", "messages": HI, "temprature": 1})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "temprature")


async def test_any_model_name_if_allowed(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(), allow_any_model=True)
    for fields in ({"model": "gpt-9"}, {}):
        answer = await (await client.post(CHAT, json={"messages": HI, **fields})).json()
        assert answer["model"] == "toy/model"


async def test_an_unknown_speculation_header_is_refused(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    response = await client.post(CHAT, data=chat(), headers={**JSON, "x-speculation": "maybe"})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "x-speculation")


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_large_body_gets_a_json_413(start_edge: StartEdge, is_announced: bool) -> None:
    client = await start_edge(FakeEngine(), max_body_bytes=64 * 1024)
    raw = chat(messages=[{"role": "user", "content": "x" * 2_000_000}])

    async def pieces() -> Any:
        for start in range(0, len(raw), 50_000):
            yield raw[start : start + 50_000]

    try:
        response = await client.post(CHAT, data=io.BytesIO(raw) if is_announced else pieces(), headers=JSON)
    except ConnectionError:
        assert not is_announced  # the server may close before a client without Expect has sent all
    else:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    assert (await client.get("/health")).status == 200


async def test_a_body_above_aiohttps_own_default_is_fine(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    raw = json.dumps({"model": "toy", "messages": HI, "metadata": {"a": "x" * 1_500_000}}).encode()
    assert (await client.post(CHAT, data=io.BytesIO(raw), headers=JSON)).status == 200


async def test_compressed_bodies(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(), max_body_bytes=64 * 1024)
    headers = {**JSON, "Content-Encoding": "gzip"}
    assert (await client.post(CHAT, data=gzip.compress(chat()), headers=headers)).status == 200
    bomb = gzip.compress(chat(metadata={"a": "x" * 1_000_000}))
    assert (await client.post(CHAT, data=bomb, headers=headers)).status == 413
    assert (await client.post(CHAT, data=b"no gzip", headers=headers)).status == 400


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin1"]
)
async def test_other_content_types_get_415(start_edge: StartEdge, kind: str) -> None:
    client = await start_edge(FakeEngine())
    response = await client.post(CHAT, data=chat(), headers={"Content-Type": kind})
    assert (response.status, (await response.json())["error"]["code"]) == (415, "unsupported_media_type")


async def test_a_body_that_never_comes_times_out(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine(), body_timeout_s=0.05)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    assert b" 408 " in head
    writer.close()


async def test_unknown_urls_and_methods_are_json_too(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    response = await client.get("/v1/embeddings")
    assert (response.status, (await response.json())["error"]["code"]) == (404, "unknown_url")
    response = await client.get(CHAT)
    assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["Allow"] == "POST"


async def test_a_bug_is_a_500_that_tells_nothing(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    engine.stats = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    response = await client.get("/stats")
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (500, "internal_error")
    assert "division" not in error["message"]


async def test_error_text_is_bounded(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    for fields in ({"model": "m" * 500}, {"logit_bias": {"k" * 100_000: 1}}, {"speculation": {"f" * 100_000: 1}}):
        response = await client.post(CHAT, json={"model": "toy", "messages": HI, **fields})
        assert response.status in (400, 404)
        assert len(await response.read()) < 1500
