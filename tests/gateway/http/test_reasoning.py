"""reasoning_content in chats, the reasoning item in responses; with tools, stops, limits and blocks of any size."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ports import ChatMessage
from tests.gateway.conftest import StartEdge
from tests.gateway.fakes import BOS, EOS, ByteCodec, Script
from tests.gateway.http.test_responses import stream as response_events
from tests.gateway.http.wide_engine import WideEngine
from tests.gateway.sse_reader import chunks, text_of

URL = "/v1/chat/completions"
BODY = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}
THOUGHT = "<think>\nA greeting. I say < hello.\n</think>\n\n"
TEXT = THOUGHT + "Hello!"
NUM_THOUGHT = len(THOUGHT.rstrip())
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
THINKING = {"reasoning_markers": ("<think>", "</think>")}


def thoughts_of(found: list[dict[str, Any]], key: str = "reasoning_content") -> str:
    return "".join(choice["delta"].get(key, "") for chunk in found for choice in chunk["choices"])


async def whole(client: Any, **fields: Any) -> dict[str, Any]:
    response = await client.post(URL, json={**BODY, **fields})
    assert response.status == 200, await response.text()
    return await response.json()


@pytest.mark.parametrize("block_lens", [(1,), (7, 3), (500,)])
async def test_streamed_thoughts(start_edge: StartEdge, block_lens: tuple[int, ...]) -> None:
    # C-22: reasoning_content only where there is some, never null; C-4: the role only once
    client = await start_edge(WideEngine([Script(text=TEXT, block_lens=block_lens)]), **THINKING)
    fields = {**BODY, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    found = chunks(await (await client.post(URL, json=fields)).read())
    assert thoughts_of(found) == "A greeting. I say < hello."
    assert text_of(found) == "Hello!"
    deltas = [chunk["choices"][0]["delta"] for chunk in found[1:-2]]
    assert all(delta.get("reasoning_content", "x") and delta.get("content", "x") for delta in deltas)
    assert not any("role" in delta or "reasoning" in delta for delta in deltas)
    usage = found[-1]["usage"]
    assert usage["completion_tokens"] == len(TEXT)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    counted = [chunk["usage"] for chunk in found if chunk["usage"] is not None]
    assert all(u["completion_tokens_details"]["reasoning_tokens"] <= u["completion_tokens"] for u in counted)


async def test_whole_answer(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT)]), **THINKING)
    answer = await whole(client, logprobs=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("A greeting. I say < hello.", "Hello!")
    assert "reasoning" not in message
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"]


async def test_without_the_setting_text_is_text(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT)]))
    answer = await whole(client)
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert "completion_tokens_details" not in answer["usage"]


async def test_the_alias(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT, block_lens=(9,))]), reasoning_alias=True, **THINKING)
    message = (await whole(client))["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"]
    found = chunks(await (await client.post(URL, json={**BODY, "stream": True})).read())
    assert thoughts_of(found, "reasoning") == thoughts_of(found)


@pytest.mark.parametrize(
    ("opens", "tail", "is_thought"),
    [
        ("auto", "<think>\n", True),
        ("auto", "<think>\n\n</think>\n\n", False),
        ("auto", "", False),
        ("always", "", True),
        ("never", "<think>\n", False),
    ],
)
async def test_a_block_that_the_template_has_opened(
    start_edge: StartEdge, opens: str, tail: str, is_thought: bool
) -> None:
    class Codec(ByteCodec):
        def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
            return super().render_chat(messages, add_generation_prompt=add_generation_prompt) + self.encode(tail)

    client = await start_edge(
        WideEngine([Script(text="Hm.</think>Hi")]), codec=Codec(), reasoning_opens=opens, **THINKING
    )
    answer = await whole(client)
    message = answer["choices"][0]["message"]
    if is_thought:
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi")
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 11}
    else:
        assert message["content"] == "Hm.</think>Hi"
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("block_lens", [(1,), (500,)])
async def test_tools_after_thoughts(start_edge: StartEdge, block_lens: tuple[int, ...]) -> None:
    text = "<think>I could write <tool_call>.</think>\n" + CALL
    client = await start_edge(WideEngine([Script(text=text, block_lens=block_lens)]), **THINKING)
    choice = (await whole(client, tools=TOOLS))["choices"][0]
    assert choice["message"]["reasoning_content"] == "I could write <tool_call>."
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"
    found = chunks(await (await client.post(URL, json={**BODY, "tools": TOOLS, "stream": True})).read())
    assert thoughts_of(found) == "I could write <tool_call>."
    assert [c["choices"][0]["finish_reason"] for c in found][-1] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "reasoning", "content", "finish", "num_tokens"),
    [
        ({"stop": "greeting"}, "A", "", "stop", len("<think>\nA greeting")),
        ({"stop": "llo!"}, "A greeting. I say < hello.", "He", "stop", NUM_THOUGHT),
        ({"max_tokens": 12}, "A gr", "", "length", 12),
        ({"max_tokens": 3}, None, "<th", "length", 0),
    ],
)
async def test_a_cut_counts_no_more_thoughts_than_tokens(
    start_edge: StartEdge, fields: dict[str, Any], reasoning: str | None, content: str, finish: str, num_tokens: int
) -> None:
    # B-16
    client = await start_edge(WideEngine([Script(text=TEXT, block_lens=(5,))]), **THINKING)
    answer = await whole(client, **fields)
    choice = answer["choices"][0]
    assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == (reasoning, content)
    assert choice["finish_reason"] == finish
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens
    assert num_tokens <= answer["usage"]["completion_tokens"]


async def test_what_the_client_may_ask_for(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT)]), **THINKING)
    answer = await whole(client, separate_reasoning=False)
    assert answer["choices"][0]["message"]["content"] == TEXT
    answer = await whole(client, include_reasoning=False)
    assert "reasoning_content" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["message"]["content"] == "Hello!"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    # A grammar holds from the first token on, so there is nothing to think.
    answer = await whole(client, regex=".*")
    assert answer["choices"][0]["message"]["content"] == TEXT


async def test_markers_that_are_special_tokens(start_edge: StartEdge) -> None:
    class Codec(ByteCodec):
        """The markers are BOS and EOS' texts."""

        def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
            return {"<s>": [BOS], "</s>": [EOS]}.get(text) or super().encode(text)

    engine = WideEngine([Script(text="Hi")])
    client = await start_edge(engine, codec=Codec(), reasoning_markers=("<s>", "</s>"))
    await whole(client)
    assert engine.requests[0].shown_ids == {BOS, EOS}


async def test_thoughts_of_earlier_turns_reach_the_template(start_edge: StartEdge) -> None:
    seen: list[ChatMessage] = []

    class Codec(ByteCodec):
        def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> list[int]:
            seen.extend(messages)
            return super().render_chat(messages)

    client = await start_edge(WideEngine(), codec=Codec(), **THINKING)
    for name in ("reasoning_content", "reasoning"):
        turn = {"role": "assistant", "content": "4", name: "2+2"}
        await whole(client, messages=[*BODY["messages"], turn, *BODY["messages"]])
        assert seen[1].reasoning == "2+2"
        seen.clear()
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "2+2"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "lost"}]},
        {"role": "user", "content": "y"},
    ]
    assert (await client.post("/v1/responses", json={"model": "toy", "input": items})).status == 200
    assert [(message.role, message.reasoning) for message in seen] == [
        ("user", None), ("assistant", "2+2"), ("tool", None), ("user", None)
    ]  # fmt: skip


@pytest.mark.parametrize("block_lens", [(1,), (7, 3), (500,)])
async def test_responses_have_a_reasoning_item(start_edge: StartEdge, block_lens: tuple[int, ...]) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT, block_lens=block_lens)]), **THINKING)
    events = await response_events(client)
    thoughts = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "A greeting. I say < hello."
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "A greeting. I say < hello."}]
    assert final["output"][1]["content"][0]["text"] == "Hello!"
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_THOUGHT}
    kinds = [event["type"].removeprefix("response.") for event in events if "delta" not in event]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip


async def test_a_response_cut_in_its_thoughts(start_edge: StartEdge) -> None:
    client = await start_edge(WideEngine([Script(text=TEXT)]), **THINKING)
    final = (await response_events(client, max_output_tokens=12))[-1]["response"]
    assert (final["status"], [item["status"] for item in final["output"]]) == ("incomplete", ["incomplete"])
    assert final["output"][0]["content"][0]["text"] == "A gr"
