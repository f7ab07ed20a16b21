from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.detokenize import IncrementalDetokenizer
from tests.gateway.fakes import BOS, EOS, ByteCodec

TORTURE = [
    "🙂🙂",
    "삼겹살",
    "ďábelské",
    "👨‍👩‍👧‍👦 family",
    "🇩🇪🇫🇷",
    "क्षत्रिय नि",
    "line\r\nend",
    "\u2028\x00\U00020bb7",
    "a real \ufffd inside and at the end \ufffd",
]


def decode_one_by_one(ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(ByteCodec(), skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TORTURE)
def test_no_delta_splits_a_character(text: str) -> None:
    # B-1, C-14
    deltas = decode_one_by_one(list(text.encode()))
    assert "".join(deltas) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
    assert all(delta == "" or delta.encode() for delta in deltas)


def test_a_complete_character_is_released_at_its_last_byte() -> None:
    deltas = decode_one_by_one(list("🙂".encode()))
    assert deltas == ["", "", "", "🙂", ""]


def test_a_real_replacement_character_at_the_end_comes_out_at_once() -> None:
    assert decode_one_by_one(list("ok\ufffd".encode()))[-2:] == ["\ufffd", ""]


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character() -> None:
    assert decode_one_by_one([0x61, 0xF0, 0x9F, 0x98])[-1] == "\ufffd"


def test_special_tokens_are_hidden_or_literal() -> None:
    # B-26
    assert "".join(decode_one_by_one([BOS, 0x61, EOS])) == "a"
    assert "".join(decode_one_by_one([BOS, 0x61, EOS], skip=False)) == "<s>a</s>"


@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace")))
def test_deltas_equal_the_one_shot_decode_of_any_bytes(raw: bytes) -> None:
    assert "".join(decode_one_by_one(list(raw))) == ByteCodec().decode(list(raw))


@given(st.lists(st.sampled_from([BOS, EOS, 0x41, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 0xFF]), max_size=40), st.booleans())
def test_special_tokens_never_break_a_character_apart(ids: list[int], skip: bool) -> None:
    joined = "".join(decode_one_by_one(ids, skip=skip))
    assert joined == ByteCodec().decode(ids, skip_special_tokens=skip)
