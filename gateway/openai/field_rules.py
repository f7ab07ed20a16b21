"""What happens to every request field: honoured, ignored for a stated reason, or refused. docs/api.md shows it.

A field that changes the answer and can't be honoured is refused, never dropped: the client would get a wrong answer
without a word. A field that can't change the answer (accounting, storage, routing hints) is ignored. A name found in no
table is ignored too, unless the configuration is strict.
"""

from __future__ import annotations

from typing import Any

from gateway.openai.constraints import CONSTRAINT_FIELDS
from gateway.openai.fields import FieldReader
from gateway.openai.tools import TOOL_FIELDS

__all__ = [
    "CHAT_FIELDS",
    "COMMON_FIELDS",
    "COMPLETION_FIELDS",
    "IGNORED_FIELDS",
    "REFUSED_FIELDS",
    "RESPONSES_FIELDS",
    "check_known_fields",
]

COMMON_FIELDS = CONSTRAINT_FIELDS | frozenset(
    {
        "best_of",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "repetition_penalty",
        "return_spec_stats",
        "return_token_ids",
        "seed",
        "skip_special_tokens",
        "speculation",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
    }
)
CHAT_FIELDS = (
    COMMON_FIELDS
    | TOOL_FIELDS
    | {"add_generation_prompt", "include_reasoning", "max_completion_tokens", "messages", "separate_reasoning"}
    | {"top_logprobs"}
)
COMPLETION_FIELDS = COMMON_FIELDS | {"add_special_tokens", "echo", "prompt"}
_NOT_IN_RESPONSES = frozenset(
    {"best_of", "logprobs", "max_tokens", "n", "return_spec_stats", "return_token_ids", "stream_options"}
)
RESPONSES_FIELDS = (
    (COMMON_FIELDS - CONSTRAINT_FIELDS - _NOT_IN_RESPONSES)
    | TOOL_FIELDS
    | {"background", "include", "input", "instructions", "max_output_tokens", "metadata", "n", "previous_response_id"}
    | {"store", "text", "top_logprobs", "truncation"}
)

# Accepted and without effect. The reason stands in docs/api.md.
IGNORED_FIELDS: dict[str, str] = {
    "cache_salt": "prefix reuse never crosses models and never changes an answer",
    "include_reasoning": "only a chat has a reasoning part that can be left out",
    "metadata": "nothing is stored",
    "prediction": "a speed hint; the drafter predicts by itself",
    "priority": "requests run in order of arrival",
    "prompt_cache_key": "the prefix cache finds shared prefixes by content",
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "reasoning": "the served models have no effort setting",
    "reasoning_effort": "the served models have no effort setting",
    "request_id": "the x-request-id header is used",
    "rid": "the x-request-id header is used",
    "safety_identifier": "nothing is stored",
    "separate_reasoning": "a completion is text as it comes, a response always has items",
    "service_tier": "there is one tier",
    "session_id": "the prefix cache finds shared prefixes by content",
    "spaces_between_special_tokens": "decoding never adds spaces",
    "store": "only responses are stored",
    "user": "nothing is stored",
    "verbosity": "the served models have no verbosity setting",
}

# Refused unless the value is neutral: each would change the answer.
REFUSED_FIELDS: dict[str, str] = {
    "allowed_token_ids": "token allow-lists are not supported; use logit_bias",
    "audio": "audio output is not supported",
    "bad_words": "bad_words is not supported; use logit_bias",
    "chat_template": "the model's own chat template is used",
    "chat_template_kwargs": "chat template arguments are not supported",
    "continue_final_message": "continuing the final message is not supported",
    "custom_logit_processor": "custom logit processors are not supported",
    "documents": "documents are not supported; put them into a message",
    "ebnf": "grammars are written in Lark; use structured_outputs.grammar",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_grammar": "grammars are written in Lark; use structured_outputs.grammar",
    "input_ids": "send token ids as the prompt of /v1/completions",
    "length_penalty": "beam search is not supported",
    "lora_path": "adapters are not supported",
    "modalities": "only text output is supported",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "stop_regex": "stop_regex is not supported; use stop",
    "suffix": "the model is not trained to fill in the middle",
    "truncate_prompt_tokens": "prompts are never truncated",
    "use_beam_search": "beam search is not supported",
    "web_search_options": "web search is not supported",
}

# Honoured by some endpoints only, and refused by the others for the same reason.
_ENDPOINT_FIELDS = CONSTRAINT_FIELDS | {"best_of", "logprobs", "max_tokens", "tool_choice", "tools"}

_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
_ALWAYS_NEUTRAL: tuple[Any, ...] = (None, "", [], {}, False)


def check_known_fields(reader: FieldReader, honoured: frozenset[str], *, is_strict: bool) -> None:
    """Refuse fields that would change the answer if ignored, and unknown ones if ``is_strict``.

    Raises:
        InvalidRequest: names the field.
    """
    for name, value in reader.values.items():
        if name in honoured or name in IGNORED_FIELDS:
            continue
        if name in REFUSED_FIELDS:
            if not _is_neutral(name, value):
                reader.fail(name, f"is not supported: {REFUSED_FIELDS[name]}", code="unsupported_parameter")
        elif name in _ENDPOINT_FIELDS:
            if not _is_neutral(name, value):
                reader.fail(name, "is not a field of this endpoint", code="unsupported_parameter")
        elif is_strict:
            reader.fail(name[:64], "is not a known field", code="unknown_parameter")


def _is_neutral(name: str, value: Any) -> bool:
    # 0 == False in Python, so the type is compared as well.
    neutral = _ALWAYS_NEUTRAL + _NEUTRAL_VALUES.get(name, ())
    return any(value == candidate and type(value) is type(candidate) for candidate in neutral)
