"""Our readers, and the fake engine, against what a real SGLang answered (SmolLM2-135M on the CPU)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.verifier.sglang.fake_engine import FakeEngine
from verifier.sglang.answers import Answer, read_answers, read_chunk
from verifier.sglang.errors import refusal
from verifier.sglang.indexing import Ask, batch_payload, position_lists, prompt_lists

RECORDING = json.loads((Path(__file__).parent / "recordings" / "sglang-0.5.23-cpu.json").read_text())
EXCHANGES = {exchange["name"]: exchange for exchange in RECORDING["exchanges"]}


def read(name: str) -> tuple[dict[str, Any], Answer]:
    exchange = EXCHANGES[name]
    (answer,) = read_answers(orjson.dumps(exchange["response"]))
    return exchange["request"], answer


def ask_of(request: dict[str, Any], num_drafts: int) -> Ask:
    ids = request["input_ids"][0]
    return Ask(
        rid=request["rid"][0],
        input_ids=ids,
        base_len=len(ids) - num_drafts,
        start_len=request["logprob_start_len"][0],
        num_top=3,
        wants_hidden=False,
    )


def test_our_request_is_the_recorded_one() -> None:
    request, _ = read("verify")
    assert batch_payload([ask_of(request, 2)]) == request


def test_verify_reply_is_read_position_by_position() -> None:
    request, answer = read("verify")
    ask = ask_of(request, 2)
    lists = position_lists(ask, answer)
    assert [entries[0][0] for entries in lists] == [744, 198, 198]
    assert answer.output_ids == [lists[2][0][0]]
    assert answer.meta_info.cached_tokens == ask.base_len - 1


def test_refetching_features_computes_from_there_on() -> None:
    request, answer = read("refetch")
    ask = ask_of(request, 2)
    assert answer.meta_info.cached_tokens == ask.start_len == 4
    assert [entries[0][0] for entries in position_lists(ask, answer)] == [744, 198, 198]


def test_prompt_scores() -> None:
    request, answer = read("prompt")
    scored = prompt_lists(ask_of(request, 0), answer)
    assert [own[0] for own, _ in scored] == request["input_ids"][0][1:]
    assert scored[0][0][1] == pytest.approx(-13.943584)


def test_refusals_are_classified() -> None:
    over_long = EXCHANGES["over-long"]
    assert refusal(over_long["status"], orjson.dumps(over_long["response"])).code == "context_limit"
    bad_type = EXCHANGES["bad type"]
    assert refusal(bad_type["status"], orjson.dumps(bad_type["response"])).code == "target_error"
    assert refusal(503, b'{"detail":"The request queue is full."}').code == "unavailable"
    assert refusal(502, b"<html>bad gateway</html>").code == "target_error"
    assert refusal(422, b'{"detail":[{"msg":"field required"}]}').message == "field required"


def test_stream_chunks_are_read() -> None:
    events = [line[6:] for line in EXCHANGES["stream"]["response"].split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [read_chunk(event.encode()) for event in events]
    ids = [chunk.output_ids for chunk in chunks if isinstance(chunk, Answer)]
    assert ids == [ids[-1][:n] for n in range(1, 5)]  # cumulative by default


def keys(value: Any) -> set[str]:
    return set(value) if isinstance(value, dict) else set()


async def test_fake_answers_as_the_real_one_does(tmp_path: Path) -> None:
    engine = FakeEngine()
    await engine.start(tmp_path)
    try:
        async with aiohttp.ClientSession() as session:
            for name in ("prompt", "verify", "refetch"):
                exchange = EXCHANGES[name]
                request = {**exchange["request"], "input_ids": [[i % 48 for i in exchange["request"]["input_ids"][0]]]}
                async with session.post(engine.url + "/generate", json=request) as response:
                    (ours,) = await response.json()
                (real,) = exchange["response"]
                assert keys(ours) <= keys(real)
                assert keys(ours["meta_info"]) <= keys(real["meta_info"])
                for key in ("cached_tokens", "prompt_tokens", "completion_tokens"):
                    assert ours["meta_info"][key] == real["meta_info"][key], (name, key)
                for key in ("input_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
                    assert [e is None for e in ours["meta_info"][key]] == [e is None for e in real["meta_info"][key]]
            too_long = {**EXCHANGES["over-long"]["request"], "input_ids": [[5] * 128]}
            async with session.post(engine.url + "/generate", json=too_long) as response:
                assert response.status == EXCHANGES["over-long"]["status"]
                assert keys(await response.json()) == keys(EXCHANGES["over-long"]["response"])
    finally:
        await engine.stop()
