"""The body of POST /v1/completions as a typed record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.openai.field_rules import COMPLETION_FIELDS, check_known_fields
from gateway.openai.fields import FieldReader, describe
from gateway.openai.requests import MAX_INTEGER, RequestRules, SharedFields, parse_shared_fields

__all__ = ["CompletionRequest", "parse_completion_request"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One completions request.

    Fields:
        prompts: each a text, or token ids that are all in the vocabulary; never empty.
        echo: the prompt's text, and logprobs if asked for, come before the answer's.
        add_special_tokens: encode text prompts the way the tokenizer does by itself, usually with BOS.
    """

    shared: SharedFields
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool
    add_special_tokens: bool


def parse_completion_request(body: dict[str, Any], rules: RequestRules) -> CompletionRequest:
    """Check and convert a whole completions body.

    Raises:
        InvalidRequest: names the field at fault.
        NotFound: the model is not served here.
    """
    reader = FieldReader(body)
    check_known_fields(reader, COMPLETION_FIELDS, is_strict=rules.config.is_strict)
    echo = reader.boolean("echo")
    max_tokens = reader.integer("max_tokens", default=None, low=0, high=MAX_INTEGER)
    if max_tokens == 0 and not echo:
        reader.fail("max_tokens", "must be at least 1 unless echo is true")
    shared = parse_shared_fields(
        reader,
        rules,
        num_logprobs=reader.integer("logprobs", default=None, low=0, high=rules.config.max_logprobs),
        max_tokens=("max_tokens", max_tokens),
    )
    return CompletionRequest(
        shared=shared,
        prompts=_prompts(reader, rules),
        echo=echo,
        add_special_tokens=reader.boolean("add_special_tokens", default=True),
    )


def _prompts(reader: FieldReader, rules: RequestRules) -> tuple[str | tuple[int, ...], ...]:
    value = reader.require("prompt")
    if isinstance(value, str):
        return (_text(value, "prompt", reader),)
    if not isinstance(value, list) or not value:
        reader.fail("prompt", "must be a string, or a non-empty array of strings, token ids or token id arrays")
    if type(value[0]) is int:
        return (_token_ids(value, "prompt", reader, rules),)
    if len(value) > rules.config.max_prompts:
        reader.fail("prompt", f"must have at most {rules.config.max_prompts} prompts, not {len(value)}")
    if isinstance(value[0], str):
        return tuple(_text(entry, f"prompt[{index}]", reader) for index, entry in enumerate(value))
    return tuple(_token_ids(entry, f"prompt[{index}]", reader, rules) for index, entry in enumerate(value))


def _text(value: Any, name: str, reader: FieldReader) -> str:
    if not isinstance(value, str):
        reader.fail(name, f"must be a string like the prompts before it, not {describe(value)}", code="invalid_type")
    if not value:
        reader.fail(name, "must not be empty")
    return value


def _token_ids(value: Any, name: str, reader: FieldReader, rules: RequestRules) -> tuple[int, ...]:
    if not isinstance(value, list):
        reader.fail(name, f"must be an array of token ids, not {describe(value)}", code="invalid_type")
    if not value:
        reader.fail(name, "must not be empty")
    vocab_size = rules.card.vocab_size
    # One C-speed pass for the common case; prompts may hold 100,000 ids.
    if set(map(type, value)) != {int} or min(value) < 0 or max(value) >= vocab_size:
        reader.fail(name, f"must hold only token ids from 0 to {vocab_size - 1}")
    return tuple(value)
