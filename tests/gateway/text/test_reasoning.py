"""Thoughts and answer are told apart the same way wherever the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.reasoning import ReasoningMarkers, ReasoningSplitter, ReasoningTokens
from tests.gateway.fakes import EOS, ByteCodec

THINK = ReasoningMarkers(start="<think>", end="</think>")
KIMI = ReasoningMarkers(start="◁think▷", end="◁/think▷")


def split(pieces: list[str], *, is_open: bool = False, markers: ReasoningMarkers = THINK) -> tuple[str, str]:
    splitter = ReasoningSplitter(markers, is_open=is_open)
    found = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(piece.reasoning for piece in found), "".join(piece.content for piece in found)


CASES = [
    ("<think>\nHm.\n\nYes.\n</think>\n\nIt is 4.", False, "Hm.\n\nYes.", "It is 4."),
    ("\n<think></think>4", False, "", "4"),
    ("4 <think>no</think>", False, "", "4 <think>no</think>"),
    ("  4", False, "", "  4"),
    ("<thin", False, "", "<thin"),
    ("<think>cut </thi", False, "cut </thi", ""),
    ("Hm. </think> 4 </think>", True, "Hm.", "4 </think>"),
    ("\n<think>Hm. </think>4", True, "Hm.", "4"),
    ("</think>4", True, "", "4"),
    ("a < b </ c </think >", True, "a < b </ c </think >", ""),
    (" <thi", True, "<thi", ""),
    ("", True, "", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES)
def test_cases(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert split([text], is_open=is_open) == (reasoning, content)
    assert split(list(text), is_open=is_open) == (reasoning, content)


@given(st.data())
def test_any_cut_gives_the_same(data: st.DataObject) -> None:
    text, is_open, *expected = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, is_open=is_open) == tuple(expected)


def test_markers_of_several_bytes() -> None:
    text = "◁think▷ä◁/thinkº ◁/think▷ 4"
    assert split(list(text), markers=KIMI) == ("ä◁/thinkº", "4")


def test_no_thought_is_held_back_longer_than_it_must_be() -> None:
    splitter = ReasoningSplitter(THINK, is_open=True)
    assert splitter.push("one <").reasoning == "one"  # white space and what may be the marker
    assert splitter.push("b").reasoning == " <b"
    assert not splitter.is_answering
    splitter.push("</think>\n")
    assert splitter.is_answering
    assert splitter.push(" 4 ").content == "4 "


@pytest.mark.parametrize(
    ("text", "is_open", "num_tokens"),
    [
        ("<think>ab</think>xyz", False, 17),
        ("ab</think>xyz", True, 10),
        ("<think>ab", False, 9),
        ("ab", True, 2),
        ("xyz", False, 0),
        ("  x<think>", False, 0),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_tokens_are_counted_to_the_end_marker(text: str, is_open: bool, num_tokens: int, size: int) -> None:
    codec = ByteCodec()
    tokens = ReasoningTokens(THINK, codec, is_open=is_open, skipped_ids=codec.special_ids)
    ids = codec.encode(text)
    for begin in range(0, len(ids), size):
        tokens.push(ids[begin : begin + size])
    assert tokens.num_tokens == num_tokens


def test_a_skipped_token_is_counted_but_not_read() -> None:
    codec = ByteCodec()
    tokens = ReasoningTokens(THINK, codec, is_open=False, skipped_ids=codec.special_ids)
    tokens.push([EOS, *codec.encode("<think>a</think>")])
    assert tokens.num_tokens == 17
