"""The engine: admission, the running limit, deadlines, draining, and what it reports."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.engine_config import EngineConfig
from gateway.errors import Draining, NotReady, QueueFull, TargetTimeout
from gateway.loop import GatewayEngine
from gateway.ports import GenerationDelta, GenerationRequest
from tests.gateway.core_fakes import TOY_INFO, FakePeer, FakeVerifier, Rig, plain_answer
from wire.sampling import SamplingParams

pytestmark = pytest.mark.timeout(30)


def new_engine(rig: Rig, *, verifier_peer: FakePeer | None = None, **config: Any) -> GatewayEngine:
    engine = GatewayEngine(
        EngineConfig(**config),
        rig.parts,
        verifier_peer=verifier_peer or FakePeer(),
        drafter_peer=FakePeer(),
        version="9.9",
    )
    engine.set_target(TOY_INFO)
    return engine


def request(name: str = "r", **changes: Any) -> GenerationRequest:
    fields = {"request_id": name, "prompt_ids": (1, 2), "sampling": SamplingParams(), "max_new_tokens": 5}
    return GenerationRequest(**{**fields, **changes})


async def ids_of(engine: GatewayEngine, asked: GenerationRequest) -> tuple[int, ...]:
    outputs = [output async for output in engine.generate(asked)]
    return tuple(i for output in outputs if isinstance(output, GenerationDelta) for i in output.token_ids)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_generates_and_counts() -> None:
    async with Rig() as rig:
        engine = new_engine(rig)
        assert await ids_of(engine, request()) == plain_answer((1, 2), 5)
        stats = engine.stats()
        assert (stats.version, stats.model) == ("9.9", "smollm2-135m-instruct")
        assert stats.requests.finished == {"length": 1}
        assert (stats.requests.running, stats.requests.waiting) == (0, 0)


async def test_the_context_limit_is_the_targets() -> None:
    async with Rig(mode="off") as rig:
        engine = new_engine(rig)
        asked = request(prompt_ids=(1,) * 60, max_new_tokens=50)
        assert len(await ids_of(engine, asked)) == TOY_INFO.context_len - 60


async def test_admission_is_bounded_and_given_back() -> None:
    async with Rig() as rig:
        engine = new_engine(rig, max_running=2, max_waiting=1)
        engine.admit(2)
        with pytest.raises(QueueFull) as caught:
            engine.admit(2)
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        engine.admit(1)
        with pytest.raises(QueueFull):
            engine.admit(1)
        engine.release(2)
        engine.admit(2)


async def test_a_target_that_loads_takes_nothing_and_says_where_it_stands() -> None:
    async with Rig() as rig:
        peer = FakePeer(is_up=False, phase="loading target")
        engine = new_engine(rig, verifier_peer=peer)
        with pytest.raises(NotReady, match="loading target"):
            engine.admit(1)
        assert not engine.load_phase().is_ready
        assert engine.load_phase().phase == "loading target"
        peer.is_up = True
        engine.admit(1)
        assert engine.load_phase().is_ready


async def test_a_target_whose_tokenizer_is_not_loaded_is_not_ready() -> None:
    async with Rig() as rig:
        engine = GatewayEngine(
            EngineConfig(), rig.parts, verifier_peer=FakePeer(), drafter_peer=FakePeer(), version="0"
        )
        with pytest.raises(NotReady, match="loading tokenizer"):
            engine.admit(1)
        assert not engine.load_phase().is_ready
        engine.set_target(TOY_INFO)
        engine.admit(1)
        assert engine.load_phase().is_ready


async def test_more_than_the_running_limit_wait_their_turn() -> None:
    verifier = FakeVerifier()
    async with Rig(verifier=verifier) as rig:
        verifier.gate = asyncio.Event()
        engine = new_engine(rig, max_running=2)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ids_of(engine, request(f"r{i}", prompt_ids=(i,)))) for i in range(5)]
            await settle()
            stats = engine.stats().requests
            assert (stats.running, stats.waiting) == (2, 3)
            assert len(verifier.batches) == 2
            verifier.gate.set()
        assert [task.result() for task in tasks] == [plain_answer((i,), 5) for i in range(5)]
        assert (engine.stats().requests.running, engine.stats().requests.waiting) == (0, 0)


async def test_waiting_longer_than_the_limit_is_a_timeout() -> None:
    verifier = FakeVerifier()
    async with Rig(verifier=verifier) as rig:
        verifier.gate = asyncio.Event()
        engine = new_engine(rig, max_running=1)
        first = asyncio.create_task(ids_of(engine, request("a")))
        await settle()
        with pytest.raises(TargetTimeout) as caught:
            await ids_of(engine, request("b", deadline_s=0.01))
        assert caught.value.code == "queue_timeout"
        assert engine.stats().requests.failed == {"queue_timeout": 1}
        assert engine.stats().requests.waiting == 0
        verifier.gate.set()
        assert len(await first) == 5
        assert len(await ids_of(engine, request("c"))) == 5


async def test_a_cancelled_waiter_frees_its_place() -> None:
    verifier = FakeVerifier()
    async with Rig(verifier=verifier) as rig:
        verifier.gate = asyncio.Event()
        engine = new_engine(rig, max_running=1)
        first = asyncio.create_task(ids_of(engine, request("a")))
        await settle()
        second = asyncio.create_task(ids_of(engine, request("b")))
        await settle()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert engine.stats().requests.waiting == 0
        verifier.gate.set()
        await first
        assert len(await ids_of(engine, request("c"))) == 5


async def test_a_client_that_leaves_frees_its_slot_and_the_target() -> None:
    async with Rig() as rig:
        engine = new_engine(rig, max_running=1)
        outputs = engine.generate(request("a", max_new_tokens=20))
        await anext(outputs)
        assert engine.stats().requests.running == 1
        await outputs.aclose()
        assert engine.stats().requests.running == 0
        assert engine.stats().requests.client_closed == 1
        assert rig.verifier.closed == ["a"]
        assert len(await ids_of(engine, request("b"))) == 5


async def test_draining_takes_nothing_new_and_waits_for_the_rest() -> None:
    async with Rig() as rig:
        engine = new_engine(rig)
        engine.admit(1)
        draining = asyncio.create_task(engine.drain())
        await settle()
        assert not draining.done()
        with pytest.raises(Draining):
            engine.admit(1)
        phase = engine.load_phase()
        assert (phase.is_ready, phase.is_draining, phase.phase) == (False, True, "draining")
        engine.release(1)
        await draining


async def test_draining_gives_up_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.loop._FAREWELL_S", 0.01)
    async with Rig() as rig:
        engine = new_engine(rig, drain_timeout_s=0.01)
        engine.admit(1)
        await engine.drain()


async def test_what_outlives_the_drain_ends_with_an_error_also_in_the_middle_of_a_pass_and_in_the_queue() -> None:
    async with Rig() as rig:
        engine = new_engine(rig, drain_timeout_s=0.01, max_running=1)
        tasks = []
        rig.verifier.gate = asyncio.Event()
        for name in ("running", "waiting"):
            engine.admit(1)
            tasks.append(asyncio.create_task(ids_of(engine, request(name))))
            tasks[-1].add_done_callback(lambda _: engine.release(1))
        await settle()
        await engine.drain()
        for task in tasks:
            with pytest.raises(Draining, match="before the answer was complete"):
                await task
        assert rig.verifier.closed == ["running"]
        assert (engine.stats().requests.running, engine.stats().requests.waiting) == (0, 0)
        assert engine.stats().requests.failed == {"draining": 2}


async def test_a_stream_between_two_passes_is_ended_at_its_next_one() -> None:
    async with Rig() as rig:
        engine = new_engine(rig, drain_timeout_s=0.01)
        engine.admit(1)
        outputs = engine.generate(request("slow reader", max_new_tokens=20))
        await anext(outputs)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0.05)
        with pytest.raises(Draining):
            [output async for output in outputs]
        engine.release(1)
        await draining


async def test_an_idle_engine_drains_at_once() -> None:
    async with Rig() as rig:
        await new_engine(rig).drain()


async def test_the_model_card_before_and_after_loading() -> None:
    async with Rig() as rig:
        engine = GatewayEngine(
            EngineConfig(model_name="m", model_aliases=("n",)),
            rig.parts,
            verifier_peer=FakePeer(),
            drafter_peer=FakePeer(),
            version="1",
        )
        card = engine.model_card()
        assert (card.name, card.aliases, card.context_len, card.vocab_size) == ("m", ("n",), 0, 0)
        engine.set_target(TOY_INFO)
        assert engine.model_card().context_len == 64
        engine.set_target(None)
        assert engine.model_card().context_len == 64
