"""Shadow drafting in the session: a plain stream with a drafter that is only scored."""

from __future__ import annotations

from gateway.speculation.session import (
    CommitTokens,
    Opened,
    PlanRound,
    RoundPlanned,
    SendShadow,
    SendVerify,
    Session,
    SessionLimits,
    ShadowLost,
    ShadowOutcome,
    ShadowReceived,
    TargetsReceived,
    TextCommitted,
)
from wire.messages import FeatureSpan, TensorRef, VerifyResult
from wire.sampling import SamplingParams

ANSWER = (50, 51, 52, 53, 54, 55, 56)


class _Plain:
    """Drives a session whose target answers ANSWER, one token a round."""

    def __init__(self) -> None:
        self.session = Session(
            request_id="r",
            prompt_ids=(1, 2, 3),
            sampling=SamplingParams(),
            limits=SessionLimits(max_new_tokens=7, context_len=100),
            can_draft=True,
        )
        self.step(self.session.handle(Opened()))

    def step(self, commands: list[object]) -> list[object]:
        """Answer a SendVerify with the next token and confirm its text; returns the commands after it."""
        [verify] = commands
        assert isinstance(verify, SendVerify)
        item = verify.item
        spans: tuple[FeatureSpan, ...] = ()
        if item.features_from is not None:
            rows = item.base_len - item.features_from
            ref = TensorRef(ring_id=1, slot=0, generation=2, shape=(rows, 6), dtype="float32", nbytes=rows * 24)
            spans = (FeatureSpan(start=item.features_from, ref=ref),)
        token = ANSWER[item.base_len - 3]
        result = VerifyResult(
            request_id="r", round_id=item.round_id, base_len=item.base_len, target_ids=(token,), spans=spans
        )
        [commit] = self.session.handle(TargetsReceived(result=result))
        assert commit == CommitTokens(token_ids=(token,), stop_token_id=None, logprobs=None)
        return list(self.session.handle(TextCommitted(num_kept_tokens=1)))

    def plain(self) -> list[object]:
        return self.step(self.session.handle(RoundPlanned(num_draft_tokens=0)))


def test_a_shadow_is_sent_after_its_round_and_scored_when_the_stream_has_come_as_far() -> None:
    run = _Plain()  # 50 is committed
    shadow, plan = run.step(run.session.handle(RoundPlanned(num_draft_tokens=3, is_shadow=True)))  # 51
    assert isinstance(shadow, SendShadow)
    assert isinstance(plan, PlanRound)
    message = shadow.message
    assert (message.start, message.base_len, message.num_draft_tokens) == (0, 5, 3)
    assert message.token_ids == (1, 2, 3, 50, 51)
    assert [(s.start, s.ref.shape[0]) for s in message.spans] == [(0, 3), (3, 1)]
    run.session.handle(ShadowReceived(base_len=5, draft_ids=(52, 53, 99)))
    for _ in range(2):  # 52, 53
        run.plain()
        assert run.session.take_shadow_outcome() is None
    run.plain()  # 54
    assert run.session.take_shadow_outcome() == ShadowOutcome(num_draft_tokens=3, num_accepted_tokens=2)
    assert run.session.take_shadow_outcome() is None


def test_a_shadow_is_scored_as_soon_as_the_stream_has_left_it() -> None:
    run = _Plain()
    run.step(run.session.handle(RoundPlanned(num_draft_tokens=3, is_shadow=True)))
    run.session.handle(ShadowReceived(base_len=5, draft_ids=(52, 99, 54)))
    assert run.session.take_shadow_outcome() is None
    run.plain()  # 52
    assert run.session.take_shadow_outcome() is None
    run.plain()  # 53
    assert run.session.take_shadow_outcome() == ShadowOutcome(num_draft_tokens=3, num_accepted_tokens=1)


def test_a_shadow_never_changes_what_is_committed() -> None:
    run = _Plain()
    run.step(run.session.handle(RoundPlanned(num_draft_tokens=2, is_shadow=True)))
    run.session.handle(ShadowReceived(base_len=5, draft_ids=(7, 7)))
    for _ in range(5):
        run.plain()
    assert tuple(run.session.ids[3:]) == ANSWER
    assert run.session.state == "finished"


def test_a_lost_shadow_makes_the_next_draft_start_over() -> None:
    run = _Plain()
    run.step(run.session.handle(RoundPlanned(num_draft_tokens=2, is_shadow=True)))
    run.session.handle(ShadowLost(base_len=5))
    [verify] = run.session.handle(RoundPlanned(num_draft_tokens=2))  # a re-sync round
    assert isinstance(verify, SendVerify)
    assert verify.item.features_from == 0


def test_an_empty_proposal_has_no_score() -> None:
    run = _Plain()
    run.step(run.session.handle(RoundPlanned(num_draft_tokens=2, is_shadow=True)))
    run.session.handle(ShadowReceived(base_len=5, draft_ids=()))
    for _ in range(3):
        run.plain()
    assert run.session.take_shadow_outcome() is None
