"""One request through session, batcher, drafter and text: the same answer whatever the drafter does, nothing leaked."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidRequest, TargetFailed, TargetTimeout, TargetUnavailable
from gateway.ports import (
    GenerationDelta,
    GenerationFinished,
    GenerationRequest,
    PromptScored,
    SpeculationOverride,
)
from gateway.request_run import RequestRun
from gateway.speculation.controller import RoundPlan
from tests.gateway.core_fakes import FakeVerifier, Rig, ScriptedDrafter, failed, plain_answer
from wire.errors import PeerLate, PeerLost
from wire.sampling import SamplingParams

pytestmark = pytest.mark.timeout(30)
PROMPT = (5, 6, 7)
ANSWER = plain_answer(PROMPT, 24)
TEXT = bytes(ANSWER).decode()


def request(**changes: Any) -> GenerationRequest:
    fields = {"request_id": "r", "prompt_ids": PROMPT, "sampling": SamplingParams(), "max_new_tokens": 24}
    return GenerationRequest(**{**fields, **changes})


def new_run(rig: Rig, asked: GenerationRequest, *, deadline_s: float = 1e6, context_len: int = 64) -> RequestRun:
    return RequestRun(
        rig.parts, asked, context_len=context_len, arrived_s=rig.clock(), deadline_s=rig.clock() + deadline_s
    )


async def collect(rig: Rig, asked: GenerationRequest, **options: Any) -> list[Any]:
    run = new_run(rig, asked, **options)
    try:
        return [output async for output in run.outputs()]
    finally:
        run.close()


def text_of(outputs: list[Any]) -> str:
    return "".join(o.text for o in outputs if isinstance(o, GenerationDelta))


def ids_of(outputs: list[Any]) -> tuple[int, ...]:
    return tuple(i for o in outputs if isinstance(o, GenerationDelta) for i in o.token_ids)


def last(outputs: list[Any]) -> GenerationFinished:
    assert isinstance(outputs[-1], GenerationFinished)
    assert sum(isinstance(o, GenerationFinished) for o in outputs) == 1
    return outputs[-1]


ACTIONS = ["right", "wrong", "half", "short", "empty", "late", "dead", "refused", "stale_features"]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("k", [1, 3, 8])
async def test_whatever_the_drafter_does_the_answer_is_the_plain_one(action: str, k: int) -> None:
    async with Rig(num_draft_tokens=k, drafter=ScriptedDrafter(action)) as rig:
        outputs = await collect(rig, request())
        assert text_of(outputs) == TEXT
        assert ids_of(outputs) == ANSWER
        end = last(outputs)
        assert (end.finish_reason, end.matched_stop) == ("length", None)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (3, 24)
        assert rig.verifier.closed == ["r"]
        assert rig.drafter.closed == ["r"]
        assert (rig.recorder.num_decoding, rig.recorder.finished) == (0, {"length": 1})


async def test_right_drafts_save_rounds_and_are_counted() -> None:
    async with Rig(num_draft_tokens=3) as rig:
        end = last(await collect(rig, request(max_new_tokens=21)))
        assert end.speculation.num_rounds == 5
        assert end.speculation.num_accepted_tokens == 15
        assert end.speculation.fallback_reason is None
        stats = rig.recorder
        assert (stats._rounds, stats._accepted, stats._committed) == (5, 15, 20)


@pytest.mark.parametrize(
    ("action", "reason"),
    [("late", "draft_late"), ("dead", "drafter_down"), ("refused", "overloaded"), ("stale_features", "stale_features")],
)
async def test_a_fallback_is_counted_with_its_reason(action: str, reason: str) -> None:
    async with Rig(drafter=ScriptedDrafter(action, "right")) as rig:
        outputs = await collect(rig, request())
        assert text_of(outputs) == TEXT
        assert rig.recorder.fallbacks == {reason: 1}
        assert last(outputs).speculation.fallback_reason == reason
        assert last(outputs).speculation.num_accepted_tokens > 0  # it came back


async def test_a_drafter_that_is_down_is_not_asked() -> None:
    async with Rig() as rig:
        rig.controller.set_drafter(is_up=False, reason="gone")
        outputs = await collect(rig, request())
        assert text_of(outputs) == TEXT
        assert rig.drafter.messages == []
        assert rig.drafter.closed == []
        assert rig.recorder.fallbacks["drafter_down"] > 0


@pytest.mark.parametrize("where", ["config", "request"])
async def test_speculation_off_never_asks_the_drafter_nor_for_features(where: str) -> None:
    async with Rig(mode="off" if where == "config" else "on") as rig:
        speculation = SpeculationOverride(mode="off" if where == "request" else "auto")
        outputs = await collect(rig, request(speculation=speculation))
        assert text_of(outputs) == TEXT
        assert rig.drafter.messages == []
        assert all(item.features_from is None for batch in rig.verifier.batches for item in batch)


async def test_a_request_may_choose_its_draft_length() -> None:
    async with Rig(num_draft_tokens=1) as rig:
        await collect(rig, request(speculation=SpeculationOverride(mode="on", num_draft_tokens=5)))
        assert {message.num_draft_tokens for message in rig.drafter.messages[:2]} == {5}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    stop_at=st.none() | st.integers(0, 22),
    stop_len=st.integers(1, 3),
    max_new_tokens=st.integers(1, 24),
    stop_id=st.none() | st.sampled_from(ANSWER),
)
def test_stops_cut_text_ids_and_usage_at_the_same_token(
    seed: int, stop_at: int | None, stop_len: int, max_new_tokens: int, stop_id: int | None
) -> None:
    stop = None if stop_at is None else TEXT[stop_at : stop_at + stop_len]
    asked = request(
        max_new_tokens=max_new_tokens,
        stop_strings=() if stop is None else (stop,),
        stop_token_ids=frozenset() if stop_id is None else frozenset({stop_id}),
        num_logprobs=0,
    )

    async def answer(mode: str) -> list[Any]:
        rng = random.Random(seed)
        script = [rng.choice(ACTIONS) for _ in range(30)]
        async with Rig(mode=mode, num_draft_tokens=rng.choice([1, 3, 8]), drafter=ScriptedDrafter(*script)) as rig:
            return await collect(rig, asked)

    plain, drafted = asyncio.run(answer("off")), asyncio.run(answer("on"))
    assert text_of(drafted) == text_of(plain)
    assert ids_of(drafted) == ids_of(plain)
    assert last(drafted).usage == last(plain).usage
    assert (last(drafted).finish_reason, last(drafted).matched_stop) == (
        last(plain).finish_reason,
        last(plain).matched_stop,
    )
    for outputs in (plain, drafted):
        assert last(outputs).usage.completion_tokens == len(ids_of(outputs))
        logprobs = [entry for o in outputs if isinstance(o, GenerationDelta) for entry in o.logprobs or ()]
        assert [entry.token_id for entry in logprobs] == list(ids_of(outputs))
        assert stop is None or stop not in text_of(outputs)


async def test_prompt_scores_come_first() -> None:
    async with Rig(mode="off") as rig:
        outputs = await collect(rig, request(max_new_tokens=0, score_prompt=True, num_logprobs=2))
        scored = outputs[0]
        assert isinstance(scored, PromptScored)
        assert scored.logprobs[0] is None
        assert [entry.token_id for entry in scored.logprobs[1:]] == list(PROMPT[1:])
        assert len(scored.logprobs[1].top) == 2
        assert last(outputs).usage.completion_tokens == 0
        assert text_of(outputs) == ""


# ---------------------------------------------------------------- trouble in the target


@pytest.mark.parametrize("at_round", [1, 2, 4])
@pytest.mark.parametrize(
    ("trouble", "error", "code"),
    [
        (PeerLate("slow"), TargetTimeout, "upstream_timeout"),
        (PeerLost("gone"), TargetUnavailable, "upstream_unavailable"),
        ("context_limit", InvalidRequest, "context_length_exceeded"),
        ("invalid_token", InvalidRequest, "invalid_value"),
        ("unknown_request", TargetUnavailable, "upstream_unavailable"),
        ("internal", TargetFailed, "internal"),
        ("too_many_requests", TargetFailed, "too_many_requests"),
    ],
    ids=str,
)
async def test_trouble_in_the_target_is_a_typed_error_and_everything_is_released(
    trouble: Any, error: type[Exception], code: str, at_round: int
) -> None:
    verifier = FakeVerifier()

    def fail(item: Any) -> Any:
        if len(verifier.batches) < at_round:
            return None
        return failed(item, trouble) if isinstance(trouble, str) else trouble

    verifier.fail = fail
    async with Rig(verifier=verifier) as rig:
        with pytest.raises(error) as caught:
            await collect(rig, request())
        assert caught.value.code == code
        # The verifier may still hold the request, e.g. when it was only too slow: it must be told.
        assert rig.verifier.closed == ["r"]
        assert rig.drafter.closed == (["r"] if at_round > 1 else [])
        assert rig.recorder.failed == {code: 1}
        assert rig.recorder.num_decoding == 0
        assert rig.recorder.num_client_closed == 0


async def test_the_deadline_ends_a_waiting_request() -> None:
    verifier = FakeVerifier()
    verifier.gate = asyncio.Event()
    async with Rig(verifier=verifier) as rig:
        with pytest.raises(TargetTimeout) as caught:
            await collect(rig, request(), deadline_s=0.0)
        assert caught.value.code == "deadline_exceeded"
        assert rig.verifier.closed == ["r"]
        verifier.gate.set()


# ---------------------------------------------------------------- the client leaves


@pytest.mark.parametrize("after", [0, 1, 3, 6])
async def test_a_client_that_leaves_releases_everything(after: int) -> None:
    async with Rig() as rig:
        run = new_run(rig, request())
        outputs = run.outputs()
        for _ in range(after):
            await anext(outputs)
        await outputs.aclose()
        run.close()
        assert rig.verifier.closed == ["r"]
        assert rig.recorder.num_decoding == 0
        assert rig.recorder.num_client_closed == 1


async def test_a_reader_that_stops_at_any_output_leaks_nothing() -> None:
    total = 0
    async with Rig() as rig:
        total = len(await collect(rig, request(max_new_tokens=6, stop_strings=(TEXT[4:6] + "!",))))
    for stop_after in range(1, total + 1):
        async with Rig() as rig:
            run = new_run(rig, request(max_new_tokens=6, stop_strings=(TEXT[4:6] + "!",)))
            outputs = run.outputs()
            for _ in range(stop_after):
                await anext(outputs)
            await outputs.aclose()
            run.close()
            assert rig.verifier.closed == ["r"], stop_after
            assert rig.drafter.closed in ([], ["r"])
            assert bool(rig.drafter.messages) == bool(rig.drafter.closed)


async def test_cancelling_the_task_releases_everything() -> None:
    verifier = FakeVerifier()
    async with Rig(verifier=verifier) as rig:
        verifier.gate = asyncio.Event()
        task = asyncio.create_task(collect(rig, request()))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert verifier.closed == ["r"]
        verifier.gate.set()


async def test_many_requests_share_batches_and_each_gets_its_own_answer() -> None:
    async with Rig(drafter=ScriptedDrafter("half")) as rig:
        prompts = [(i, i + 1) for i in range(8)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(collect(rig, request(request_id=f"r{i}", prompt_ids=prompt)))
                for i, prompt in enumerate(prompts)
            ]
        for prompt, task in zip(prompts, tasks, strict=True):
            assert ids_of(task.result()) == plain_answer(prompt, 24)
        assert max(len(batch) for batch in rig.verifier.batches) == 8
        assert sorted(rig.verifier.closed) == [f"r{i}" for i in range(8)]


async def test_what_the_target_cannot_verify_runs_plain_and_is_counted() -> None:
    async with Rig() as rig:
        rig.verifier.unverifiable = "temperature_above_1"
        outputs = await collect(rig, request())
        assert text_of(outputs) == TEXT
        assert rig.recorder.fallbacks == {"temperature_above_1": 1}
        assert last(outputs).speculation.fallback_reason == "temperature_above_1"
        assert rig.drafter.messages == []


class _ShadowThenDraft:
    """A controller that plans a shadow, then drafts at once: the two messages leave back to back."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._plans = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan_round(self, request: Any, **facts: Any) -> RoundPlan:
        self._inner.plan_round(request, **facts)
        self._plans += 1
        return RoundPlan(num_draft_tokens=3, reason="scripted", is_shadow=self._plans % 2 == 1)


async def test_a_draft_right_after_a_shadow_reaches_the_drafter_second() -> None:
    async with Rig(drafter=ScriptedDrafter("wrong")) as rig:
        rig.parts = replace(rig.parts, controller=_ShadowThenDraft(rig.controller))
        outputs = await collect(rig, request())
        assert ids_of(outputs) == ANSWER
        lengths = [message.base_len for message in rig.drafter.messages]
        assert lengths == sorted(lengths)
        assert rig.recorder.fallbacks == {}
        assert len(lengths) > 10
