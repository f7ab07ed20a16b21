"""Whether and how one answer's thoughts become a part of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.config import GatewayConfig
from gateway.openai.requests import SharedFields
from gateway.ports import TextCodec
from gateway.text.reasoning import ReasoningMarkers

__all__ = ["ReasoningUse", "reasoning_use"]

# Line breaks after the marker, which the template may write.
_MAX_IDS_AFTER_MARKER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningUse:
    """How the thoughts of one answer are marked, and shown.

    Fields:
        is_open: the prompt ends inside the block.
        is_shown: the client gets the thoughts; they are counted in any case.
        marker_ids: special tokens that are markers, so that they must be part of the text.
    """

    markers: ReasoningMarkers
    is_open: bool
    is_shown: bool = True
    marker_ids: frozenset[int] = frozenset()


def reasoning_use(
    config: GatewayConfig, shared: SharedFields, prompt_ids: Sequence[int], codec: TextCodec
) -> ReasoningUse | None:
    """How to split the answer to this prompt; None = not at all.

    An answer that must fit a grammar has no thoughts: the grammar holds from its first token on.
    """
    if not config.reasoning_markers or not shared.separates_reasoning or shared.sampling.grammar is not None:
        return None
    start, end = config.reasoning_markers
    marker_ids = {ids[0] for ids in (codec.encode(start), codec.encode(end)) if len(ids) == 1}
    return ReasoningUse(
        markers=ReasoningMarkers(start=start, end=end),
        is_open=_is_open(config.reasoning_opens, start, prompt_ids, codec),
        is_shown=shared.includes_reasoning,
        marker_ids=frozenset(marker_ids) & codec.special_ids,
    )


def _is_open(
    opens: Literal["auto", "always", "never"], start: str, prompt_ids: Sequence[int], codec: TextCodec
) -> bool:
    if opens != "auto":
        return opens == "always"
    tail = prompt_ids[-(len(start.encode("utf-8")) + _MAX_IDS_AFTER_MARKER) :]
    return codec.decode(tail, skip_special_tokens=False).rstrip().endswith(start)
