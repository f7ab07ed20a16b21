"""The session as playbooks, then as properties: no draft, loss or delay changes one token of the answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.speculation.session import (
    TRANSITIONS,
    Cancelled,
    CommitTokens,
    DraftLost,
    DraftReceived,
    Event,
    Fail,
    Finish,
    InvalidTransition,
    Opened,
    PlanRound,
    Release,
    RoundOutcome,
    RoundPlanned,
    SendDraft,
    SendShadow,
    SendVerify,
    Session,
    SessionLimits,
    ShadowLost,
    ShadowOutcome,
    ShadowReceived,
    TargetLost,
    TargetsReceived,
    TextCommitted,
)
from tests.gateway.core_fakes import ToyDrafter, ToyTarget, plain_answer, propose, toy_span
from wire.errors import PeerRefused
from wire.messages import DraftExtend, PositionLogprobs, VerifyItem, VerifyResult
from wire.sampling import SamplingParams

SAMPLING = SamplingParams(seed=7)
PROMPT = (10, 11, 12)
EOS = 99


def new_session(**changes: Any) -> Session:
    limits = {"max_new_tokens": 20, "context_len": 100, "stop_token_ids": frozenset({EOS})}
    limits |= {key: changes.pop(key) for key in list(changes) if key in limits}
    options = {"request_id": "r", "prompt_ids": PROMPT, "sampling": SAMPLING, "can_draft": True} | changes
    return Session(limits=SessionLimits(**limits), **options)


def play(session: Session, *script: tuple[Event, list[Any]]) -> None:
    """Every event gives exactly these commands."""
    for event, expected in script:
        assert session.handle(event) == expected, event


def verify(round_id: int, *token_ids: int, start: int = 0, drafts: tuple[int, ...] = (), **changes: Any) -> SendVerify:
    """The verify item of a later round."""
    item = VerifyItem(
        request_id="r",
        round_id=round_id,
        base_len=start + len(token_ids),
        start=start,
        token_ids=token_ids,
        draft_ids=drafts,
        **changes,
    )
    return SendVerify(item=item, is_prompt=False)


def opening(**changes: Any) -> SendVerify:
    fields = {"features_from": 0, "sampling": SAMPLING, "prompt_len": 3} | changes
    item = VerifyItem(request_id="r", round_id=1, base_len=3, start=0, token_ids=PROMPT, **fields)
    return SendVerify(item=item, is_prompt=True)


def targets(round_id: int, *target_ids: int, base_len: int = 0, spans: Any = (), **changes: Any) -> TargetsReceived:
    return TargetsReceived(
        result=VerifyResult(
            request_id="r", round_id=round_id, base_len=base_len, target_ids=target_ids, spans=spans, **changes
        )
    )


def commit(*token_ids: int, stop: int | None = None, logprobs: Any = None) -> CommitTokens:
    return CommitTokens(token_ids=token_ids, stop_token_id=stop, logprobs=logprobs)


def draft(round_id: int, *token_ids: int, start: int = 0, spans: Any, k: int) -> SendDraft:
    return SendDraft(message=extend(round_id, *token_ids, start=start, spans=spans, k=k))


def extend(round_id: int, *token_ids: int, start: int = 0, spans: Any, k: int) -> DraftExtend:
    return DraftExtend(
        request_id="r",
        round_id=round_id,
        base_len=start + len(token_ids),
        start=start,
        token_ids=token_ids,
        spans=spans,
        num_draft_tokens=k,
        sampling=SAMPLING if start == 0 else None,
    )


def kept(count: int, matched: str | None = None) -> TextCommitted:
    return TextCommitted(num_kept_tokens=count, matched_stop=matched)


def planned(k: int, *, shadow: bool = False) -> RoundPlanned:
    return RoundPlanned(num_draft_tokens=k, is_shadow=shadow)


# ---------------------------------------------------------------- playbooks: plain


def test_plain_decoding_until_the_length_limit() -> None:
    session = new_session(max_new_tokens=3, can_draft=False)
    play(
        session,
        (Opened(), [opening(features_from=None)]),
        (targets(1, 20), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=0)]),
        (planned(0), [verify(2, 20, start=3)]),
        (targets(2, 21), [commit(21)]),
        (kept(1), [PlanRound(max_draft_tokens=0)]),
        (planned(0), [verify(3, 21, start=4)]),
        (targets(3, 22), [commit(22)]),
        (kept(1), [Release(has_drafter_state=False), Finish(reason="length", matched_stop=None)]),
    )
    assert session.ids == [*PROMPT, 20, 21, 22]
    assert session.state == "finished"
    assert session.round_id == 3


def test_a_request_that_can_not_draft_ignores_a_plan_to_draft() -> None:
    session = new_session(can_draft=False)
    play(
        session,
        (Opened(), [opening(features_from=None)]),
        (targets(1, 20), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=0)]),
        (planned(5), [verify(2, 20, start=3)]),
    )


def test_the_context_limit_ends_the_answer() -> None:
    session = new_session(context_len=4)
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20), [commit(20)]),
        (kept(1), [Release(has_drafter_state=False), Finish(reason="length", matched_stop=None)]),
    )


def test_scoring_a_prompt_without_an_answer() -> None:
    session = new_session(max_new_tokens=0, score_prompt=True, num_logprobs=2, can_draft=False)
    play(
        session,
        (Opened(), [opening(features_from=None, score_prompt=True, num_logprobs=2)]),
        (targets(1, 20), [commit()]),
        (kept(0), [Release(has_drafter_state=False), Finish(reason="length", matched_stop=None)]),
    )
    assert session.ids == list(PROMPT)


def test_later_rounds_do_not_score_the_prompt_again() -> None:
    session = new_session(score_prompt=True, num_logprobs=1, can_draft=False)
    play(
        session,
        (Opened(), [opening(features_from=None, score_prompt=True, num_logprobs=1)]),
        (targets(1, 20), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=0)]),
        (planned(0), [verify(2, 20, start=3, num_logprobs=1)]),
    )


def test_a_stop_token_is_counted_and_ends_the_answer() -> None:
    session = new_session()
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, EOS), [commit(EOS, stop=EOS)]),
        (kept(1), [Release(has_drafter_state=False), Finish(reason="stop", matched_stop=EOS)]),
    )
    assert session.num_output_tokens == 1


# ---------------------------------------------------------------- playbooks: speculation


def until_drafting(session: Session, k: int = 3) -> None:
    """Prompt, first token, and the drafter asked in round 2."""
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=18)]),
        (planned(k), [draft(2, *PROMPT, 20, spans=toy_span(0, 3), k=k)]),
    )


def test_the_prompts_features_let_the_first_round_draft() -> None:
    session = new_session()
    until_drafting(session)
    play(
        session,
        (
            DraftReceived(round_id=2, draft_ids=(21, 22, 23)),
            [verify(2, 20, start=3, drafts=(21, 22, 23), features_from=3)],
        ),
        (targets(2, 21, 22, 77, 78, spans=toy_span(3, 7)), [commit(21, 22, 77)]),
    )
    assert session.last_outcome == RoundOutcome(
        round_id=2,
        num_draft_tokens=3,
        num_accepted_tokens=2,
        num_committed_tokens=3,
        is_prompt=False,
        is_cut=False,
    )
    # Rows of the rejected draft are not handed on; the verifier is told only what is new.
    (span,) = toy_span(3, 7)
    play(session, (kept(3), [PlanRound(max_draft_tokens=15)]))
    (command,) = session.handle(planned(2))
    assert command.message.start == 4
    assert command.message.token_ids == (21, 22, 77)
    assert command.message.sampling is None
    (sent,) = command.message.spans
    assert (sent.start, sent.ref.shape, sent.ref.nbytes) == (3, (3, 3), 36)
    assert sent.ref.slot == span.ref.slot


def test_all_accepted_brings_the_bonus_token() -> None:
    session = new_session()
    until_drafting(session, k=2)
    session.handle(DraftReceived(round_id=2, draft_ids=(21, 22)))
    play(session, (targets(2, 21, 22, 23, spans=toy_span(3, 6)), [commit(21, 22, 23)]))
    assert session.last_outcome.num_accepted_tokens == 2


def test_none_accepted_brings_the_recovered_token() -> None:
    session = new_session()
    until_drafting(session, k=2)
    session.handle(DraftReceived(round_id=2, draft_ids=(51, 52)))
    play(session, (targets(2, 21, 22, 23, spans=toy_span(3, 6)), [commit(21)]))
    assert session.last_outcome.num_accepted_tokens == 0
    play(session, (kept(1), [PlanRound(max_draft_tokens=17)]))
    # The features of position 3 are enough: position 4 is the newest.
    (command,) = session.handle(planned(1))
    assert isinstance(command, SendDraft)
    assert [(span.start, span.ref.shape[0]) for span in command.message.spans] == [(3, 1)]


def test_an_empty_proposal_is_a_plain_round_that_keeps_the_drafter_in_step() -> None:
    session = new_session()
    until_drafting(session)
    play(
        session,
        (DraftReceived(round_id=2, draft_ids=()), [verify(2, 20, start=3, features_from=3)]),
        (targets(2, 21, spans=toy_span(3, 4)), [commit(21)]),
        (kept(1), [PlanRound(max_draft_tokens=17)]),
        (planned(2), [draft(3, 21, start=4, spans=toy_span(3, 4), k=2)]),
    )


def test_a_span_of_nothing_but_rejected_drafts_is_dropped() -> None:
    session = new_session()
    until_drafting(session, k=2)
    session.handle(DraftReceived(round_id=2, draft_ids=(51, 52)))
    play(
        session,
        (targets(2, 21, 22, 23, spans=(*toy_span(3, 4), *toy_span(4, 6))), [commit(21)]),
        (kept(1), [PlanRound(max_draft_tokens=17)]),
        (planned(1), [draft(3, 21, start=4, spans=toy_span(3, 4), k=1)]),
    )


def test_a_proposal_longer_than_useful_is_cut() -> None:
    session = new_session(max_new_tokens=3)
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=1)]),
        (planned(8), [draft(2, *PROMPT, 20, spans=toy_span(0, 3), k=1)]),
        (
            DraftReceived(round_id=2, draft_ids=(21, 22, 23)),
            [verify(2, 20, start=3, drafts=(21,), features_from=3)],
        ),
    )


@pytest.mark.parametrize(("limits", "useful"), [({"max_new_tokens": 2}, 0), ({"context_len": 6}, 1)])
def test_near_a_limit_drafting_makes_no_sense(limits: dict[str, int], useful: int) -> None:
    session = new_session(**limits)
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=useful)]),
    )
    (command,) = session.handle(planned(8))
    assert isinstance(command, SendDraft if useful else SendVerify)


def test_a_lost_draft_goes_plain_and_re_syncs_before_the_next() -> None:
    session = new_session()
    until_drafting(session)
    play(
        session,
        (DraftLost(round_id=2, reason="draft_late"), [verify(2, 20, start=3)]),
        (targets(2, 21), [commit(21)]),
        (kept(1), [PlanRound(max_draft_tokens=17)]),
        # All features are fetched in a plain round first.
        (planned(3), [verify(3, 21, start=4, features_from=0)]),
        (targets(3, 22, spans=toy_span(0, 5)), [commit(22)]),
        (kept(1), [PlanRound(max_draft_tokens=16)]),
        (planned(3), [draft(4, *PROMPT, 20, 21, 22, spans=toy_span(0, 5), k=3)]),
    )


def test_a_plain_stretch_is_followed_by_a_re_sync_of_what_is_missing() -> None:
    session = new_session()
    until_drafting(session, k=1)
    play(
        session,
        (DraftReceived(round_id=2, draft_ids=(21,)), [verify(2, 20, start=3, drafts=(21,), features_from=3)]),
        (targets(2, 21, 22, spans=toy_span(3, 5)), [commit(21, 22)]),
        (kept(2), [PlanRound(max_draft_tokens=16)]),
        (planned(0), [verify(3, 21, 22, start=4)]),
        (targets(3, 23), [commit(23)]),
        (kept(1), [PlanRound(max_draft_tokens=15)]),
        (planned(2), [verify(4, 23, start=6, features_from=5)]),
        (targets(4, 24, spans=toy_span(5, 7)), [commit(24)]),
        (kept(1), [PlanRound(max_draft_tokens=14)]),
        (planned(2), [draft(5, 21, 22, 23, 24, start=4, spans=(*toy_span(3, 5), *toy_span(5, 7)), k=2)]),
    )


def test_a_stop_token_inside_an_accepted_block_cuts_it() -> None:
    session = new_session(num_logprobs=0)
    session.handle(Opened())
    session.handle(targets(1, 20, spans=toy_span(0, 3)))
    session.handle(kept(1))
    session.handle(planned(3))
    session.handle(DraftReceived(round_id=2, draft_ids=(21, EOS, 23)))
    entries = tuple(PositionLogprobs(token_id=i, logprob=-1.0) for i in (21, EOS, 23, 24))
    play(
        session,
        (
            targets(2, 21, EOS, 23, 24, spans=toy_span(3, 7), logprobs=entries),
            [commit(21, EOS, stop=EOS, logprobs=entries[:2])],
        ),
    )
    assert session.last_outcome.is_cut
    assert session.last_outcome.num_accepted_tokens == 2
    play(session, (kept(2), [Release(has_drafter_state=True), Finish(reason="stop", matched_stop=EOS)]))
    assert session.ids == [*PROMPT, 20, 21, EOS]


def test_a_stop_string_inside_an_accepted_block_drops_the_rest() -> None:
    session = new_session()
    until_drafting(session)
    session.handle(DraftReceived(round_id=2, draft_ids=(21, 22, 23)))
    play(
        session,
        (targets(2, 21, 22, 23, 24, spans=toy_span(3, 7)), [commit(21, 22, 23, 24)]),
        (kept(2, "END"), [Release(has_drafter_state=True), Finish(reason="stop", matched_stop="END")]),
    )
    assert session.ids == [*PROMPT, 20, 21, 22]
    assert session.num_output_tokens == 3


def test_a_stop_string_before_a_stop_token_wins() -> None:
    session = new_session()
    until_drafting(session)
    session.handle(DraftReceived(round_id=2, draft_ids=(21, EOS)))
    play(
        session,
        (targets(2, 21, EOS, 24, spans=toy_span(3, 6)), [commit(21, EOS, stop=EOS)]),
        (kept(1, "x"), [Release(has_drafter_state=True), Finish(reason="stop", matched_stop="x")]),
    )


def test_max_tokens_inside_an_accepted_block_cuts_it() -> None:
    session = new_session(max_new_tokens=3)
    session.handle(Opened())
    session.handle(targets(1, 20, spans=toy_span(0, 3)))
    session.handle(kept(1))
    session.handle(planned(3))
    session.handle(DraftReceived(round_id=2, draft_ids=(21,)))
    play(
        session,
        (targets(2, 21, 22, spans=toy_span(3, 5)), [commit(21, 22)]),
        (kept(2), [Release(has_drafter_state=True), Finish(reason="length", matched_stop=None)]),
    )


# ---------------------------------------------------------------- playbooks: shadow


def test_a_shadow_is_asked_beside_the_plain_stream_and_scored_against_it() -> None:
    session = new_session()
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=18)]),
        (planned(2, shadow=True), [verify(2, 20, start=3, features_from=3)]),
        (targets(2, 21, spans=toy_span(3, 4)), [commit(21)]),
        (
            kept(1),
            [
                SendShadow(message=extend(2, *PROMPT, 20, 21, spans=(*toy_span(0, 3), *toy_span(3, 4)), k=2)),
                PlanRound(max_draft_tokens=17),
            ],
        ),
        (planned(0), [verify(3, 21, start=4)]),
        (ShadowReceived(base_len=5, draft_ids=(22, 50)), []),
    )
    assert session.take_shadow_outcome() is None
    play(
        session,
        (targets(3, 22), [commit(22)]),
        (kept(1), [PlanRound(max_draft_tokens=16)]),
    )
    assert session.take_shadow_outcome() is None
    session.handle(planned(0))
    session.handle(targets(4, 23))
    session.handle(kept(1))
    assert session.take_shadow_outcome() == ShadowOutcome(num_draft_tokens=2, num_accepted_tokens=1)
    assert session.take_shadow_outcome() is None


def test_an_empty_shadow_has_no_score() -> None:
    session = new_session()
    session.handle(Opened())
    session.handle(ShadowReceived(base_len=3, draft_ids=()))
    assert session.take_shadow_outcome() is None


def test_a_shadow_without_all_features_is_not_sent() -> None:
    session = new_session()
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=18)]),
        (planned(2, shadow=True), [verify(2, 20, start=3, features_from=3)]),
        (targets(2, 21), [commit(21)]),  # the verifier sent none
        (kept(1), [PlanRound(max_draft_tokens=17)]),
    )


def test_a_lost_shadow_is_followed_by_a_re_sync() -> None:
    session = new_session()
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=18)]),
        (ShadowLost(base_len=3), []),
        (planned(2), [verify(2, 20, start=3, features_from=0)]),
    )


def test_features_asked_for_before_the_shadow_was_lost_do_not_count() -> None:
    # The running verify fetches from position 3 on; when the drafter loses its state meanwhile, 0..2 are missing too.
    session = new_session()
    play(
        session,
        (Opened(), [opening()]),
        (targets(1, 20, spans=toy_span(0, 3)), [commit(20)]),
        (kept(1), [PlanRound(max_draft_tokens=18)]),
        (planned(2, shadow=True), [verify(2, 20, start=3, features_from=3)]),
        (ShadowLost(base_len=3), []),
        (targets(2, 21, spans=toy_span(3, 4)), [commit(21)]),
        (kept(1), [PlanRound(max_draft_tokens=17)]),
        (planned(2), [verify(3, 21, start=4, features_from=0)]),
    )


# ---------------------------------------------------------------- playbooks: trouble


def test_trouble_in_the_target_fails_the_request_and_releases_first() -> None:
    session = new_session()
    until_drafting(session)
    session.handle(DraftReceived(round_id=2, draft_ids=(21,)))
    play(
        session,
        (
            TargetLost(round_id=2, code="timeout", message="slow"),
            [Release(has_drafter_state=True), Fail(code="timeout", message="slow")],
        ),
    )
    assert session.state == "failed"


def test_stale_replies_change_nothing_and_are_counted() -> None:
    session = new_session()
    until_drafting(session)
    stale = [
        targets(1, 50),
        targets(2, 50),  # of this round, but nothing was sent to the verifier yet
        TargetLost(round_id=1, code="timeout", message=""),
        TargetLost(round_id=2, code="timeout", message=""),
        DraftReceived(round_id=1, draft_ids=(50,)),
        DraftReceived(round_id=3, draft_ids=(50,)),
        DraftLost(round_id=1, reason="late"),
    ]
    play(session, *[(event, []) for event in stale])
    assert session.num_stale_replies == len(stale)
    assert session.state == "drafting"
    session.handle(DraftReceived(round_id=2, draft_ids=(21,)))
    again = [
        DraftReceived(round_id=2, draft_ids=(50,)),
        DraftLost(round_id=2, reason="late"),
        targets(1, 50),
        TargetLost(round_id=1, code="timeout", message=""),
    ]
    play(session, *[(event, []) for event in again])
    session.handle(targets(2, 21, 22, spans=toy_span(3, 5)))
    play(session, (targets(2, 21, 22), []))
    session.handle(kept(2))
    assert session.ids == [*PROMPT, 20, 21, 22]


def test_replies_after_the_end_are_stale() -> None:
    session = new_session(max_new_tokens=1)
    session.handle(Opened())
    session.handle(targets(1, 20))
    session.handle(kept(1))
    play(session, (targets(1, 20), []), (DraftLost(round_id=1, reason="late"), []), (ShadowLost(base_len=3), []))
    assert session.state == "finished"


def at_state(state: str) -> Session:
    """A session in that state."""
    session = new_session(max_new_tokens=2 if state == "finished" else 20)
    steps: dict[str, list[Event]] = {
        "new": [],
        "verifying": [Opened()],
        "committing": [Opened(), targets(1, 20, spans=toy_span(0, 3))],
        "planning": [Opened(), targets(1, 20, spans=toy_span(0, 3)), kept(1)],
        "drafting": [Opened(), targets(1, 20, spans=toy_span(0, 3)), kept(1), planned(1)],
        "finished": [Opened(), targets(1, EOS), kept(1)],
        "failed": [Opened(), TargetLost(round_id=1, code="x", message="y")],
        "cancelled": [Cancelled()],
    }
    for event in steps[state]:
        session.handle(event)
    assert session.state == state
    return session


STATES = ["new", "verifying", "committing", "planning", "drafting", "finished", "failed", "cancelled"]


@pytest.mark.parametrize("state", STATES)
def test_cancelling_releases_wherever_it_is_legal(state: str) -> None:
    session = at_state(state)
    if (state, Cancelled) in TRANSITIONS:
        play(session, (Cancelled(), [Release(has_drafter_state=state == "drafting")]))
        assert session.state == "cancelled"
    else:
        with pytest.raises(InvalidTransition):
            session.handle(Cancelled())


CURRENT: dict[type, Any] = {
    Opened: lambda s: Opened(),
    RoundPlanned: lambda s: planned(1),
    DraftReceived: lambda s: DraftReceived(round_id=s.round_id, draft_ids=(5,)),
    DraftLost: lambda s: DraftLost(round_id=s.round_id, reason="late"),
    TargetsReceived: lambda s: targets(s.round_id, 21),
    TargetLost: lambda s: TargetLost(round_id=s.round_id, code="x", message="y"),
    TextCommitted: lambda s: kept(1),
    Cancelled: lambda s: Cancelled(),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", CURRENT)
def test_the_table_is_what_happens(state: str, event: type) -> None:
    session = at_state(state)
    allowed = TRANSITIONS.get((state, event))
    if allowed is not None:
        session.handle(CURRENT[event](session))
        assert session.state in allowed
        return
    if event in (DraftReceived, DraftLost, TargetsReceived, TargetLost):
        assert session.handle(CURRENT[event](session)) == []
        assert session.num_stale_replies == 1
    else:
        with pytest.raises(InvalidTransition, match=f"{event.__name__} in state {state}"):
            session.handle(CURRENT[event](session))
    assert session.state == state


def test_every_row_of_the_table_names_reachable_states() -> None:
    assert {state for state, _ in TRANSITIONS} == {"new", "planning", "drafting", "verifying", "committing"}
    assert {state for states in TRANSITIONS.values() for state in states} == set(STATES) - {"new"}


def test_target_ids_that_do_not_match_the_drafts_are_a_bug() -> None:
    session = at_state("verifying")
    with pytest.raises(ValueError, match="target ids"):
        session.handle(targets(1, 20, 21))


# ---------------------------------------------------------------- properties


class World:
    """Plays a session against the toy target and drafter; ``rng`` decides every delay, loss and duplicate.

    Shadow replies come at any later moment, also rounds later or after the end, and more than once. ``fail_at``: the
    verify that is lost.
    """

    def __init__(
        self, session: Session, rng: random.Random, *, stop_at: int | None = None, fail_at: int | None = None
    ) -> None:
        self.session = session
        self.rng = rng
        self.target, self.drafter = ToyTarget(), ToyDrafter()
        self.stop_at = stop_at  # the text side finds a stop string at this output token
        self.text: list[int] = []
        self.fresh: list[Event] = []  # the answers to the commands being carried out
        self.old: list[Event] = []  # earlier ones, that come again or too late
        self.shadows: list[Event] = []  # under way
        self.verifies_left = fail_at
        self.num_scored = 0
        self.failed: Fail | None = None
        self.finish: Finish | None = None
        self.num_releases = 0
        self.num_accepted = 0

    def run(self) -> None:
        event: Event | None = Opened()
        steps = 0
        while event is not None:
            steps += 1
            assert steps < 2000
            commands = self.session.handle(event)
            self.old, self.fresh = self.old + self.fresh, []
            while self.old and self.rng.random() < 0.4:
                assert self.session.handle(self.rng.choice(self.old)) == []
            event = self._next(commands)
            while self.shadows and self.rng.random() < 0.3:
                self._shadow_comes()
        while self.shadows:
            self._shadow_comes()

    def _shadow_comes(self) -> None:
        reply = self.shadows.pop(self.rng.randrange(len(self.shadows)))
        assert self.session.handle(reply) == []
        self.old.append(reply)

    def _next(self, commands: list[Any]) -> Event | None:
        event: Event | None = None
        for command in commands:
            match command:
                case SendVerify():
                    event = self._verify(command.item)
                case SendDraft():
                    event = self._draft(command.message)
                case SendShadow():
                    reply = self._draft(command.message)
                    base_len = command.message.base_len
                    if isinstance(reply, DraftReceived):
                        self.shadows.append(ShadowReceived(base_len=base_len, draft_ids=reply.draft_ids))
                    else:
                        self.shadows.append(ShadowLost(base_len=base_len))
                case PlanRound():
                    self._score()
                    event = planned(self.rng.choice([0, 0, 1, 2, 3, 5, 8]), shadow=self.rng.random() < 0.2)
                case CommitTokens():
                    event = self._commit(command)
                case Finish():
                    self.finish = command
                case Release():
                    self.num_releases += 1
                case Fail():
                    self.failed = command
                case _:
                    raise AssertionError(command)
        return event

    def _verify(self, item: VerifyItem) -> Event:
        received = TargetsReceived(result=self.target.verify(item))
        lost = TargetLost(round_id=item.round_id, code="timeout", message="")
        if self.verifies_left is not None:
            self.verifies_left -= 1
        return self._both(lost, received) if self.verifies_left == 0 else self._both(received, lost)

    def _score(self) -> None:
        outcome = self.session.take_shadow_outcome()
        if outcome is not None:
            self.num_scored += 1
            assert 0 <= outcome.num_accepted_tokens <= outcome.num_draft_tokens

    def _draft(self, message: DraftExtend) -> Event:
        lost = DraftLost(round_id=message.round_id, reason="late")
        # Until the session hears of a lost message it can't know that the drafter lacks what was in it.
        self.drafter.is_strict = not any(isinstance(reply, ShadowLost) for reply in self.shadows)
        chance = self.rng.random()
        if chance < 0.1:  # never arrived
            return self._both(lost, DraftReceived(round_id=message.round_id, draft_ids=(65,)))
        if chance < 0.2:
            self.drafter.forget()
            return lost
        try:
            self.drafter.align(message)
        except PeerRefused:
            return lost
        action = self.rng.choice(["right", "wrong", "half", "short", "empty"])
        ids = propose(self.drafter.ids["r"], message.num_draft_tokens, action)
        received = DraftReceived(round_id=message.round_id, draft_ids=ids)
        if chance < 0.3:  # in time for nobody
            return self._both(lost, received)
        return self._both(received, lost)

    def _both(self, event: Event, late: Event) -> Event:
        self.fresh += [event, late]
        return event

    def _commit(self, command: CommitTokens) -> TextCommitted:
        ids = list(command.token_ids)
        self.num_accepted += self.session.last_outcome.num_accepted_tokens
        if self.stop_at is not None and len(self.text) + len(ids) >= self.stop_at:
            count = self.stop_at - len(self.text)
            self.text += ids[:count]
            return kept(count, "stop")
        self.text += ids
        return kept(len(ids))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=8),
    max_new_tokens=st.integers(1, 30),
    room=st.integers(1, 40),
    stop_at=st.none() | st.integers(1, 30),
    can_draft=st.booleans(),
    stop_ids=st.sampled_from([frozenset(), frozenset({ord("a")}), frozenset(range(ord("a"), ord("f")))]),
)
def test_no_token_is_lost_doubled_or_reordered(
    seed: int,
    prompt: list[int],
    max_new_tokens: int,
    room: int,
    stop_at: int | None,
    can_draft: bool,
    stop_ids: frozenset[int],
) -> None:
    session = new_session(
        prompt_ids=tuple(prompt),
        max_new_tokens=max_new_tokens,
        context_len=len(prompt) + room,
        stop_token_ids=stop_ids,
        can_draft=can_draft,
    )
    world = World(session, random.Random(seed), stop_at=stop_at)
    world.run()

    plain = plain_answer(prompt, min(max_new_tokens, room))
    expected, reason = list(plain), "length"
    for index, token_id in enumerate(plain):
        if stop_at == index + 1 or token_id in stop_ids:
            expected, reason = list(plain[: index + 1]), "stop"
            break
    assert world.text == expected
    assert session.ids == prompt + expected
    assert session.num_output_tokens == len(expected)
    assert world.finish is not None
    assert world.finish.reason == reason
    assert world.num_releases == 1


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), max_new_tokens=st.integers(1, 30), fail_at=st.integers(1, 12))
def test_a_lost_target_ends_the_answer_after_a_true_part_of_it(seed: int, max_new_tokens: int, fail_at: int) -> None:
    session = new_session(max_new_tokens=max_new_tokens, stop_token_ids=frozenset())
    world = World(session, random.Random(seed), fail_at=fail_at)
    world.run()

    plain = list(plain_answer(PROMPT, max_new_tokens))
    assert world.text == plain[: len(world.text)]
    assert session.ids == [*PROMPT, *world.text]
    assert world.num_releases == 1
    assert (world.failed is None) == (world.text == plain)
    assert session.state == ("finished" if world.failed is None else "failed")


def test_the_world_above_does_accept_drafts_and_score_shadows() -> None:
    accepted = scored = 0
    for seed in range(20):
        world = World(
            new_session(prompt_ids=(1, 2), max_new_tokens=30, stop_token_ids=frozenset()), random.Random(seed)
        )
        world.run()
        accepted += world.num_accepted
        scored += world.num_scored
    assert accepted > 50
    assert scored > 5
