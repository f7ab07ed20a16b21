"""The official client, unmodified, over a real loopback port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.config import GatewayConfig
from gateway.errors import QueueFull, TargetFailed
from gateway.http import create_app, start_server
from gateway.http.edge import EDGE
from tests.gateway.conftest import until
from tests.gateway.fakes import ByteCodec, FakeEngine, Script

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine([Script(text="Hello 🙂 world", block_lens=(1, 4, 2))])


@pytest.fixture
async def base_url(engine: FakeEngine) -> AsyncIterator[str]:
    config = GatewayConfig(port=0, api_keys=("test-key-1",))
    runner = await start_server(create_app(engine, ByteCodec(), config), config)
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/v1"
    await runner.cleanup()


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key="test-key-1", max_retries=0) as client:
        yield client


async def test_whole_answer(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="toy/model", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello 🙂 world"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id


async def test_raw_stream_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="toy/model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello 🙂 world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 16


async def test_stream_helper_with_choices_usage_and_logprobs(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="toy/model",
        messages=MESSAGES,
        n=2,
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        events = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.done" in events
    assert [choice.message.role for choice in final.choices] == ["assistant", "assistant"]
    assert [choice.message.content for choice in final.choices] == ["Hello 🙂 world"] * 2
    assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 16
    assert final.usage is not None
    assert final.usage.completion_tokens == 32


async def test_completions_echo_and_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model="toy", prompt="ab", echo=True, logprobs=1, max_tokens=2)
    assert answer.choices[0].text == "abHe"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    stream = await client.completions.create(model="toy", prompt="ab", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello 🙂 world"


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == ["toy/model", "toy"]
    assert (await client.models.retrieve("toy")).owned_by == "breakeven"


async def test_errors_keep_their_class_code_and_param(client: AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="toy", messages=MESSAGES, max_tokens=999_999, stream=True)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong-key").models.list()
    engine.scripts = [Script(error=TargetFailed("lost"), error_after=3)]
    stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        _ = [chunk async for chunk in stream]


async def test_overload_is_retried_as_told(client: AsyncOpenAI, engine: FakeEngine) -> None:
    attempts = []

    def admit(num_choices: int) -> None:
        attempts.append(num_choices)
        if len(attempts) < 3:
            raise QueueFull("full", retry_after_s=0.01)
        engine.num_admitted += num_choices

    engine.admit = admit  # type: ignore[method-assign]
    answer = await client.with_options(max_retries=2).chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello 🙂 world"
    assert len(attempts) == 3


async def test_keep_alive_comments_do_not_disturb_the_client(engine: FakeEngine) -> None:
    # B-11
    engine.scripts = [Script(text="late", hold_after=0)]
    config = GatewayConfig(port=0, keep_alive_s=0.01)
    app = create_app(engine, ByteCodec(), config)
    runner = await start_server(app, config)
    host, port = runner.addresses[0][:2]
    async with AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        await until(lambda: app[EDGE].counters.keep_alives >= 3)
        engine.hold.set()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    await runner.cleanup()
    assert text == "late"


async def test_breaking_out_of_a_stream_aborts_it(client: AsyncOpenAI, engine: FakeEngine) -> None:
    engine.scripts = [Script(text="x" * 99, hold_after=20)]
    stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(engine.closed.wait(), 5)


async def test_the_sync_client_in_a_thread(base_url: str) -> None:
    texts: list[str] = []

    def work() -> None:
        with OpenAI(base_url=base_url, api_key="test-key-1", max_retries=0) as client:
            with client.chat.completions.stream(model="toy", messages=MESSAGES) as stream:
                for event in stream:
                    if event.type == "content.delta":
                        texts.append(event.delta)
            texts.append(
                client.chat.completions.create(model="toy", messages=MESSAGES).choices[0].message.content or ""
            )

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert "".join(texts) == "Hello 🙂 world" * 2
