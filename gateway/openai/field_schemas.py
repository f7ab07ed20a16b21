"""The JSON schema of every honoured request field, for the OpenAPI document. A test keeps it equal to the field tables.

Limits that come from the configuration are not in here: a schema that is looser than the server is fine, one that is
tighter would make clients refuse what the server takes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FIELD_SCHEMAS", "nullable"]

Schema = dict[str, Any]


def nullable(schema: Schema) -> Schema:
    """The schema or null: an absent field and a null one mean the same."""
    return {"anyOf": [schema, {"type": "null"}]}


def _integer(low: int | None = None, high: int | None = None) -> Schema:
    limits = {"minimum": low, "maximum": high}
    return {"type": "integer", **{key: value for key, value in limits.items() if value is not None}}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _array(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_BOOLEAN: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_TOKEN_IDS = _array(_integer(0), minItems=1)

FIELD_SCHEMAS: dict[str, Schema] = {
    "add_generation_prompt": _BOOLEAN,
    "add_special_tokens": _BOOLEAN,
    "background": _BOOLEAN,
    "best_of": _integer(0),
    "echo": _BOOLEAN,
    "frequency_penalty": _number(-2, 2),
    "guided_choice": _array(_STRING, minItems=1),
    "guided_json": {"anyOf": [{"type": "object"}, _STRING]},
    "guided_regex": _STRING,
    "ignore_eos": _BOOLEAN,
    "include": _array(_STRING),
    "include_reasoning": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "input": {"anyOf": [_STRING, _array({"type": "object"}, minItems=1)]},
    "instructions": _STRING,
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100)},
    "logprobs": {"anyOf": [_BOOLEAN, _integer(0)]},
    "max_completion_tokens": _integer(1),
    "max_output_tokens": _integer(1),
    "max_tokens": _integer(0),
    "messages": _array(_ref("ChatMessage"), minItems=1),
    "metadata": {"type": "object"},
    "min_p": _number(0, 1),
    "min_tokens": _integer(0),
    "model": _STRING,
    "n": _integer(1),
    "no_stop_trim": _BOOLEAN,
    "parallel_tool_calls": _BOOLEAN,
    "presence_penalty": _number(-2, 2),
    "previous_response_id": _STRING,
    "prompt": {"anyOf": [_STRING, _array(_STRING, minItems=1), _TOKEN_IDS, _array(_TOKEN_IDS, minItems=1)]},
    "regex": _STRING,
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
    "response_format": {"type": "object", "properties": {"type": _STRING}},
    "return_spec_stats": _BOOLEAN,
    "return_token_ids": _BOOLEAN,
    "seed": _integer(-(2**63), 2**63 - 1),
    "separate_reasoning": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "speculation": {
        **_object(mode={"enum": ["auto", "on", "off"]}, num_draft_tokens=_integer(1)),
        "additionalProperties": False,
    },
    "stop": {"anyOf": [_STRING, _array(_STRING)]},
    "stop_token_ids": _array(_integer(0)),
    "store": _BOOLEAN,
    "stream": _BOOLEAN,
    "stream_interval": _integer(1),
    "stream_options": _object(include_usage=_BOOLEAN, continuous_usage_stats=_BOOLEAN, include_obfuscation=_BOOLEAN),
    "structured_outputs": {"type": "object"},
    "temperature": _number(0, 2),
    "text": _object(format={"type": "object", "properties": {"type": _STRING}}),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    "tools": _array({"type": "object", "properties": {"type": {"const": "function"}}, "required": ["type"]}),
    "top_k": _integer(-1),
    "top_logprobs": _integer(0),
    "top_p": _number(0, 1),
    "truncation": {"enum": ["auto", "disabled"]},
}
