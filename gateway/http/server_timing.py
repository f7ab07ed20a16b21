"""The Server-Timing header: where the time of an answer went, and what speculation did for it.

Only an answer that is not streamed knows all of it before its head is sent; a stream has its time to the first event.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web

from gateway.ports import GenerationFinished

__all__ = ["TIMINGS", "speculation_timings"]

TIMINGS: web.RequestKey[list[str]] = web.RequestKey("timings", list[str])


def speculation_timings(finished: Iterable[GenerationFinished]) -> list[str]:
    """Entries of the header, in ms: queue and prefill time of the slowest choice, verify and draft time of all choices;
    and counts as a description."""
    parts = [entry.speculation for entry in finished]
    queue_ms = max((part.queue_s for part in parts), default=0.0) * 1000
    prefill_ms = max((part.prefill_s for part in parts), default=0.0) * 1000
    verify_ms = sum(part.verify_s for part in parts) * 1000
    draft_ms = sum(part.draft_s for part in parts) * 1000
    num_rounds = sum(part.num_rounds for part in parts)
    num_plain = sum(part.num_plain_rounds for part in parts)
    num_draft = sum(part.num_draft_tokens for part in parts)
    num_accepted = sum(part.num_accepted_tokens for part in parts)
    return [
        f"queue;dur={queue_ms:.1f}",
        f"prefill;dur={prefill_ms:.1f}",
        f"verify;dur={verify_ms:.1f}",
        f"draft;dur={draft_ms:.1f}",
        f'spec;desc="rounds={num_rounds} plain={num_plain} drafted={num_draft} accepted={num_accepted}"',
    ]
