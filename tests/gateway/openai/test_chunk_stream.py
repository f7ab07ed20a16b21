"""The short way through a stream of text gives the bytes of the long one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.openai.answer_plan import AnswerPlan
from gateway.openai.chat_request import parse_chat_request
from gateway.openai.chunk_stream import ChunkStream
from gateway.openai.generation import build_choices
from gateway.openai.requests import RequestRules
from gateway.openai.responses import Endpoint, ResponseHead
from gateway.ports import GenerationDelta
from tests.gateway.fakes import ByteCodec, FakeEngine

RULES = RequestRules(config=GatewayConfig(), card=FakeEngine().model_card())


def stream(endpoint: Endpoint = "chat", **fields: Any) -> ChunkStream:
    body = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "n": 2, **fields}
    shared = parse_chat_request(body, RULES).shared
    choices = build_choices(shared, (1,), first_id="x", first_index=0, max_new_tokens=5, codec=ByteCodec())
    head = ResponseHead(endpoint=endpoint, response_id="x", created_s=1, model='a "model"|')
    plan = AnswerPlan(head=head, shared=shared, choices=tuple(choices), echo_texts=("", ""))
    return ChunkStream(plan, ByteCodec())


@settings(max_examples=50)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=6),
    endpoint=st.sampled_from(["chat", "completions"]),
    has_usage=st.booleans(),
)
def test_both_ways_give_the_same(texts: list[str], endpoint: Endpoint, has_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    short, long = stream(endpoint, **options), stream(endpoint, **options)
    assert short._frames is not None
    long._frames = None
    for index, text in enumerate(texts):
        delta = GenerationDelta(text=text, token_ids=(97, 98))
        assert short.next_events(index % 2, delta) == long.next_events(index % 2, delta)
    assert short._tally.usage_so_far() == long._tally.usage_so_far()


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_interval": 1},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_what_is_more_than_text_takes_the_long_way(fields: dict[str, Any]) -> None:
    assert stream(**fields)._frames is None
