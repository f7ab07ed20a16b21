"""Splits an answer into what the model thought and what it says, as it streams.

A thinking model writes its thoughts first, between two markers (``<think>…</think>``, ``◁think▷…◁/think▷``); the chat
template may have written the first one already. Only a block at the very beginning is thought: a marker further on
is text like any other. No part of a marker ever reaches a client, wherever the text was cut; white space around both
parts is layout and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gateway.ports import TextCodec
from gateway.text.held_text import held_len

__all__ = ["ReasoningMarkers", "ReasoningPiece", "ReasoningSplitter", "ReasoningTokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """The texts that begin and end a model's thoughts; neither is empty."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPiece:
    """What one push released."""

    reasoning: str = ""
    content: str = ""


class ReasoningSplitter:
    """Splits one answer; push its text in order, then ``finish``.

    Args:
        is_open: the prompt ends inside the block, so the answer begins there (with or without the marker again).
    """

    def __init__(self, markers: ReasoningMarkers, *, is_open: bool) -> None:
        self._markers = markers
        self._is_open = is_open
        self._state: Literal["undecided", "thinking", "answering"] = "undecided"
        self._held = ""
        self._is_at_edge = True  # nothing of the current part was released yet: white space is layout
        self.has_thought = is_open

    @property
    def is_answering(self) -> bool:
        """What follows is content."""
        return self._state == "answering"

    def push(self, text: str) -> ReasoningPiece:
        """Feed text; get what may be sent."""
        if self._state == "answering":
            return ReasoningPiece(content=self._without_edge(text))
        self._held += text
        if self._state == "undecided" and not self._decide():
            return ReasoningPiece()
        if self._state == "thinking":
            return self._think()
        held, self._held = self._held, ""
        return ReasoningPiece(content=held)

    def finish(self) -> ReasoningPiece:
        """The answer ends here: all that is held was no marker after all."""
        held, self._held = self._held, ""
        if self._state == "thinking" or (self._is_open and self._state == "undecided"):
            return ReasoningPiece(reasoning=self._without_edge(held).rstrip())
        return ReasoningPiece(content=held)

    def _decide(self) -> bool:
        """Leave "undecided" if the text so far says what it is."""
        text = self._held.lstrip()
        start = self._markers.start
        if text.startswith(start):
            self._state, self._held = "thinking", text[len(start) :]
            self.has_thought = True
        elif start.startswith(text):
            return False
        elif self._is_open:
            self._state = "thinking"
        else:
            self._state, self._is_at_edge = "answering", False
        return True

    def _think(self) -> ReasoningPiece:
        end = self._markers.end
        place = self._held.find(end)
        if place >= 0:
            thought, rest = self._held[:place], self._held[place + len(end) :]
            thought = self._without_edge(thought).rstrip()
            self._state, self._held, self._is_at_edge = "answering", "", True
            return ReasoningPiece(reasoning=thought, content=self._without_edge(rest))
        # White space may be the last before the marker, so it waits too.
        free = self._held[: len(self._held) - held_len(self._held, end)].rstrip()
        self._held = self._held[len(free) :]
        return ReasoningPiece(reasoning=self._without_edge(free))

    def _without_edge(self, text: str) -> str:
        if self._is_at_edge:
            text = text.lstrip()
            self._is_at_edge = not text
        return text


class ReasoningTokens:
    """Counts the tokens of an answer up to the end of its thoughts, markers included.

    By bytes, not by released text: text may be held back, and a round may end the thoughts in the middle of its block.

    Args:
        skipped_ids: ids that are not part of the text.
    """

    def __init__(
        self, markers: ReasoningMarkers, codec: TextCodec, *, is_open: bool, skipped_ids: frozenset[int]
    ) -> None:
        as_bytes = ReasoningMarkers(start=_bytes_as_text(markers.start), end=_bytes_as_text(markers.end))
        self._splitter = ReasoningSplitter(as_bytes, is_open=is_open)
        self._codec = codec
        self._skipped_ids = skipped_ids
        self._num_seen = 0
        self.num_tokens = 0

    def push(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
        for token_id in token_ids:
            if self._splitter.is_answering:
                return
            self._num_seen += 1
            if token_id not in self._skipped_ids:
                self._splitter.push(self._codec.token_bytes(token_id).decode("latin-1"))
            if self._splitter.has_thought:
                self.num_tokens = self._num_seen


def _bytes_as_text(text: str) -> str:
    return text.encode("utf-8").decode("latin-1")
