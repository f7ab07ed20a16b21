from __future__ import annotations

from collections.abc import Sequence

from gateway.http.prompts import message_ids
from gateway.ports import ChatMessage
from gateway.text.chat_template import ChatTemplate
from gateway.text.tool_prompt import Tool
from tests.gateway.fakes import ByteCodec

TOOL = Tool(name="f", description="", parameters={"type": "object"})
HI = (ChatMessage(role="user", content="Hi"),)
KNOWS = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %} write <tool_call> {% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
)
KNOWS_NOT = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"


class TemplateCodec(ByteCodec):
    """The byte codec with a real template."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source, special_tokens={})

    @property
    def writes_tools(self) -> bool:
        return self.template.writes_tools

    def render_tools(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        return self.encode(self.template.render(messages, tools=tools))

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        return self.encode(self.template.render(messages, add_generation_prompt=add_generation_prompt))


async def prompt_of(codec: ByteCodec, tools: Sequence[Tool]) -> str:
    return codec.decode(await message_ids(codec, HI, add_generation_prompt=True, tools=tools))


async def test_a_template_that_knows_tools_writes_them() -> None:
    assert await prompt_of(TemplateCodec(KNOWS), [TOOL]) == "[f] write <tool_call> user:Hi\n"
    assert await prompt_of(TemplateCodec(KNOWS), []) == "user:Hi\n"


async def test_other_models_get_the_generic_text() -> None:
    for codec in (TemplateCodec(KNOWS_NOT), ByteCodec()):
        prompt = await prompt_of(codec, [TOOL])
        assert "# Tools" in prompt
        assert '"name": "f"' in prompt
