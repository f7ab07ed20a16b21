from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stream import TextStream
from tests.gateway.fakes import EOS, ByteCodec


def push_all(stream: TextStream, raw: bytes) -> tuple[str, str | None, int]:
    """Released text, the matched stop, and how many tokens were needed."""
    text = ""
    for count, token_id in enumerate(raw, start=1):
        piece, stop = stream.push(token_id)
        text += piece
        if stop is not None:
            return text + stream.finish(), stop, count
    return text + stream.finish(), None, len(raw)


def test_text_is_cut_at_the_token_that_completes_the_stop() -> None:
    # C-16, B-14: what comes after in the same block is never pushed.
    assert push_all(TextStream(ByteCodec(), stop_strings=["d🙂"]), "abcd🙂xyz".encode()) == ("abc", "d🙂", 8)


def test_held_text_is_flushed_when_the_answer_ends_otherwise() -> None:
    assert push_all(TextStream(ByteCodec(), stop_strings=["end!"]), b"the en") == ("the en", None, 6)


def test_the_stop_may_be_kept() -> None:
    stream = TextStream(ByteCodec(), stop_strings=["\n"], include_stop_string=True)
    assert push_all(stream, b"a\nb") == ("a\n", "\n", 2)


def test_a_stop_may_be_completed_by_the_last_broken_character() -> None:
    stream = TextStream(ByteCodec(), stop_strings=["\ufffd"])
    assert stream.push(0xF0) == ("", None)
    assert stream.finish() == ""
    assert stream.matched_stop == "\ufffd"


def test_a_skipped_special_token_is_no_text() -> None:
    assert TextStream(ByteCodec()).push(EOS) == ("", None)
    assert TextStream(ByteCodec(), skip_special_tokens=False).push(EOS) == ("</s>", None)


@given(st.binary(max_size=40), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_released_text_is_a_prefix_of_the_decode_and_holds_no_stop(raw: bytes, stops: list[str]) -> None:
    text, stop, count = push_all(TextStream(ByteCodec(), stop_strings=stops), raw)
    full = ByteCodec().decode(list(raw))
    assert full.startswith(text)
    assert not any(candidate in text for candidate in stops)
    if stop is None:
        assert text == full
    else:
        assert ByteCodec().decode(list(raw[:count])).startswith(text + stop)
