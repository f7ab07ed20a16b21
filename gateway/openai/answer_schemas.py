"""JSON schemas of what the gateway answers, as components of the OpenAPI document."""

from __future__ import annotations

from typing import Any

__all__ = ["ANSWER_SCHEMAS"]

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TOKEN_IDS = _array(_COUNT)
_STOP_REASON: Schema = {"type": ["string", "integer", "null"]}
_FINISH_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
_ANSWER_HEAD: dict[str, Schema] = {"id": _STRING, "created": _COUNT, "model": _STRING}
_TOKEN_LOGPROB: dict[str, Schema] = {"token": _STRING, "logprob": _NUMBER, "bytes": _array(_COUNT)}

_CHAT_CHOICE = _object(
    {
        "index": _COUNT,
        "message": _object(
            {"role": {"const": "assistant"}, "content": _or_null(_STRING), "refusal": {"type": "null"}},
            {
                "annotations": _array({}),
                "reasoning_content": _STRING,
                "reasoning": _STRING,
                "tool_calls": _array(_ref("ToolCall")),
            },
        ),
        "logprobs": _or_null(_ref("ChatLogprobs")),
        "finish_reason": _FINISH_REASON,
    },
    {"stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS},
)
_TEXT_CHOICE = _object(
    {
        "index": _COUNT,
        "text": _STRING,
        "logprobs": _or_null(_ref("CompletionLogprobs")),
        "finish_reason": _FINISH_REASON,
    },
    {"stop_reason": _STOP_REASON, "token_ids": _TOKEN_IDS, "prompt_token_ids": _TOKEN_IDS},
)

ANSWER_SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _or_null(_STRING)})}
    ),
    "Usage": _object(
        {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
        {
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        },
    ),
    "ToolCall": _object(
        {
            "id": _STRING,
            "type": {"const": "function"},
            "function": _object({"name": _STRING, "arguments": _STRING}),
        }
    ),
    "ChatLogprobs": _object(
        {
            "content": _array(_object({**_TOKEN_LOGPROB, "top_logprobs": _array(_object(_TOKEN_LOGPROB))})),
            "refusal": {"type": "null"},
        }
    ),
    "CompletionLogprobs": _object(
        {
            "tokens": _array(_STRING),
            "token_logprobs": _array(_or_null(_NUMBER)),
            "top_logprobs": _array(_or_null({"type": "object", "additionalProperties": _NUMBER})),
            "text_offset": _array(_COUNT),
        }
    ),
    "ChatCompletion": _object(
        {
            **_ANSWER_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _array(_CHAT_CHOICE),
            "usage": _ref("Usage"),
        },
        {"metrics": {"type": "object"}, "prompt_token_ids": _TOKEN_IDS},
    ),
    "Completion": _object(
        {
            **_ANSWER_HEAD,
            "object": {"const": "text_completion"},
            "choices": _array(_TEXT_CHOICE),
            "usage": _ref("Usage"),
        },
        {"metrics": {"type": "object"}},
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
            "model": _STRING,
            "output": _array(_object({"id": _STRING, "type": {"enum": ["message", "reasoning", "function_call"]}})),
            "usage": _or_null(_object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT})),
        }
    ),
    "ItemList": _object(
        {
            "object": {"const": "list"},
            "data": _array(_object({"id": _STRING, "type": _STRING})),
            "first_id": _or_null(_STRING),
            "last_id": _or_null(_STRING),
            "has_more": {"type": "boolean"},
        }
    ),
    "Deleted": _object({"id": _STRING, "object": {"const": "response"}, "deleted": {"const": True}}),
    "Model": _object(
        {"id": _STRING, "object": {"const": "model"}, "created": _COUNT, "owned_by": _STRING},
        {"root": _STRING, "parent": {"type": "null"}, "max_model_len": _or_null(_COUNT)},
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}),
    "Tokens": _object({"tokens": _TOKEN_IDS, "count": _COUNT, "max_model_len": _COUNT}),
    "Text": _object({"prompt": _STRING}),
    "Health": _object({"status": {"const": "ok"}}),
    "Readiness": _object(
        {"status": {"enum": ["ready", "loading", "draining"]}, "phase": _STRING, "progress": _or_null(_NUMBER)}
    ),
    "ServerInfo": _object({"version": _STRING, "served_model_name": _STRING, "internal_states": _array({})}),
    "Stats": {"type": "object"},
}
