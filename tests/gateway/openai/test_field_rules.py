from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.openai.field_rules import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    RESPONSES_FIELDS,
    check_known_fields,
)
from gateway.openai.fields import FieldReader

# All request fields of OpenAI's API document, info version 2.3.0.
OPENAI_CHAT_FIELDS = [
    "audio",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "modalities",
    "model",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]
OPENAI_COMPLETION_FIELDS = [
    "best_of",
    "echo",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "presence_penalty",
    "prompt",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "top_p",
    "user",
]


@pytest.mark.parametrize(
    ("honoured", "names"), [(CHAT_FIELDS, OPENAI_CHAT_FIELDS), (COMPLETION_FIELDS, OPENAI_COMPLETION_FIELDS)]
)
def test_every_field_of_the_specification_has_a_rule(honoured: frozenset[str], names: list[str]) -> None:
    for name in names:
        assert (name in honoured) + (name in IGNORED_FIELDS) + (name in REFUSED_FIELDS) == 1, name


def test_every_rule_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [
        name
        for name in sorted(
            CHAT_FIELDS | COMPLETION_FIELDS | RESPONSES_FIELDS | IGNORED_FIELDS.keys() | REFUSED_FIELDS.keys()
        )
        if f"`{name}`" not in page
    ]
    assert missing == []


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_refused_field_names_itself_and_the_reason(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_known_fields(FieldReader({name: "something"}), CHAT_FIELDS, is_strict=False)
    assert caught.value.param == name
    assert REFUSED_FIELDS[name] in caught.value.message
    check_known_fields(FieldReader({name: None}), CHAT_FIELDS, is_strict=False)


def test_neutral_values_are_compared_by_type() -> None:
    check_known_fields(FieldReader({"length_penalty": 1.0, "use_beam_search": False}), CHAT_FIELDS, is_strict=True)
    with pytest.raises(InvalidRequest):
        check_known_fields(FieldReader({"length_penalty": 0}), CHAT_FIELDS, is_strict=False)


@pytest.mark.parametrize(
    ("honoured", "fields"),
    [
        (COMPLETION_FIELDS, {"tools": [{}], "tool_choice": "required"}),
        (RESPONSES_FIELDS, {"response_format": {"type": "json_object"}, "regex": "a", "max_tokens": 5, "best_of": 2}),
    ],
)
def test_a_field_of_another_endpoint_is_not_dropped(honoured: frozenset[str], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        with pytest.raises(InvalidRequest, match="not a field of this endpoint"):
            check_known_fields(FieldReader({name: value}), honoured, is_strict=False)
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": 1, "logprobs": False}
    check_known_fields(FieldReader(neutral), honoured, is_strict=True)
