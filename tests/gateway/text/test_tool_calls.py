from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.text.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa}ris \\"x\\"", "n": [1, {"a": 2}]}}\n</tool_call>'
ARGUMENTS = {"city": 'Pa}ris "x"', "n": [1, {"a": 2}]}


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call; checks the rules of streamed deltas on the way."""
    parser = ToolCallParser()
    content, calls = "", []
    for piece in [*(parser.push(text) for text in pieces), parser.finish()]:
        content += piece.text
        for delta in piece.deltas:
            if delta.call_id:
                assert delta.name
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    return content, calls


@given(st.data())
def test_any_cut_of_the_text_gives_the_same(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from([CALL, "Sure.\n" + CALL, CALL + "\n" + CALL, "a < b <tool", "<tool_call>no", "x" + CALL + "y"])
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == parsed([text])
    assert parsed(list(text)) == parsed([text])


def test_content_and_calls() -> None:
    content, calls = parsed(["Sure.\n" + CALL + "\n" + CALL + "\n"])
    assert content == "Sure.\n"
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", ARGUMENTS)] * 2


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallParser()
    assert parser.push('<tool_call>{"name": "f", "arg').deltas == ()
    first = parser.push('uments": {"a": ')
    assert [(delta.name, delta.arguments) for delta in first.deltas] == [("f", ""), ("", '{"a": ')]
    assert [delta.arguments for delta in parser.push("1}}").deltas] == ["1}"]
    assert parser.push("\n</tool_call>").deltas == ()
    assert parser.finish().text == ""


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain text", "plain text", []),
        ("a <b> c <tool_cal", "a <b> c <tool_cal", []),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ("<tool_call>{", "<tool_call>{", []),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "null")]),
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {}, "name": "f"}', "", [("f", "{}")]),
    ],
)
def test_odd_calls(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed([text]) == (content, calls)
