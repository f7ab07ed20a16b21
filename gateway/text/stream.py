"""One answer's text: token ids in, releasable text out, cut at the first stop string.

The loop pushes committed tokens one at a time and stops pushing at a match, so text, ids, logprobs and usage are all
cut at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.ports import TextCodec
from gateway.text.detokenize import IncrementalDetokenizer
from gateway.text.stop_strings import StopStringMatcher

__all__ = ["TextStream"]


class TextStream:
    """Detokenizer and stop matcher of one answer, in that order.

    Args:
        codec: gives the bytes of an id.
        stop_strings: texts that end the answer.
        include_stop_string: release the matched stop too.
        skip_special_tokens, shown_ids: leave special tokens out of the text, but not these.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(codec, skip_special_tokens=skip_special_tokens, shown_ids=shown_ids)
        self._matcher = StopStringMatcher(stop_strings, include_stop=include_stop_string)
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add one committed token. Returns the text that may be sent now and the stop string it completed, or None."""
        assert self.matched_stop is None, "no token follows a stop"
        match = self._matcher.push(self._detokenizer.push(token_id))
        self.matched_stop = match.stop
        return match.text, match.stop

    def finish(self) -> str:
        """The answer ends here: returns all text still held. Nothing is left after a stop string.

        An incomplete character becomes U+FFFD; if that completes a stop string, ``matched_stop`` is set.
        """
        if self.matched_stop is not None:
            return ""
        match = self._matcher.push(self._detokenizer.finish())
        self.matched_stop = match.stop
        return match.text + self._matcher.finish()
