from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.stop_strings import StopStringMatcher


def oracle(text: str, stops: list[str]) -> tuple[int, str] | None:
    """End of the first complete stop and the longest one ending there, by the definition."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def feed(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopStringMatcher(stops, include_stop=include)
    released = []
    for piece in pieces:
        match = matcher.push(piece)
        released.append(match.text)
        if match.stop is not None:
            return released, match.stop
    return [*released, matcher.finish()], None


@pytest.mark.parametrize(
    ("pieces", "stops", "released", "stop"),
    [
        (["x", *"<|im_end|>"], ["<|im_end|>"], "x", "<|im_end|>"),
        (["Hi", "\nUser", ":", " more"], ["\nUser:"], "Hi", "\nUser:"),
        (["The quick br", "own", " fox", " jumps"], ["own fox"], "The quick br", "own fox"),
        (["UNO DUE ", "TRE"], ["TRE\nAAAAAAAA"], "UNO DUE TRE", None),
        (["abcabd"], ["abd"], "abc", "abd"),
        (["aab"], ["ab", "b"], "a", "ab"),
        (["abc"], ["abc", "b"], "a", "b"),
        (["ha ha", " ha ha"], [" ha ha ha"], "ha", " ha ha ha"),
        (["no stops"], [], "no stops", None),
    ],
    ids=[
        "B-2 pieces",
        "B-2 newline",
        "B-2 middle",
        "B-3 flush",
        "overlap",
        "longest",
        "first complete",
        "B-14",
        "none",
    ],
)
def test_cut(pieces: list[str], stops: list[str], released: str, stop: str | None) -> None:
    texts, matched = feed(pieces, stops)
    assert ("".join(texts), matched) == (released, stop)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopStringMatcher(["STOP"])
    assert matcher.push("abcST").text == "abc"
    assert matcher.push("A").text == "STA"
    assert matcher.push("SSTO").text == "S"
    assert matcher.finish() == "STO"


def test_the_stop_is_included_on_request() -> None:
    assert feed(["a", "ST", "OPx"], ["STOP"], include=True) == (["a", "", "STOP"], "STOP")


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStringMatcher(["a", ""])


SMALL = st.text(alphabet="ab\n🙂", min_size=1, max_size=5)


@given(st.lists(st.text(alphabet="ab\n🙂", max_size=4), max_size=12), st.lists(SMALL, max_size=4), st.booleans())
def test_any_split_cuts_where_the_definition_says(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    released, stop = feed(pieces, stops, include=include)
    expected = oracle(text, stops)
    if expected is None:
        assert ("".join(released), stop) == (text, None)
    else:
        end, longest = expected
        assert stop == longest
        assert "".join(released) == text[: end if include else end - len(longest)]


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=12), st.lists(SMALL, min_size=1, max_size=4))
def test_no_more_is_held_than_a_prefix_of_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    pushed = released = ""
    for piece in pieces:
        match = matcher.push(piece)
        pushed, released = pushed + piece, released + match.text
        if match.stop is not None:
            return
        held = pushed[len(released) :]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if pushed.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest


def test_cost_is_linear_in_the_text() -> None:
    # A matcher that searches again from the start would need minutes for this.
    stop = "a" * 500 + "b"
    matcher = StopStringMatcher([stop])
    started = time.perf_counter()
    for _ in range(20_000):
        assert matcher.push("aaa").stop is None
    assert time.perf_counter() - started < 5
