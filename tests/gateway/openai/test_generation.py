from __future__ import annotations

import pytest

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest
from gateway.openai.chat_request import ChatRequest, parse_chat_request
from gateway.openai.completion_request import parse_completion_request
from gateway.openai.generation import build_choices, resolve_max_new_tokens
from gateway.openai.requests import RequestRules
from gateway.ports import ChatMessage, GenerationRequest, ToolCall
from tests.gateway.fakes import EOS, ByteCodec, FakeEngine


@pytest.fixture
def rules() -> RequestRules:
    return RequestRules(config=GatewayConfig(), card=FakeEngine().model_card())


def parse(rules: RequestRules, **fields: object) -> ChatRequest:
    return parse_chat_request({"model": "toy", "messages": [{"role": "user", "content": "Hi"}], **fields}, rules)


def build(rules: RequestRules, **fields: object) -> list[GenerationRequest]:
    shared = parse(rules, **fields).shared
    return build_choices(
        shared, (65,), first_id="id", first_index=2, max_new_tokens=5, codec=ByteCodec(), deadline_s=3.0
    )


async def test_sampling_fields_arrive_as_they_are(rules: RequestRules) -> None:
    request = build(
        rules,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={"65": -100, "66": 2},
        seed=41,
        min_tokens=3,
        stop_token_ids=[10],
    )[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.5, 1.1)
    assert sampling.logit_bias == ((65, -100.0), (66, 2.0))
    assert (sampling.seed, sampling.min_new_tokens, sampling.eos_ids) == (43, 3, (10, EOS))
    assert request.stop_token_ids == {10, EOS}
    assert (request.request_id, request.deadline_s, request.max_new_tokens) == ("id-2", 3.0, 5)


async def test_defaults_are_plain_sampling_with_a_fresh_seed(rules: RequestRules) -> None:
    first, second = build(rules)[0], build(rules)[0]
    assert first.sampling.temperature == 1.0
    assert first.stop_token_ids == {EOS}
    assert first.sampling.eos_ids == ()
    assert 0 <= first.sampling.seed < 2**63
    assert first.sampling.seed != second.sampling.seed


async def test_ignore_eos_leaves_only_the_clients_stops(rules: RequestRules) -> None:
    assert build(rules, ignore_eos=True, stop_token_ids=[7])[0].stop_token_ids == {7}


async def test_a_top_p_of_zero_keeps_a_positive_share(rules: RequestRules) -> None:
    assert 0 < build(rules, top_p=0)[0].sampling.top_p < 1e-6


async def test_messages_become_records(rules: RequestRules) -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "kim"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    assert parse(rules, messages=messages).messages == (
        ChatMessage(role="system", content="Be short."),
        ChatMessage(role="user", content="a\nb", name="kim"),
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments="{}"),)),
        ChatMessage(role="tool", content="4", tool_call_id="c"),
    )


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "default", "expected"),
    [(None, 10, None, 90), (None, 10, 16, 16), (None, 95, 16, 5), (90, 10, None, 90), (0, 100, 16, 0)],
)
async def test_budget(
    rules: RequestRules, asked: int | None, num_prompt_tokens: int, default: int | None, expected: int
) -> None:
    body = {"model": "toy", "prompt": "x", "echo": True, **({} if asked is None else {"max_tokens": asked})}
    shared = parse_completion_request(body, rules).shared
    assert resolve_max_new_tokens(shared, num_prompt_tokens, context_len=100, default=default) == expected


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "param"),
    [(91, 10, "max_tokens"), (None, 100, "prompt"), (0, 101, "prompt"), (1, 100, "prompt")],
)
async def test_no_budget(rules: RequestRules, asked: int | None, num_prompt_tokens: int, param: str) -> None:
    body = {"model": "toy", "prompt": "x", "echo": True, **({} if asked is None else {"max_tokens": asked})}
    shared = parse_completion_request(body, rules).shared
    with pytest.raises(InvalidRequest) as caught:
        resolve_max_new_tokens(shared, num_prompt_tokens, context_len=100, default=16)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
