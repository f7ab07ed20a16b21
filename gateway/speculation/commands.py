"""What a Session asks its caller to do; output of Session.handle. Imperatives, records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.messages import DraftExtend, PositionLogprobs, VerifyItem

__all__ = [
    "Command",
    "CommitTokens",
    "Fail",
    "Finish",
    "PlanRound",
    "Release",
    "SendDraft",
    "SendShadow",
    "SendVerify",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendVerify:
    """Hand the item to the batcher. ``is_prompt``: the request's first item."""

    item: VerifyItem
    is_prompt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDraft:
    """Align the drafter and ask it for a proposal."""

    message: DraftExtend


@dataclass(frozen=True, slots=True, kw_only=True)
class SendShadow:
    """Align the drafter and ask for a proposal, without waiting for it: the plain stream goes on."""

    message: DraftExtend


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRound:
    """Ask the controller how many tokens to draft; at most ``max_draft_tokens`` make sense here."""

    max_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTokens:
    """Turn these ids into text.

    stop_token_id: set if the last id is a stop token: it is counted but is not text.
    logprobs: one entry per id, or None if not asked for.
    """

    token_ids: tuple[int, ...]
    stop_token_id: int | None
    logprobs: tuple[PositionLogprobs, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The answer is complete."""

    reason: Literal["stop", "length"]
    matched_stop: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The answer can't be completed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Tell the verifier, and the drafter if it knows the request, to forget it."""

    has_drafter_state: bool


Command = SendVerify | SendDraft | SendShadow | PlanRound | CommitTokens | Finish | Fail | Release
