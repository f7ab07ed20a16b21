"""Usage and speculation numbers of one response, summed over its choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.ports import GenerationFinished, RequestSpeculation

__all__ = ["speculation_fields", "usage_fields"]


def usage_fields(
    *, prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """OpenAI's usage object. A prompt counts once, however many choices it has.

    ``reasoning_tokens``: part of ``completion_tokens``; None where thoughts are not told apart.
    """
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return fields


def speculation_fields(finished: Iterable[GenerationFinished]) -> dict[str, Any]:
    """vLLM's per-request ``metrics`` object, plus our own times and the reason of a fallback to plain decode."""
    parts: list[RequestSpeculation] = [entry.speculation for entry in finished]
    num_rounds = sum(part.num_rounds for part in parts)
    num_draft_tokens = sum(part.num_draft_tokens for part in parts)
    num_accepted_tokens = sum(part.num_accepted_tokens for part in parts)
    reasons = [part.fallback_reason for part in parts if part.fallback_reason is not None]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + num_accepted_tokens / num_rounds if num_rounds else None,
            "draft_acceptance_rate": num_accepted_tokens / num_draft_tokens if num_draft_tokens else None,
            "num_spec_steps": num_rounds,
            "num_plain_steps": sum(part.num_plain_rounds for part in parts),
            "num_draft_tokens": num_draft_tokens,
            "num_accepted_draft_tokens": num_accepted_tokens,
            "draft_ms": sum(part.draft_s for part in parts) * 1000,
            "verify_ms": sum(part.verify_s for part in parts) * 1000,
            "fallback_reason": reasons[0] if reasons else None,
        }
    }
