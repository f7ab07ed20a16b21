"""One request as a state machine: event in, commands out, no effect of its own.

The Session is the only truth about committed tokens. Verifier and drafter are told what is committed and align to it;
what they answer for another round than the current one is dropped and counted.

    new ──Opened──> verifying            the prompt is a round of its own, with no draft
    verifying ──TargetsReceived──> committing
    verifying ──TargetLost──> failed
    committing ──TextCommitted──> planning, or finished when a stop, EOS or limit was reached
    planning ──RoundPlanned(0)──> verifying
    planning ──RoundPlanned(K)──> drafting, or verifying where the drafter must be re-synced first
    drafting ──DraftReceived──> verifying
    drafting ──DraftLost──> verifying    the round goes plain; the drafter is re-synced before the next draft
    any of these ──Cancelled──> cancelled

Shadow: a plain round planned with ``is_shadow`` fetches features too, and when it is committed the drafter is asked for
a proposal beside the plain stream. It is never verified: it is scored against the ids the plain stream brings, which is
a measurement of acceptance at no cost to the target. Its reply is an event of any state.

Re-sync: the drafter needs the target's features of every committed position but the newest. In a plain round they are
not fetched. The first round planned with drafts after a plain stretch (or after the drafter lost its state) therefore
runs plain once more, fetching all missing features in one go, and the round after it drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, assert_never

import msgspec

from gateway.speculation.commands import (
    Command,
    CommitTokens,
    Fail,
    Finish,
    PlanRound,
    Release,
    SendDraft,
    SendShadow,
    SendVerify,
)
from gateway.speculation.events import (
    Cancelled,
    DraftLost,
    DraftReceived,
    Event,
    Opened,
    RoundPlanned,
    ShadowLost,
    ShadowReceived,
    TargetLost,
    TargetsReceived,
    TextCommitted,
)
from verifier.acceptance import num_accepted
from wire.messages import DraftExtend, FeatureSpan, VerifyItem, VerifyResult
from wire.sampling import SamplingParams

__all__ = [
    "TRANSITIONS",
    "Cancelled",
    "Command",
    "CommitTokens",
    "DraftLost",
    "DraftReceived",
    "Event",
    "Fail",
    "Finish",
    "InvalidTransition",
    "Opened",
    "PlanRound",
    "Release",
    "RoundOutcome",
    "RoundPlanned",
    "SendDraft",
    "SendShadow",
    "SendVerify",
    "Session",
    "SessionLimits",
    "ShadowLost",
    "ShadowOutcome",
    "ShadowReceived",
    "State",
    "TargetLost",
    "TargetsReceived",
    "TextCommitted",
]

State = Literal["new", "drafting", "verifying", "committing", "planning", "finished", "failed", "cancelled"]


class InvalidTransition(Exception):
    """An event that the state does not allow: a bug of the caller."""


TRANSITIONS: Final[dict[tuple[State, type], tuple[State, ...]]] = {
    ("new", Opened): ("verifying",),
    ("planning", RoundPlanned): ("verifying", "drafting"),
    ("drafting", DraftReceived): ("verifying",),
    ("drafting", DraftLost): ("verifying",),
    ("verifying", TargetsReceived): ("committing",),
    ("verifying", TargetLost): ("failed",),
    ("committing", TextCommitted): ("planning", "finished"),
    ("new", Cancelled): ("cancelled",),
    ("planning", Cancelled): ("cancelled",),
    ("drafting", Cancelled): ("cancelled",),
    ("verifying", Cancelled): ("cancelled",),
    ("committing", Cancelled): ("cancelled",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What bounds the answer. context_len: prompt + output. stop_token_ids end it, counted but not text."""

    max_new_tokens: int
    context_len: int
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What the last round did. ``is_cut``: ended by a stop or limit, so its rejections say nothing about the draft."""

    round_id: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_committed_tokens: int
    is_prompt: bool
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowOutcome:
    """How a shadow proposal would have done: its length, and how many of its ids the plain stream brought."""

    num_draft_tokens: int
    num_accepted_tokens: int


class Session:
    """State of one request.

    Args:
        request_id, prompt_ids, sampling, limits: as in GenerationRequest.
        can_draft: False routes every round to plain decode (no drafter, or the client asked for it).
        num_logprobs, score_prompt: passed to the verifier.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        limits: SessionLimits,
        can_draft: bool,
        num_logprobs: int | None = None,
        score_prompt: bool = False,
    ) -> None:
        self.state: State = "new"
        self.request_id = request_id
        self.ids: list[int] = list(prompt_ids)
        self.prompt_len = len(prompt_ids)
        self.num_output_tokens = 0
        self.num_stale_replies = 0
        self.last_outcome: RoundOutcome | None = None
        self._sampling = sampling
        self._limits = limits
        self._can_draft = can_draft
        self._num_logprobs = num_logprobs
        self._score_prompt = score_prompt
        self._round_id = 0
        self._verifier_len = 0  # committed ids the verifier has been told
        self._drafter_len = 0  # committed ids the drafter has been told; 0 = it must be told everything
        self._was_drafted = False
        self._features_len = 0  # positions whose features the drafter has or ``_spans`` hold
        self._spans: list[FeatureSpan] = []
        self._draft_ids: tuple[int, ...] = ()
        self._shadow_wanted = 0  # K to draft in the shadow once the running plain round is committed
        self._shadow: ShadowReceived | None = None
        self._pending: tuple[int, ...] = ()  # handed to the text side, not yet confirmed
        self._pending_stop: int | None = None

    def handle(self, event: Event) -> list[Command]:
        """Apply one event.

        Returns:
            What the caller must do, in order. Replies of rounds that are over change nothing and return [].

        Raises:
            InvalidTransition: the event does not belong to the current state.
        """
        if isinstance(event, ShadowReceived | ShadowLost):
            self._on_shadow(event)
            return []
        if self._is_stale(event):
            self.num_stale_replies += 1
            return []
        allowed = TRANSITIONS.get((self.state, type(event)))
        if allowed is None:
            raise InvalidTransition(f"{type(event).__name__} in state {self.state}")
        match event:
            case Opened():
                commands = [self._send_verify(is_prompt=True)]
            case RoundPlanned():
                commands = [self._on_planned(event)]
            case DraftReceived():
                self._draft_ids = event.draft_ids[: self._max_draft_tokens()]
                commands = [self._send_verify(fetch_features=True)]
            case DraftLost():
                self._forget_drafter()
                self._draft_ids = ()
                commands = [self._send_verify()]
            case TargetsReceived():
                commands = [self._on_targets(event.result)]
            case TargetLost():
                self.state = "failed"
                commands = [self._release(), Fail(code=event.code, message=event.message)]  # Fail ends the caller
            case TextCommitted():
                commands = self._on_text(event)
            case Cancelled():
                self.state = "cancelled"
                commands = [self._release()]
            case _:  # pragma: no cover - the type checker proves it
                assert_never(event)
        assert self.state in allowed
        return commands

    @property
    def round_id(self) -> int:
        """Number of the current round; replies must carry it."""
        return self._round_id

    def _is_stale(self, event: Event) -> bool:
        match event:
            case TargetsReceived():
                return self.state != "verifying" or event.result.round_id != self._round_id
            case TargetLost():
                return self.state != "verifying" or event.round_id != self._round_id
            case DraftReceived() | DraftLost():
                return self.state != "drafting" or event.round_id != self._round_id
            case _:
                return False

    def take_shadow_outcome(self) -> ShadowOutcome | None:
        """The score of the last shadow proposal, once the plain stream has left it or come to its end; else None."""
        shadow = self._shadow
        if shadow is None or not shadow.draft_ids:
            return None
        brought = self.ids[shadow.base_len : shadow.base_len + len(shadow.draft_ids)]
        # num_accepted wants the target's choice after the drafts too; any id does, it is never compared.
        accepted = num_accepted(shadow.draft_ids[: len(brought)], [*brought, -1])
        if accepted == len(brought) < len(shadow.draft_ids):
            return None
        self._shadow = None
        return ShadowOutcome(num_draft_tokens=len(shadow.draft_ids), num_accepted_tokens=accepted)

    def _on_planned(self, plan: RoundPlanned) -> Command:
        self._draft_ids = ()
        wanted = min(plan.num_draft_tokens, self._max_draft_tokens())
        if wanted < 1 or not self._can_draft:
            return self._send_verify()
        if plan.is_shadow:
            self._shadow_wanted = wanted
            return self._send_verify(fetch_features=True)
        # The newest committed id has no features yet, every one before it must.
        if self._features_len < len(self.ids) - 1:
            return self._send_verify(fetch_features=True)
        self.state = "drafting"
        self._round_id += 1
        return SendDraft(message=self._extend_drafter(wanted))

    def _extend_drafter(self, num_draft_tokens: int) -> DraftExtend:
        self._was_drafted = True
        start, spans = self._drafter_len, tuple(self._spans)
        self._drafter_len, self._spans = len(self.ids), []
        return DraftExtend(
            request_id=self.request_id,
            round_id=self._round_id,
            base_len=len(self.ids),
            start=start,
            token_ids=tuple(self.ids[start:]),
            spans=spans,
            num_draft_tokens=num_draft_tokens,
            sampling=self._sampling if start == 0 else None,
        )

    def _on_shadow(self, event: ShadowReceived | ShadowLost) -> None:
        if isinstance(event, ShadowReceived):
            self._shadow = event
        else:
            self._forget_drafter()

    def _send_verify(self, *, is_prompt: bool = False, fetch_features: bool = False) -> Command:
        if self.state != "drafting":
            self._round_id += 1
        self.state = "verifying"
        start = self._verifier_len
        self._verifier_len = len(self.ids)
        wants_features = self._can_draft and (is_prompt or fetch_features)
        item = VerifyItem(
            request_id=self.request_id,
            round_id=self._round_id,
            base_len=len(self.ids),
            start=start,
            token_ids=tuple(self.ids[start:]),
            draft_ids=self._draft_ids,
            sampling=self._sampling if is_prompt else None,
            prompt_len=self.prompt_len if is_prompt else None,
            features_from=self._features_len if wants_features else None,
            num_logprobs=self._num_logprobs,
            score_prompt=self._score_prompt and is_prompt,
        )
        return SendVerify(item=item, is_prompt=is_prompt)

    def _on_targets(self, result: VerifyResult) -> Command:
        base_len = len(self.ids)
        accepted = num_accepted(self._draft_ids, result.target_ids)
        self._keep_features(result.spans, base_len + accepted)
        block = list(result.target_ids[: accepted + 1])
        block = block[: self._limits.max_new_tokens - self.num_output_tokens]
        self._pending_stop = None
        for index, token_id in enumerate(block):
            if token_id in self._limits.stop_token_ids:
                block = block[: index + 1]
                self._pending_stop = token_id
                break
        self._pending = tuple(block)
        self.last_outcome = RoundOutcome(
            round_id=self._round_id,
            num_draft_tokens=len(self._draft_ids),
            num_accepted_tokens=min(accepted, len(block)),
            num_committed_tokens=len(block),
            is_prompt=base_len == self.prompt_len,
            is_cut=len(block) <= accepted,
        )
        self.state = "committing"
        logprobs = None if result.logprobs is None else result.logprobs[: len(block)]
        return CommitTokens(token_ids=self._pending, stop_token_id=self._pending_stop, logprobs=logprobs)

    def _keep_features(self, spans: tuple[FeatureSpan, ...], valid_len: int) -> None:
        """Hold the rows of committed positions for the drafter; rows of rejected drafts end here."""
        for span in spans:
            rows = min(span.ref.shape[0], valid_len - span.start)
            # Asked for before the drafter lost its state: what comes before them is missing now.
            is_continued = span.start <= self._features_len
            if rows > 0 and is_continued:
                width = span.ref.nbytes // span.ref.shape[0]
                ref = msgspec.structs.replace(span.ref, shape=(rows, *span.ref.shape[1:]), nbytes=rows * width)
                self._spans.append(FeatureSpan(start=span.start, ref=ref))
                self._features_len = span.start + rows

    def _on_text(self, event: TextCommitted) -> list[Command]:
        kept = self._pending[: event.num_kept_tokens]
        self.ids.extend(kept)
        self.num_output_tokens += len(kept)
        stop_id, self._pending_stop, self._pending = self._pending_stop, None, ()
        if event.matched_stop is not None:
            return self._finish("stop", event.matched_stop)
        if stop_id is not None:
            return self._finish("stop", stop_id)
        if self.num_output_tokens >= self._limits.max_new_tokens or len(self.ids) >= self._limits.context_len:
            return self._finish("length", None)
        self.state = "planning"
        commands: list[Command] = []
        if self._shadow_wanted and self._features_len >= len(self.ids) - 1:
            commands.append(SendShadow(message=self._extend_drafter(self._shadow_wanted)))
        self._shadow_wanted = 0
        return [*commands, PlanRound(max_draft_tokens=self._max_draft_tokens() if self._can_draft else 0)]

    def _finish(self, reason: Literal["stop", "length"], matched: str | int | None) -> list[Command]:
        self.state = "finished"
        return [self._release(), Finish(reason=reason, matched_stop=matched)]

    def _max_draft_tokens(self) -> int:
        # One id is committed beyond the drafts, so drafting up to the very limit would waste the last one.
        left = self._limits.max_new_tokens - self.num_output_tokens
        room = self._limits.context_len - len(self.ids)
        return max(0, min(left, room) - 1)

    def _forget_drafter(self) -> None:
        self._drafter_len = 0
        self._features_len = 0
        self._spans = []

    def _release(self) -> Release:
        return Release(has_drafter_state=self._was_drafted)
