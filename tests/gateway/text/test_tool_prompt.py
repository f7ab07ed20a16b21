from __future__ import annotations

from gateway.ports import ChatMessage, ToolCall
from gateway.text.tool_prompt import Tool, with_tools

TOOL = Tool(name="f", description="Does f.", parameters={"type": "object"})


def test_the_tools_stand_in_the_first_system_message() -> None:
    messages = with_tools(
        [ChatMessage(role="system", content="Be kind."), ChatMessage(role="user", content="Hi")], [TOOL]
    )
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[0].content.startswith("Be kind.\n\n# Tools")
    assert '{"name": "f", "description": "Does f.", "parameters": {"type": "object"}}' in messages[0].content
    assert '{"name": <function-name>, "arguments": <arguments-object>}' in messages[0].content
    alone = with_tools([ChatMessage(role="user", content="Hi")], [TOOL])
    assert [message.role for message in alone] == ["system", "user"]


def test_earlier_calls_and_results_are_text() -> None:
    history = [
        ChatMessage(role="user", content="Hi"),
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall(id="1", name="f", arguments='{"a":1}'),)),
        ChatMessage(role="tool", content="42", tool_call_id="1"),
    ]
    _, user, call, result = with_tools(history, [TOOL])
    assert user.content == "Hi"
    assert call == ChatMessage(
        role="assistant", content='<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    )
    assert result == ChatMessage(role="user", content="<tool_response>\n42\n</tool_response>")
