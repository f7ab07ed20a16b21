from __future__ import annotations

import pytest

from gateway.errors import InvalidRequest
from gateway.ports import ChatMessage, ToolCall
from gateway.text.chat_template import ChatTemplate

USER = ChatMessage(role="user", content='say "hé" <b>')


def render(source: str, *messages: ChatMessage, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages or (USER,), add_generation_prompt=add_generation_prompt)


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for message in messages %}\n  {% if true %}\n{{ message.content }}\n  {% endif %}\n{% endfor %}"
    assert render(source, ChatMessage(role="user", content="x")) == "x\n"


def test_special_tokens_and_generation_prompt_are_variables() -> None:
    source = "{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}{{ eos_token }}"
    assert render(source) == "<s>A:</s>"
    assert render(source, add_generation_prompt=False) == "<s></s>"


def test_tojson_does_not_escape_html_or_unicode() -> None:
    assert render("{{ messages[0].content | tojson }}") == '"say \\"hé\\" <b>"'


def test_loop_controls_generation_blocks_and_dates() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.role }}]{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, USER, USER) == "[user]"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_tool_calls_of_earlier_turns_are_visible() -> None:
    call = ToolCall(id="c1", name="look", arguments='{"a":1}')
    source = (
        "{% for c in messages[0].tool_calls %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments }}{% endfor %}"
    )
    message = ChatMessage(role="assistant", content="", tool_calls=(call,))
    assert render(source, message) == 'c1 look {"a":1}'
    assert render("{{ messages[0].tool_calls is defined }}") == "False"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[9].content.nope.nope }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__.os }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_whatever_the_template_raises_is_a_bounded_client_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 300


def test_a_broken_template_is_told_at_load() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", special_tokens={})


@pytest.mark.slow
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n    {%- if m.role == 'user' %}\n{{ m.content | trim }}\n    {% else %}\n"
        "<{{ m.role }}>\n  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
        "{{ bos_token }}{{ messages | tojson }}{{ messages | tojson(indent=2) }}{% if tools %}T{% endif %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.n }}",
    ],
)
def test_renders_what_transformers_renders(source: str, add_generation_prompt: bool) -> None:
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [
        ChatMessage(role="system", content="Be short <&> 🙂"),
        ChatMessage(role="user", content="  a\nb  "),
        ChatMessage(role="assistant", content="ç"),
    ]
    theirs, _ = chat_templates.render_jinja_template(
        [[{"role": message.role, "content": message.content} for message in chat]],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(source, *chat, add_generation_prompt=add_generation_prompt) == theirs[0]
