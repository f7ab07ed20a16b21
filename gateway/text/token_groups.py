"""Regroups the deltas of one answer into events of a fixed number of tokens (``stream_interval``).

Speculation commits several tokens at once; a client that counts events, or should not see block sizes, asks for
groups of one. The first token always goes out by itself, so that the time to it does not grow with the group. A token's
text is taken to be as long as its own bytes decode to; where text is held back (a stop string, a split character), some
of it may move to a neighbouring event, but nothing is lost, doubled or reordered.
"""

from __future__ import annotations

from gateway.ports import GenerationDelta, TextCodec, TokenLogprob

__all__ = ["TokenGroups"]


class TokenGroups:
    """Regroups one answer.

    Args:
        size: tokens in a group; 0 passes every delta on as it is.
    """

    def __init__(self, size: int, codec: TextCodec) -> None:
        self.size = size
        self._codec = codec
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._has_logprobs = False
        self._num_sent = 0

    def push(self, delta: GenerationDelta) -> list[GenerationDelta]:
        """Groups completed by this delta."""
        if not self.size:
            return [delta]
        self._text += delta.text
        self._ids += delta.token_ids
        if delta.logprobs is not None:
            self._has_logprobs = True
            self._logprobs += delta.logprobs
        groups = []
        while len(self._ids) >= self._next_size():
            groups.append(self._take(self._next_size()))
        return groups

    def finish(self) -> list[GenerationDelta]:
        """The rest, which may be smaller than a group or text without a token."""
        return [self._take(len(self._ids))] if self._ids or self._text else []

    def _next_size(self) -> int:
        return self.size if self._num_sent else 1

    def _take(self, num_tokens: int) -> GenerationDelta:
        ids = tuple(self._ids[:num_tokens])
        logprobs = tuple(self._logprobs[:num_tokens]) if self._has_logprobs else None
        del self._ids[:num_tokens], self._logprobs[:num_tokens]
        num_chars = len(self._text)
        if self._ids:  # some text belongs to tokens that stay
            num_chars = min(num_chars, len(self._codec.decode(ids)))
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        self._num_sent += 1
        return GenerationDelta(text=text, token_ids=ids, logprobs=logprobs)
