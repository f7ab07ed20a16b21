from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import BOS, CONTEXT_LEN, EOS, FakeEngine, Script
from tests.gateway.sse_reader import chunks, text_of

URL = "/v1/completions"


async def post(client: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"model": "toy", **fields})
    assert response.status == 200, await response.text()
    return await response.json()


async def stream(client: Any, **fields: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"model": "toy", "stream": True, **fields})
    assert response.status == 200, await response.text()
    return chunks(await response.read())


async def test_whole_answer(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    answer = await post(client, prompt="Hi")
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": EOS}
    ]
    assert answer["usage"]["prompt_tokens"] == 3


async def test_golden_stream(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine([Script(text="Hi", block_lens=(2,))]))
    raw = await (await client.post(URL, json={"model": "toy/model", "prompt": "x", "stream": True})).read()
    first = chunks(raw)[0]
    same = f'"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"toy/model"'
    assert raw.decode() == (
        f'data: {{{same},"choices":[{{"index":0,"text":"Hi","logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {{{same},"choices":[{{"index":0,"text":"","logprobs":null,"finish_reason":"stop",'
        f'"stop_reason":{EOS}}}]}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_every_event_has_a_choice_unless_usage_is_asked_for(start_edge: StartEdge) -> None:
    client = await start_edge(FakeEngine())
    assert all(chunk["choices"] for chunk in await stream(client, prompt="x"))
    found = await stream(client, prompt="x", stream_options={"include_usage": True})
    assert found[-1]["choices"] == []


@pytest.mark.parametrize(
    ("prompt", "prompt_ids"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
async def test_prompt_forms(start_edge: StartEdge, prompt: Any, prompt_ids: list[tuple[int, ...]]) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    answer = await post(client, prompt=prompt, n=2)
    assert [request.prompt_ids for request in engine.requests] == [ids for ids in prompt_ids for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompt_ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompt_ids))


async def test_special_tokens_can_be_left_out(start_edge: StartEdge) -> None:
    engine = FakeEngine()
    client = await start_edge(engine)
    await post(client, prompt="a", add_special_tokens=False)
    assert engine.requests[0].prompt_ids == (97,)


async def test_default_budget_is_sixteen_or_what_is_left(start_edge: StartEdge) -> None:
    # C-17
    engine = FakeEngine()
    client = await start_edge(engine)
    await post(client, prompt="a")
    await post(client, prompt=[65] * (CONTEXT_LEN - 3))
    assert [request.max_new_tokens for request in engine.requests] == [16, 3]


async def test_logprobs_zero_means_the_token_itself(start_edge: StartEdge) -> None:
    # C-20
    engine = FakeEngine([Script(text="ab")])
    client = await start_edge(engine)
    logprobs = (await post(client, prompt="x", logprobs=0))["choices"][0]["logprobs"]
    assert engine.requests[0].num_logprobs == 0
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert (await post(client, prompt="x"))["choices"][0]["logprobs"] is None


async def test_text_offset_counts_characters(start_edge: StartEdge) -> None:
    # C-19: both bytes of é start at the same character
    client = await start_edge(FakeEngine([Script(text="aéb")]))
    logprobs = (await post(client, prompt="x", logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt(start_edge: StartEdge, is_stream: bool) -> None:
    # B-18, and lm-eval's contract: prompt + 1 aligned entries, the first null
    engine = FakeEngine([Script(text="yz", top=((65, -1.0),))])
    client = await start_edge(engine)
    fields = {"prompt": [65, 66], "echo": True, "logprobs": 1, "max_tokens": 1}
    if is_stream:
        found = await stream(client, **fields)
        parts = [chunk["choices"][0]["logprobs"] for chunk in found if chunk["choices"][0]["logprobs"]]
        logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
        text = text_of(found)
    else:
        choice = (await post(client, **fields))["choices"][0]
        logprobs, text = choice["logprobs"], choice["text"]
    assert engine.requests[0].score_prompt
    assert text == "ABy"
    assert logprobs["tokens"] == ["A", "B", "y"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"A": -1.0, "B": -0.5}
    assert logprobs["text_offset"] == [0, 1, 2]


async def test_echo_of_a_text_prompt_is_the_text(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(text="!")])
    client = await start_edge(engine)
    answer = await post(client, prompt=["Hé", "X"], echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["Hé!", "Hé!", "X!", "X!"]
    assert not engine.requests[0].score_prompt
    found = await stream(client, prompt=["Hé", "X"], echo=True)
    assert [text_of(found, index) for index in range(2)] == ["Hé!", "X!"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_echo_without_new_tokens(start_edge: StartEdge, is_stream: bool) -> None:
    # B-20
    client = await start_edge(FakeEngine())
    fields = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": 1}
    if is_stream:
        found = await stream(client, **fields)
        assert text_of(found) == "ab"
        assert found[-1]["choices"][0]["finish_reason"] == "length"
    else:
        answer = await post(client, **fields)
        assert answer["choices"][0]["text"] == "ab"
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
        assert answer["usage"]["completion_tokens"] == 0


async def test_admission_counts_all_choices_of_all_prompts(start_edge: StartEdge) -> None:
    engine = FakeEngine([Script(hold_after=0)])
    client = await start_edge(engine)
    response = await client.post(
        URL, json={"model": "toy", "prompt": ["a", "b"], "n": 3, "stream": False, "max_tokens": 999}
    )
    assert response.status == 400
    assert engine.num_admitted == 0
