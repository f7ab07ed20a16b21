from __future__ import annotations

import math

import pytest

from gateway.openai.choice_pieces import join_logprobs
from gateway.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.ports import TokenLogprob
from tests.gateway.fakes import BOS, ByteCodec

CODEC = ByteCodec()


def offsets(start: int = 0) -> TextOffsets:
    return TextOffsets(CODEC, skip_special_tokens=True, start=start)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, -1e9])
def test_numbers_json_does_not_have_are_clamped(value: float) -> None:
    # B-8
    entry = TokenLogprob(token_id=65, logprob=value, top=((66, value),))
    fields = chat_logprobs([entry], CODEC)["content"][0]
    assert fields["logprob"] == fields["top_logprobs"][0]["logprob"] == -9999.0
    lists = completion_logprobs([entry], [65], CODEC, offsets())
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"B": -9999.0, "A": -9999.0}]


def test_half_characters_are_shown_replaced_but_their_bytes_are_exact() -> None:
    fields = chat_logprobs([TokenLogprob(token_id=0xF0, logprob=-1.0)], CODEC)["content"][0]
    assert (fields["token"], fields["bytes"]) == ("\ufffd", [0xF0])


def test_offsets_start_after_an_echoed_prompt_and_skip_hidden_tokens() -> None:
    count = offsets(start=7)
    ids = [BOS, 0x61, *"🙂".encode(), 0x62]
    assert [count.next_offset(token_id) for token_id in ids] == [7, 7, 8, 8, 8, 8, 9]


def test_the_best_of_equal_texts_is_kept() -> None:
    entry = TokenLogprob(token_id=0x80, logprob=-3.0, top=((0x81, -1.0), (0x82, -2.0)))
    assert completion_logprobs([entry], [0x80], CODEC, offsets())["top_logprobs"] == [{"\ufffd": -1.0}]


def test_pieces_are_joined_list_by_list() -> None:
    assert join_logprobs([]) is None
    parts = [{"content": [1], "refusal": None}, {"content": [2, 3], "refusal": None}]
    assert join_logprobs(parts) == {"content": [1, 2, 3], "refusal": None}
    assert parts[0] == {"content": [1], "refusal": None}
