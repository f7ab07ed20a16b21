from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import Draining, NotReady, QueueFull, TargetFailed, TargetTimeout, TargetUnavailable
from gateway.ports import LoadPhase
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import CONTEXT_LEN, EOS, FakeEngine, Script
from tests.gateway.sse_reader import chunks, events, text_of

URL = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT_TOKENS = len("user:Hi\nassistant:") + 1


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy/model", "messages": MESSAGES, **fields}


async def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=body(stream=True, **fields))
    assert response.status == 200, await response.text()
    return chunks(await response.read())


async def test_whole_answer(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    response = await client.post(URL, json=body())
    answer = await response.json()
    assert response.status == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "toy/model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world", "refusal": None, "annotations": []},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": EOS,
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 11,
            "total_tokens": PROMPT_TOKENS + 11,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_golden_stream(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(text="Hi 🙂", block_lens=(2, 3))]))
    response = await client.post(URL, json=body(stream=True, stream_options={"include_usage": True}))
    raw = await response.read()
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert "Content-Length" not in response.headers
    response_id, created = chunks(raw)[0]["id"], chunks(raw)[0]["created"]
    same = f'"id":"{response_id}","object":"chat.completion.chunk","created":{created},"model":"toy/model"'

    def chunk(delta: str, finish: str = "null", extra: str = "") -> str:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}{extra}}}'
        return f'data: {{{same},"choices":[{choice}],"usage":null}}\n\n'

    assert raw.decode() == (
        chunk('{"role":"assistant","content":""}')
        + chunk('{"content":"Hi"}')
        + chunk('{"content":" "}')
        + chunk('{"content":"🙂"}')
        + chunk("{}", '"stop"', f',"stop_reason":{EOS}')
        + f'data: {{{same},"choices":[],"usage":{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":7,'
        f'"total_tokens":{PROMPT_TOKENS + 7},"prompt_tokens_details":{{"cached_tokens":2}}}}}}\n\n' + "data: [DONE]\n\n"
    )


async def test_an_empty_reply_still_has_role_and_finish(start_edge: StartEdge) -> None:
    # B-7
    client = await start_edge(FakeEngine([Script(text="")]))
    found = await stream(client)
    assert [chunk["choices"][0]["delta"] for chunk in found] == [{"role": "assistant", "content": ""}, {}]
    assert "usage" not in found[0]


async def test_role_chunks_come_first_in_index_order(start_edge: StartEdge) -> None:
    # C-3, C-4, C-6 and the measured n = 3 case
    client = await start_edge(FakeEngine([Script(text="ab"), Script(text="c"), Script(text="def")]))
    found = await stream(client, n=3)
    choices = [chunk["choices"][0] for chunk in found]
    assert [choice["index"] for choice in choices[:3]] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in choices[:3])
    assert not any("role" in choice["delta"] for choice in choices[3:])
    assert [text_of(found, index) for index in range(3)] == ["ab", "c", "def"]
    finishes = [choice for choice in choices if choice["finish_reason"] is not None]
    assert sorted(choice["index"] for choice in finishes) == [0, 1, 2]
    assert all(choice["delta"] == {} for choice in finishes)


async def test_choices_interleave(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(text="abc", hold_after=1), Script(text="xyz")])
    client = await start_edge(engine)
    response = await client.post(URL, json=body(stream=True, n=2))
    await engine.held.wait()
    seen = b""
    while b'"finish_reason":"stop"' not in seen:
        seen += await response.content.readany()
    assert text_of([event for event in events(seen) if event != "[DONE]"], 1) == "xyz"
    engine.hold.set()
    assert text_of(chunks(seen + await response.read()), 0) == "abc"


async def test_every_choice_has_its_own_seed_and_id(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    await client.post(URL, json=body(n=3, seed=-1))
    assert [request.sampling.seed for request in engine.requests] == [2**63 - 1, 0, 1]
    assert len({request.request_id for request in engine.requests}) == 3


async def test_usage_of_several_choices_counts_the_prompt_once(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(text="ab"), Script(text="cdef")]))
    answer = await (await client.post(URL, json=body(n=2))).json()
    assert answer["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_the_usage_chunk_is_last_and_all_others_say_null(start_edge: StartEdge) -> None:
    # B-6, C-8
    client = await start_edge(FakeEngine())
    found = await stream(client, stream_options={"include_usage": True})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 11
    assert all(chunk["usage"] is None for chunk in found[:-1])


async def test_continuous_usage(start_edge: StartEdge) -> None:
    # C-9: only together with include_usage
    client = await start_edge(FakeEngine([Script(text="abcd", block_lens=(2,))]))
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await stream(client, stream_options=options)
    counted = [chunk["usage"]["completion_tokens"] for chunk in found if chunk["usage"] is not None]
    assert counted == [2, 4, 4, 4]
    found = await stream(client, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in found)


async def test_spec_stats_only_on_request(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    assert "metrics" not in await (await client.post(URL, json=body())).json()
    answer = await (await client.post(URL, json=body(return_spec_stats=True))).json()
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["mean_acceptance_length"] == 2.5
    assert spec["draft_acceptance_rate"] == 0.5
    assert spec["num_spec_steps"] == 4
    assert spec["verify_ms"] == pytest.approx(20.0)
    found = await stream(client, return_spec_stats=True, stream_options={"include_usage": True})
    assert found[-1]["metrics"]["speculative_decoding"] == spec


@pytest.mark.parametrize("block_lens", [(1,), (3,), (7,), (100,)])
@pytest.mark.parametrize(
    ("text", "fields", "expected", "reason", "num_tokens"),
    [
        ("one two three", {"stop": " two"}, "one", "stop", 7),
        ("one two three", {"stop": [" four", "e t"]}, "on", "stop", 5),
        ("UNO DUE TRE", {"stop": ["TRE\nAAAAAAAA"]}, "UNO DUE TRE", "stop", 11),
        ("x<|im_end|>y", {"stop": "<|im_end|>"}, "x", "stop", 11),
        ("one two", {"stop": " t", "include_stop_str_in_output": True}, "one t", "stop", 5),
        ("one two", {"stop": " t", "no_stop_trim": True}, "one t", "stop", 5),
        ("one two three", {"max_tokens": 5}, "one t", "length", 5),
        ("one two three", {"max_tokens": 7, "stop": " two"}, "one", "stop", 7),
        ("one two three", {"max_tokens": 6, "stop": " two"}, "one tw", "length", 6),
        ("one.two", {"stop_token_ids": [ord(".")]}, "one", "stop", 3),
        ("ab🙂", {"max_tokens": 4}, "ab\ufffd", "length", 4),
    ],
)
async def test_everything_is_cut_at_the_same_token(
    start_edge: StartEdge,
    text: str,
    fields: dict[str, Any],
    expected: str,
    reason: str,
    num_tokens: int,
    block_lens: tuple[int, ...],
) -> None:
    # C-15, C-16, B-2, B-3, B-13, B-14, B-15, B-16: whatever the blocks, streamed or not
    client = await start_edge(FakeEngine([Script(text=text, block_lens=block_lens)]))
    fields = {**fields, "logprobs": True}
    answer = await (await client.post(URL, json=body(**fields))).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, reason)
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"]) == num_tokens
    found = await stream(client, stream_options={"include_usage": True}, **fields)
    entries = [
        entry
        for chunk in found[:-1]
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert text_of(found) == expected
    assert entries == choice["logprobs"]["content"]
    assert found[-1]["usage"] == answer["usage"]
    assert found[-2]["choices"][0]["finish_reason"] == reason


async def test_logprobs_hold_bytes_by_id_and_only_finite_numbers(start_edge: StartEdge) -> None:
    # C-18, B-8
    script = Script(text="é", top=((0xC3, float("-inf")), (0x41, float("nan"))), logprob=float("-inf"))
    client = await start_edge(FakeEngine([script]))
    answer = await (await client.post(URL, json=body(logprobs=True, top_logprobs=2))).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    assert [entry["bytes"] for entry in logprobs["content"]] == [[0xC3], [0xA9]]
    assert bytes(value for entry in logprobs["content"] for value in entry["bytes"]).decode() == "é"
    first = logprobs["content"][0]
    assert first["logprob"] == -9999.0
    assert [top["logprob"] for top in first["top_logprobs"]] == [-9999.0, -9999.0]
    assert first["top_logprobs"][1] == {"token": "A", "logprob": -9999.0, "bytes": [0x41]}


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (QueueFull("full", retry_after_s=1.5), 429, "rate_limit_error", "queue_full"),
        (NotReady("loading", retry_after_s=0.2), 503, "overloaded_error", "not_ready"),
        (Draining("going", retry_after_s=3), 503, "overloaded_error", "draining"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_overload_is_a_status_with_retry_after(
    start_edge: StartEdge, error: Any, status: int, kind: str, code: str, is_stream: bool
) -> None:
    client = await start_edge(FakeEngine(admit_error=error))
    response = await client.post(URL, json=body(stream=is_stream))
    assert response.status == status
    assert (await response.json())["error"] == {"message": error.message, "type": kind, "param": None, "code": code}
    assert int(response.headers["Retry-After"]) >= 1
    assert int(response.headers["retry-after-ms"]) == error.retry_after_s * 1000


@pytest.mark.parametrize("fields", [{}, {"prompt": [1]}, {"logit_bias": {"5": 1}}, {"stop_token_ids": [5]}])
@pytest.mark.parametrize("url", [URL, "/v1/completions", "/tokenize", "/detokenize"])
async def test_while_loading_good_requests_are_told_to_come_back(
    start_edge: StartEdge, url: str, fields: dict[str, Any]
) -> None:
    loading = LoadPhase(is_ready=False, is_draining=False, phase="loading target", progress=0.4)
    client = await start_edge(FakeEngine(phase=loading, is_size_known=False))
    response = await client.post(url, json={**body(), "prompt": "Hi", "tokens": [1], **fields})
    assert response.status == 503
    error = (await response.json())["error"]
    assert (error["code"], "loading target" in error["message"]) == ("not_ready", True)
    assert response.headers["Retry-After"] == "2"


@pytest.mark.parametrize(
    ("error", "status"),
    [(TargetFailed("bad"), 502), (TargetUnavailable("gone"), 503), (TargetTimeout("slow"), 504), (RuntimeError(), 500)],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_before_the_first_token_is_a_status(
    start_edge: StartEdge, error: Exception, status: int, is_stream: bool
) -> None:
    # B-10, C-12
    engine = FakeEngine([Script(error=error)])
    client = await start_edge(engine)
    response = await client.post(URL, json=body(stream=is_stream))
    assert response.status == status
    assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
    assert (engine.num_admitted, engine.num_running) == (0, 0)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_an_error_after_the_first_token_is_one_nested_event_then_done(
    start_edge: StartEdge, num_choices: int
) -> None:
    engine = FakeEngine([Script(text="abcdef", error=TargetFailed("lost"), error_after=3)])
    client = await start_edge(engine)
    response = await client.post(URL, json=body(stream=True, n=num_choices))
    assert response.status == 200
    found = chunks(await response.read())
    errors = [chunk for chunk in found if "error" in chunk]
    assert errors == [found[-1]]
    assert found[-1]["error"] == {"message": "lost", "type": "server_error", "param": None, "code": "upstream_error"}
    assert (engine.num_admitted, engine.num_running) == (0, 0)


async def test_a_bug_after_the_first_token_tells_no_details(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(error=RuntimeError("secret"), error_after=2)]))
    raw = await (await client.post(URL, json=body(stream=True))).read()
    assert b"secret" not in raw
    assert chunks(raw)[-1]["error"]["code"] == "internal_error"


async def test_speculation_is_asked_for_in_body_or_header(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    await client.post(URL, json=body(), headers={"x-speculation": "off"})
    await client.post(
        URL, json=body(speculation={"mode": "on", "num_draft_tokens": 5}), headers={"x-speculation": "off"}
    )
    await client.post(URL, json=body())
    assert [(r.speculation.mode, r.speculation.num_draft_tokens) for r in engine.requests] == [
        ("off", None),
        ("on", 5),
        ("auto", None),
    ]


@pytest.mark.parametrize("path", ["chat", "text"])
async def test_the_prompt_that_just_fits(start_edge: StartEdge, path: str) -> None:
    # B-21: context, context - 1, context + 1 tokens
    engine = FakeEngine()
    client = await start_edge(engine)
    overhead = len("user:\nassistant:") + 1
    for extra, status in ((0, 400), (-1, 200), (1, 400)):
        if path == "chat":
            content = "x" * (CONTEXT_LEN - overhead + extra)
            response = await client.post(URL, json=body(messages=[{"role": "user", "content": content}]))
        else:
            response = await client.post(
                "/v1/completions", json={"model": "toy", "prompt": [65] * (CONTEXT_LEN + extra)}
            )
        assert response.status == status
        if status == 400:
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
    assert [request.max_new_tokens for request in engine.requests] == [1]


async def test_max_tokens_beyond_the_context_is_refused(start_edge: StartEdge) -> None:
    # B-9
    client = await start_edge(FakeEngine())
    response = await client.post(URL, json=body(max_completion_tokens=999_999, stream=True))
    error = (await response.json())["error"]
    assert response.status == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")


async def test_the_default_budget_is_what_the_context_leaves(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    await client.post(URL, json=body())
    await client.post(URL, json=body(max_tokens=9, max_completion_tokens=5))
    assert [request.max_new_tokens for request in engine.requests] == [CONTEXT_LEN - PROMPT_TOKENS, 5]


async def test_the_clients_own_timeout_is_the_deadline_of_a_whole_answer(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    for is_stream, header in ((False, "30"), (True, "30"), (False, "nan"), (False, "x")):
        await client.post(URL, json=body(stream=is_stream), headers={"x-stainless-read-timeout": header})
    assert [request.deadline_s for request in engine.requests] == [30.0, None, None, None]


async def test_a_refusing_chat_template_is_a_400(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    response = await client.post(URL, json=body(messages=[{"role": "function", "content": "x", "name": "f"}]))
    assert response.status == 400
    assert engine.num_admitted == 0
