"""The response object of the Responses API and its output items, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.errors import GatewayError
from gateway.openai.responses_request import ResponsesRequest
from gateway.ports import GenerationFinished
from gateway.text.tool_prompt import Tool

__all__ = ["FunctionCallItem", "Item", "MessageItem", "ReasoningItem", "ResponseObject", "Status"]

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


@dataclass(slots=True, kw_only=True)
class MessageItem:
    """Text the model wrote, and the logprobs of its tokens if asked for (entries of chat's shape)."""

    item_id: str
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: Status = "in_progress"

    def part(self) -> dict[str, Any]:
        """Its one content part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def fields(self) -> dict[str, Any]:
        """The item as it stands."""
        content = [] if self.status == "in_progress" and not self.text else [self.part()]
        return {
            "type": "message",
            "id": self.item_id,
            "status": self.status,
            "role": "assistant",
            "content": content,
        }


@dataclass(slots=True, kw_only=True)
class ReasoningItem:
    """What the model thought before."""

    item_id: str
    text: str = ""
    status: Status = "in_progress"

    def part(self) -> dict[str, Any]:
        """Its one content part."""
        return {"type": "reasoning_text", "text": self.text}

    def fields(self) -> dict[str, Any]:
        """The item as it stands."""
        content = [] if self.status == "in_progress" and not self.text else [self.part()]
        return {"type": "reasoning", "id": self.item_id, "status": self.status, "summary": [], "content": content}


@dataclass(slots=True, kw_only=True)
class FunctionCallItem:
    """A call the model made; ``arguments`` grows while it streams."""

    item_id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"

    def fields(self) -> dict[str, Any]:
        """The item as it stands."""
        return {
            "type": "function_call",
            "id": self.item_id,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
            "status": self.status,
        }


Item = MessageItem | ReasoningItem | FunctionCallItem


@dataclass(slots=True, kw_only=True)
class ResponseObject:
    """One response; what the client asked is repeated in it, as the API wants.

    Fields:
        created_s, completed_s: Unix seconds.
        reasoning_tokens: of the output, spent on thoughts.
        is_stored: it can be asked for later.
    """

    response_id: str
    request: ResponsesRequest
    created_s: int
    completed_s: int | None = None
    status: Status = "in_progress"
    items: list[Item] = field(default_factory=list)
    finished: GenerationFinished | None = None
    error: GatewayError | None = None
    reasoning_tokens: int = 0
    is_stored: bool = False

    @property
    def is_running(self) -> bool:
        """Its generation has not ended yet."""
        return self.status in ("queued", "in_progress")

    def cancel(self) -> None:
        """Its generation was stopped before its end; what there is of the output stays."""
        self.status = "cancelled"
        for item in self.items:
            if item.status == "in_progress":
                item.status = "incomplete"

    def finish(self, finished: GenerationFinished, *, now_s: int) -> None:
        """The generation has ended well, or at its limit."""
        self.finished = finished
        self.status = "incomplete" if finished.finish_reason == "length" else "completed"
        self.completed_s = now_s if self.status == "completed" else None

    def fields(self) -> dict[str, Any]:
        """The object as it stands."""
        is_incomplete = self.status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": self.completed_s,
            "status": self.status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "error": None if self.error is None else {"code": self.error.code, "message": self.error.message},
            "model": self.request.shared.model,
            "output": [item.fields() for item in self.items],
            "usage": self._usage(),
            **self._asked(),
        }

    def _usage(self) -> dict[str, Any] | None:
        if self.finished is None:
            return None
        usage = self.finished.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _asked(self) -> dict[str, Any]:
        body, sampling, tool_use = self.request.body, self.request.shared.sampling, self.request.tool_use
        text = body.get("text") or {}
        return {
            "instructions": body.get("instructions"),
            "max_output_tokens": self.request.shared.max_new_tokens,
            "max_tool_calls": None,
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": tool_use is not None and tool_use.is_parallel,
            "previous_response_id": self.request.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": self.is_stored,
            "background": self.request.is_background,
            "temperature": sampling.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": _tools(() if tool_use is None else tool_use.tools),
            "top_logprobs": self.request.shared.num_logprobs or 0,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "truncation": body.get("truncation") or "disabled",
        }


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description or None,
            "parameters": tool.parameters,
            "strict": False,
        }
        for tool in tools
    ]
