"""What the client keeps of a request between its rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from verifier.sglang.streams import PlainStream
from wire.messages import VerifyItem
from wire.sampling import SamplingParams

__all__ = ["HeldRequest"]


_FOLLOWS_ITS_OUTPUT = ("grammar", "repetition_penalty", "output_penalty", "min_new_tokens")


@dataclass(slots=True, kw_only=True, eq=False)
class HeldRequest:
    """One request: its committed ids as the gateway told them, and the engine's stream if one runs for it.

    Fields:
        prompt_len: ids from here on are output.
        plain_reason: why its drafts can't be verified, or None.
        weight_version: of the engine when the request began.
        cache_key: a namespace of the engine's prefix cache for this request alone; "" = the common one.
        has_lost_features: its features could not be had once; they are not asked for again.
        streamed_gap_end: features of its stream before this position were lost; a POST must fetch them.
        num_streamed_gaps: how often in a row that happened.
        posted_rids: engine requests that run for it now, beside the stream.
    """

    request_id: str
    sampling: SamplingParams
    prompt_len: int
    plain_reason: str | None
    ids: list[int] = field(default_factory=list)
    stream: PlainStream | None = None
    weight_version: str | None = None
    cache_key: str = ""
    has_lost_features: bool = False
    streamed_gap_end: int = 0
    num_streamed_gaps: int = 0
    posted_rids: set[str] = field(default_factory=set)

    @property
    def follows_its_output(self) -> bool:
        """The engine derives something from the output of one of its own requests: no other can go on with it."""
        return self.plain_reason in _FOLLOWS_ITS_OUTPUT

    def align(self, item: VerifyItem) -> bool:
        """Take the item's committed ids; False if they don't continue what is held."""
        if item.start > len(self.ids):
            return False
        del self.ids[item.start :]
        self.ids.extend(item.token_ids)
        return len(self.ids) == item.base_len

    def streamed(self) -> PlainStream | None:
        """The running stream if it continues the committed ids."""
        stream = self.stream
        return stream if stream is not None and stream.continues(self.ids) else None
