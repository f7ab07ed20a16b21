"""Responses that can be asked for later: kept in memory, bounded in number, bytes and time. Pure: time is an argument.

A response belongs to the API key it was made with; for any other it does not exist. What still runs is never forgotten,
so the bounds hold for what has ended: of that the oldest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import NotFound, QueueFull
from gateway.http.event_log import EventLog
from gateway.openai.responses_input import output_messages
from gateway.openai.responses_object import ResponseObject
from gateway.ports import ChatMessage

__all__ = ["ResponseStore", "StoredResponse"]

_BUSY_RETRY_S = 5.0


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """One response and what later requests need of it.

    Fields:
        owner: id of the API key it was made with, "" without keys.
        input_items: as the API lists them.
        before: the conversation before its output, without instructions.
        events: of a stream that can be read again, or None.
        ended_s: when its generation ended; None = it runs.
    """

    response: ResponseObject
    owner: str
    input_items: tuple[dict[str, Any], ...]
    before: tuple[ChatMessage, ...]
    events: EventLog | None = None
    ended_s: float | None = None
    num_bytes: int = 0

    def conversation(self) -> tuple[ChatMessage, ...]:
        """What a response that continues this one begins with."""
        return (*self.before, *output_messages(self.response.items))

    def measure(self) -> int:
        """About how many bytes it takes. The conversation counts in every response it is part of."""
        texts = sum(len(message.content) for message in self.before)
        parts = len(orjson.dumps(self.response.fields())) + len(orjson.dumps(self.input_items))
        return texts + parts + (0 if self.events is None else self.events.num_bytes)


class ResponseStore:
    """Keeps responses by id.

    Args:
        max_responses: 0 = stores nothing.
        max_bytes: of all responses that have ended.
        ttl_s: seconds from the end of a response until it is forgotten.
    """

    def __init__(self, *, max_responses: int, max_bytes: int, ttl_s: float) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Of all that have ended."""
        return self._num_bytes

    def add(self, entry: StoredResponse, now_s: float) -> None:
        """Keep a response that has just begun; ``settle`` or ``remove`` must follow.

        Raises:
            QueueFull: as many as may be stored are running.
        """
        self._forget(now_s, num_new=1)
        if len(self._entries) >= self._max_responses:
            raise QueueFull(
                f"{self._max_responses} responses are running, all that can be stored.",
                retry_after_s=_BUSY_RETRY_S,
                code="store_full",
            )
        self._entries[entry.response.response_id] = entry

    def settle(self, entry: StoredResponse, now_s: float) -> None:
        """Its generation has ended; from now on it may be forgotten. Nothing happens if it was removed."""
        if entry.ended_s is not None or self._entries.get(entry.response.response_id) is not entry:
            return
        entry.ended_s, entry.num_bytes = now_s, entry.measure()
        self._num_bytes += entry.num_bytes
        self._entries.move_to_end(entry.response.response_id)  # in the order of their ends
        self._forget(now_s)

    def get(self, response_id: str, owner: str, now_s: float) -> StoredResponse:
        """One response.

        Raises:
            NotFound: never stored, forgotten, or another key's.
        """
        self._forget(now_s)
        entry = self._entries.get(response_id)
        if entry is None or entry.owner != owner:
            raise NotFound(f"No response with the id {response_id[:100]!r} is stored here.", code="response_not_found")
        return entry

    def remove(self, response_id: str) -> None:
        """Forget one, if it is there."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes

    def _forget(self, now_s: float, *, num_new: int = 0) -> None:
        """Drop what is too old, then the oldest until the rest fits; ends come in order, so old ones stand first."""
        while (oldest := next((e for e in self._entries.values() if e.ended_s is not None), None)) is not None:
            assert oldest.ended_s is not None
            is_old = now_s - oldest.ended_s > self._ttl_s
            if not (is_old or len(self._entries) + num_new > self._max_responses or self._num_bytes > self._max_bytes):
                return
            self.remove(oldest.response.response_id)
