"""What can happen to a request; input of Session.handle. Past participles, records only."""

from __future__ import annotations

from dataclasses import dataclass

from wire.messages import VerifyResult

__all__ = [
    "Cancelled",
    "DraftLost",
    "DraftReceived",
    "Event",
    "Opened",
    "RoundPlanned",
    "ShadowLost",
    "ShadowReceived",
    "TargetLost",
    "TargetsReceived",
    "TextCommitted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Start: send the prompt to the verifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlanned:
    """The controller's answer to PlanRound. num_draft_tokens: K wanted, 0 = plain.

    is_shadow: run the round plain, and draft K tokens beside the plain stream to be scored.
    """

    num_draft_tokens: int
    is_shadow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReceived:
    """The drafter's proposal for ``round_id``; fewer ids than asked for, or none, are fine."""

    round_id: int
    draft_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLost:
    """No proposal for ``round_id``: late, refused, or the drafter is gone. ``reason`` is counted."""

    round_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReceived:
    """The drafter's proposal for SendShadow."""

    base_len: int
    draft_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowLost:
    """No proposal for SendShadow; the drafter must be re-synced before it drafts again."""

    base_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsReceived:
    """The verifier's result."""

    result: VerifyResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLost:
    """The verifier failed this request. ``code`` is its own, or "timeout", "unavailable"."""

    round_id: int
    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCommitted:
    """The text side has taken the tokens of CommitTokens.

    num_kept_tokens: how many of them count; fewer than committed if a stop string ended inside the block.
    matched_stop: that stop string, or None.
    """

    num_kept_tokens: int
    matched_stop: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The client left, or its deadline passed."""


Event = (
    Opened
    | RoundPlanned
    | DraftReceived
    | DraftLost
    | ShadowReceived
    | ShadowLost
    | TargetsReceived
    | TargetLost
    | TextCommitted
    | Cancelled
)
