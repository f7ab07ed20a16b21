"""Runs one request: executes the commands of its Session against verifier, drafter and text, and reports what happened.

Decisions live in Session (what is legal) and Controller (how much to draft); this file only carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from gateway.batcher import VerifyBatcher, VerifyOutcome
from gateway.engine_config import SpeculationConfig
from gateway.errors import GatewayError, InvalidRequest, TargetFailed, TargetTimeout, TargetUnavailable
from gateway.ports import (
    DrafterPort,
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    PromptScored,
    RequestSpeculation,
    TextCodec,
    TokenLogprob,
    Usage,
    VerifierPort,
)
from gateway.recorder import Recorder
from gateway.speculation.controller import Controller, Override, RequestView, RoundObserved, RoundPlan
from gateway.speculation.session import (
    Cancelled,
    Command,
    CommitTokens,
    DraftLost,
    DraftReceived,
    Event,
    Fail,
    Finish,
    Opened,
    PlanRound,
    Release,
    RoundPlanned,
    SendDraft,
    SendShadow,
    SendVerify,
    Session,
    SessionLimits,
    ShadowLost,
    ShadowReceived,
    TargetLost,
    TargetsReceived,
    TextCommitted,
)
from gateway.text.stream import TextStream
from wire.errors import PeerError, PeerLate, PeerRefused
from wire.messages import PositionLogprobs

__all__ = ["Output", "RequestRun", "RunParts"]

log = structlog.get_logger("gateway.request")

Output = PromptScored | GenerationDelta | GenerationFinished

# Codes of VerifyFailed that are the request's own fault.
_CLIENT_CODES = {
    "context_limit": "context_length_exceeded",
    "grammar_failed": "invalid_grammar",  # too complex to follow, which shows only on the way
    "invalid_grammar": "invalid_grammar",
    "invalid_token": "invalid_value",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """What all requests share. clock: monotonic seconds. spawn: start a task that the gateway's TaskGroup owns."""

    speculation: SpeculationConfig
    verifier: VerifierPort
    drafter: DrafterPort
    batcher: VerifyBatcher
    controller: Controller
    recorder: Recorder
    codec: TextCodec
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class _Tally:
    """What one request has done so far; for its log line and its usage."""

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    fallback: str | None = None


class RequestRun:
    """The shell of one Session. Holds no decision: every ``if`` here is about carrying a command out."""

    def __init__(
        self, parts: RunParts, request: GenerationRequest, *, context_len: int, arrived_s: float, deadline_s: float
    ) -> None:
        self._parts = parts
        self._request = request
        self._clock = parts.clock
        self._arrived_s = arrived_s
        self._deadline_s = deadline_s
        unverifiable = parts.verifier.can_verify(request.sampling)
        self._session = Session(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            limits=SessionLimits(
                max_new_tokens=request.max_new_tokens,
                context_len=context_len,
                stop_token_ids=request.stop_token_ids,
            ),
            can_draft=request.speculation.mode != "off" and parts.speculation.mode != "off" and not unverifiable,
            num_logprobs=request.num_logprobs,
            score_prompt=request.score_prompt,
        )
        self._text = TextStream(
            parts.codec,
            stop_strings=request.stop_strings,
            include_stop_string=request.include_stop_string,
            skip_special_tokens=request.skip_special_tokens,
            shown_ids=request.shown_ids,
        )
        self._view: RequestView = parts.controller.new_request()
        self._override = Override(mode=request.speculation.mode, num_draft_tokens=request.speculation.num_draft_tokens)
        self._plan = RoundPlan(num_draft_tokens=0, reason="prompt")
        self._tally = _Tally(queue_s=self._clock() - arrived_s, fallback=unverifiable)
        if unverifiable is not None:
            parts.recorder.fallbacks[unverifiable] += 1
        self._committed_s = arrived_s
        self._first_token_s: float | None = None
        self._planned_batch_size = 1
        self._is_decoding = False
        self._is_clean = True
        self._is_draft_lost = False
        self._shadow: asyncio.Task[None] | None = None
        self._end = "client_closed"
        self._early_end: GatewayError | None = None
        self._timeout: asyncio.Timeout | None = None

    async def outputs(self) -> AsyncIterator[Output]:
        """Everything the request produces; raises its typed error."""
        event: Event | None = Opened()
        try:
            while event is not None:
                commands = self._session.handle(event)
                event = None
                for command in commands:
                    if isinstance(command, CommitTokens):
                        delta, event = self._commit(command)
                        if delta is not None:
                            yield delta
                    elif isinstance(command, Finish):
                        for output in self._finished(command):
                            yield output
                    else:
                        event = await self._execute(command) or event
                        if isinstance(event, TargetsReceived) and event.result.prompt_logprobs is not None:
                            yield self._prompt_scored(event.result.prompt_logprobs)
        except GatewayError as error:
            self._end = error.code
            self._parts.recorder.failed[error.code] += 1
            raise

    def end_early(self, error: GatewayError) -> None:
        """Make ``outputs`` raise ``error`` now, or at its next verify, instead of going on."""
        self._early_end = error
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """The request is over, however it ended: release what the other processes hold and write its log line."""
        if self._session.state not in ("finished", "failed", "cancelled"):
            for command in self._session.handle(Cancelled()):
                if isinstance(command, Release):
                    self._release(command)
        self._parts.batcher.forget(self._request.request_id)
        if self._shadow is not None:
            self._shadow.cancel()
        if self._is_decoding:
            self._parts.recorder.num_decoding -= 1
        if self._end == "client_closed":
            self._parts.recorder.num_client_closed += 1
        self._log()

    async def _execute(self, command: Command) -> Event | None:
        match command:
            case SendVerify():
                return await self._verify(command)
            case SendDraft():
                return await self._draft(command)
            case SendShadow():
                self._shadow = self._parts.spawn(self._draft_in_shadow(command))
                # Its message leaves before the next round's: the drafter must get them in the session's order.
                await asyncio.sleep(0)
                return None
            case PlanRound():
                return self._plan_round(command)
            case Fail():
                raise _target_error(command)
            case Release():
                self._release(command)
                return None
        raise AssertionError(f"unexpected command {command}")

    async def _verify(self, command: SendVerify) -> Event:
        batcher = self._parts.batcher
        wait = batcher.verify_prompt(command.item) if command.is_prompt else batcher.verify(command.item)
        begin_s = self._clock()
        try:
            outcome = await self._within_deadline(wait)
        except PeerRefused as error:
            return TargetLost(round_id=command.item.round_id, code=error.code, message=error.message)
        except PeerLate as error:
            return TargetLost(round_id=command.item.round_id, code="timeout", message=str(error))
        except PeerError as error:
            return TargetLost(round_id=command.item.round_id, code="unavailable", message=str(error))
        if command.is_prompt:
            self._tally.prefill_s = self._clock() - begin_s
            self._prompt_done(outcome)
        else:
            self._tally.verify_s += self._clock() - begin_s
        self._is_clean = outcome.is_clean and self._is_clean
        return TargetsReceived(result=outcome.result)

    async def _within_deadline(self, wait: object) -> VerifyOutcome:
        left_s = 0.0 if self._early_end is not None else max(0.0, self._deadline_s - self._clock())
        try:
            async with asyncio.timeout(left_s) as self._timeout:
                return await wait  # type: ignore[misc, no-any-return]
        except TimeoutError:
            late = TargetTimeout("the request did not finish within its time limit", code="deadline_exceeded")
            raise self._early_end or late from None
        finally:
            self._timeout = None

    def _prompt_done(self, outcome: VerifyOutcome) -> None:
        self._tally.cached_tokens = outcome.result.cached_len
        self._parts.recorder.prompt_done(
            prompt_tokens=len(self._request.prompt_ids), cached_tokens=outcome.result.cached_len
        )
        self._parts.recorder.num_decoding += 1
        self._is_decoding = True

    async def _draft(self, command: SendDraft) -> Event:
        begin_s = self._clock()
        self._parts.batcher.expect(command.message.request_id)
        try:
            proposal = await self._parts.drafter.extend(
                command.message, timeout_s=self._parts.speculation.draft_timeout_s
            )
        except PeerError as error:
            reason = "draft_late" if isinstance(error, PeerLate) else getattr(error, "code", "drafter_down")
            self._parts.recorder.fallbacks[reason] += 1
            self._tally.fallback = reason
            self._is_clean = False
            self._is_draft_lost = True
            return DraftLost(round_id=command.message.round_id, reason=reason)
        draft_s = self._clock() - begin_s
        self._tally.draft_s += draft_s
        self._parts.recorder.draft_done(num_draft_tokens=command.message.num_draft_tokens, draft_s=draft_s)
        return DraftReceived(round_id=proposal.round_id, draft_ids=proposal.draft_ids)

    async def _draft_in_shadow(self, command: SendShadow) -> None:
        base_len = command.message.base_len
        try:
            proposal = await self._parts.drafter.extend(
                command.message, timeout_s=self._parts.speculation.draft_timeout_s
            )
        except PeerError:
            self._session.handle(ShadowLost(base_len=base_len))
            return
        except Exception:
            # A request boundary: this task belongs to the gateway's group, where an error would end every request.
            log.exception("shadow draft failed", request_id=self._request.request_id)
            self._session.handle(ShadowLost(base_len=base_len))
            return
        self._session.handle(ShadowReceived(base_len=base_len, draft_ids=proposal.draft_ids))

    def _plan_round(self, command: PlanRound) -> Event:
        parts = self._parts
        self._score_shadow()
        self._planned_batch_size = max(1, parts.recorder.num_decoding)
        self._is_clean = True
        self._is_draft_lost = False
        self._plan = parts.controller.plan_round(
            self._view,
            batch_size=self._planned_batch_size,
            max_draft_tokens=command.max_draft_tokens,
            context_len=len(self._session.ids),
            override=self._override,
            now_s=self._clock(),
        )
        if self._plan.reason == "drafter_down":
            parts.recorder.fallbacks["drafter_down"] += 1
            self._tally.fallback = "drafter_down"
        return RoundPlanned(num_draft_tokens=self._plan.num_draft_tokens, is_shadow=self._plan.is_shadow)

    def _commit(self, command: CommitTokens) -> tuple[GenerationDelta | None, TextCommitted]:
        """Push tokens into the text one by one; the first stop string ends the block at its token."""
        text: list[str] = []
        matched: str | None = None
        kept = 0
        num_text = len(command.token_ids) - (command.stop_token_id is not None)
        for token_id in command.token_ids[:num_text]:
            piece, matched = self._text.push(token_id)
            text.append(piece)
            kept += 1
            if matched is not None:
                break
        else:
            kept = len(command.token_ids)
        self._observe(kept)
        if kept == 0:
            return None, TextCommitted(num_kept_tokens=0)
        logprobs = None
        if command.logprobs is not None:
            logprobs = tuple(_token_logprob(entry) for entry in command.logprobs[:kept])
        delta = GenerationDelta(text="".join(text), token_ids=command.token_ids[:kept], logprobs=logprobs)
        return delta, TextCommitted(num_kept_tokens=kept, matched_stop=matched)

    def _observe(self, num_kept: int) -> None:
        """Tell controller and statistics about the round that has just been committed."""
        parts, outcome = self._parts, self._session.last_outcome
        now_s = self._clock()
        round_s, self._committed_s = now_s - self._committed_s, now_s
        parts.recorder.tokens_kept(num_kept)
        if self._first_token_s is None:
            self._first_token_s = now_s
            parts.recorder.ttft.observe(now_s - self._arrived_s)
        if outcome is None or outcome.is_prompt:
            return
        self._tally.rounds += outcome.num_draft_tokens > 0
        self._tally.plain_rounds += outcome.num_draft_tokens == 0
        self._tally.drafted += outcome.num_draft_tokens
        self._tally.accepted += outcome.num_accepted_tokens
        wanted_drafts = self._plan.num_draft_tokens > 0 and not self._plan.is_shadow
        is_resync = wanted_drafts and outcome.num_draft_tokens == 0 and not self._is_draft_lost
        parts.recorder.round_done(outcome, round_s=round_s, is_clean=self._is_clean)
        parts.controller.observe(
            self._view,
            RoundObserved(
                batch_size=self._planned_batch_size,
                num_draft_tokens=outcome.num_draft_tokens,
                num_accepted_tokens=outcome.num_accepted_tokens,
                num_committed_tokens=outcome.num_committed_tokens,
                round_s=round_s,
                is_cut=outcome.is_cut,
                is_clean=self._is_clean,
                is_resync=is_resync,
                is_draft_lost=self._is_draft_lost,
                now_s=now_s,
            ),
        )

    def _score_shadow(self) -> None:
        score = self._session.take_shadow_outcome()
        if score is None:
            return
        self._parts.recorder.shadow_done(
            num_draft_tokens=score.num_draft_tokens, num_accepted_tokens=score.num_accepted_tokens
        )
        self._parts.controller.observe_shadow(
            self._view,
            batch_size=self._planned_batch_size,
            num_draft_tokens=score.num_draft_tokens,
            num_accepted_tokens=score.num_accepted_tokens,
            now_s=self._clock(),
        )

    def _finished(self, command: Finish) -> list[Output]:
        outputs: list[Output] = []
        rest = self._text.finish()
        matched = self._text.matched_stop or command.matched_stop
        reason = "stop" if self._text.matched_stop is not None else command.reason
        if rest:
            outputs.append(GenerationDelta(text=rest, token_ids=()))
        self._end = reason
        self._parts.recorder.finished[reason] += 1
        if self._session.num_output_tokens > 1 and self._first_token_s is not None:
            span_s = self._clock() - self._first_token_s
            self._parts.recorder.tpot.observe(span_s / (self._session.num_output_tokens - 1))
        outputs.append(
            GenerationFinished(
                finish_reason=reason,
                matched_stop=matched,
                usage=Usage(
                    prompt_tokens=len(self._request.prompt_ids),
                    completion_tokens=self._session.num_output_tokens,
                    cached_tokens=self._tally.cached_tokens,
                ),
                speculation=self._speculation(),
            )
        )
        return outputs

    def _speculation(self) -> RequestSpeculation:
        tally = self._tally
        return RequestSpeculation(
            num_rounds=tally.rounds,
            num_plain_rounds=tally.plain_rounds,
            num_draft_tokens=tally.drafted,
            num_accepted_tokens=tally.accepted,
            draft_s=tally.draft_s,
            verify_s=tally.verify_s,
            queue_s=tally.queue_s,
            prefill_s=tally.prefill_s,
            fallback_reason=tally.fallback,
        )

    def _prompt_scored(self, entries: tuple[PositionLogprobs, ...]) -> PromptScored:
        return PromptScored(logprobs=(None, *(_token_logprob(entry) for entry in entries)))

    def _release(self, command: Release) -> None:
        self._parts.verifier.close_request(self._request.request_id)
        if command.has_drafter_state:
            self._parts.drafter.close(self._request.request_id)

    def _log(self) -> None:
        tally, now_s = self._tally, self._clock()
        log.info(
            "request",
            request_id=self._request.request_id,
            end=self._end,
            prompt_tokens=len(self._request.prompt_ids),
            cached_tokens=tally.cached_tokens,
            completion_tokens=self._session.num_output_tokens,
            rounds=tally.rounds,
            plain_rounds=tally.plain_rounds,
            drafted=tally.drafted,
            accepted=tally.accepted,
            fallback=tally.fallback,
            ttft_ms=round((self._first_token_s - self._arrived_s) * 1e3, 1) if self._first_token_s else None,
            e2e_latency_ms=round((now_s - self._arrived_s) * 1e3, 1),
        )


def _token_logprob(entry: PositionLogprobs) -> TokenLogprob:
    return TokenLogprob(
        token_id=entry.token_id, logprob=entry.logprob, top=tuple((t.token_id, t.logprob) for t in entry.top)
    )


def _target_error(command: Fail) -> GatewayError:
    if command.code in _CLIENT_CODES:
        return InvalidRequest(command.message, code=_CLIENT_CODES[command.code])
    if command.code == "timeout":
        return TargetTimeout("the target did not answer in time")
    if command.code in ("unavailable", "unknown_request", "weights_changed", "aborted"):
        return TargetUnavailable("the target is not available")
    return TargetFailed(f"the target could not compute this request: {command.message}", code=command.code)
