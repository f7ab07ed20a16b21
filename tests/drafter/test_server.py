"""The process shell in this process: loading, queueing, batching, refusing, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from drafter import server as server_module
from drafter.client import DrafterClient
from drafter.engine import BatchOutcome, DraftEngine, Reply
from drafter.errors import HeadFileError
from drafter.policy import DraftWork
from drafter.server import DrafterServer, LoadedEngine, LoadProgress
from wire.errors import PeerLate, PeerRefused
from wire.link import ClientLink
from wire.messages import DrafterInfo, DraftExtend, DraftProposal, Hello, Refused

pytestmark = pytest.mark.timeout(20)

INFO = DrafterInfo(
    head_dir="d",
    head_format="f",
    target_vocab_size=9,
    draft_vocab_size=4,
    feature_size=8,
    aux_layer_ids=(2, 5, 8),
    max_draft_tokens=3,
)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - polls another thread's or process's state
        await asyncio.sleep(0.005)


class ScriptedEngine:
    """Proposes the round's number; can be held to let messages pile up."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {"batches": 0}
        self.num_requests = 0
        self.batches: list[list[str]] = []
        self.closed: list[str] = []
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_running = threading.Event()

    def run(self, works: Sequence[DraftWork]) -> BatchOutcome:
        self.is_running.set()
        assert self.may_run.wait(10)
        self.batches.append([work.request_id for work in works])
        waiting = [entry for work in works for entry in work.skipped + work.applied]
        replies = tuple(
            Reply(
                peer=entry.peer,
                message=DraftProposal(
                    request_id=entry.message.request_id,
                    round_id=entry.message.round_id,
                    base_len=entry.message.base_len,
                    draft_ids=(entry.message.round_id,),
                ),
            )
            for entry in waiting
        )
        return BatchOutcome(replies=replies, num_rows=len(replies))

    def close(self, request_id: str) -> None:
        self.closed.append(request_id)


def extend(round_id: int, request_id: str = "a") -> DraftExtend:
    return DraftExtend(
        request_id=request_id, round_id=round_id, base_len=2, start=0, token_ids=(1, 2), spans=(), num_draft_tokens=1
    )


class Bench:
    """A server, its scripted engine and a connected client."""

    def __init__(self, endpoint: str, load: Callable[[LoadProgress], LoadedEngine], engine: ScriptedEngine) -> None:
        self.engine = engine
        self.server = DrafterServer(endpoint, load, max_waiting=3, parent_pid=os.getppid())
        self.client = DrafterClient(endpoint)

    async def is_ready(self) -> bool:
        return (await self.client.status(timeout_s=5)).is_ready

    async def is_running(self) -> bool:
        return self.engine.is_running.is_set()

    async def has_waiting(self, count: int) -> bool:
        return (await self.client.status(timeout_s=5)).counters["waiting"] == count

    async def has_phase(self, phase: str) -> bool:
        return (await self.client.status(timeout_s=5)).phase == phase


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        server = group.create_task(bench.server.run())
        receiving = group.create_task(bench.client.run())
        try:
            await bench.client.connect(timeout_s=5)
            yield bench
        finally:
            bench.engine.may_run.set()
            bench.server.stop()
            await server
            receiving.cancel()
    bench.client.peer_lost()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/drafter.sock"


@pytest.fixture
async def bench(endpoint: str) -> AsyncIterator[Bench]:
    engine = ScriptedEngine()
    loaded = LoadedEngine(engine=cast("DraftEngine", engine), info=INFO)
    async with running(Bench(endpoint, lambda _progress: loaded, engine)) as bench:
        await until(bench.is_ready)
        yield bench


async def test_answers_a_round(bench: Bench) -> None:
    assert (await bench.client.extend(extend(4), timeout_s=5)).draft_ids == (4,)
    status = await bench.client.status(timeout_s=5)
    assert (status.phase, status.progress, status.drafter) == ("ready", 1.0, INFO)


async def test_status_and_refusals_while_loading(endpoint: str) -> None:
    engine, may_load = ScriptedEngine(), threading.Event()

    def load(progress: LoadProgress) -> LoadedEngine:
        progress.report("loading head", 0.25)
        assert may_load.wait(10)
        return LoadedEngine(engine=cast("DraftEngine", engine), info=INFO)

    async with running(Bench(endpoint, load, engine)) as bench:
        try:
            await until(lambda: bench.has_phase("loading head"))
            status = await bench.client.status(timeout_s=5)
            assert (status.phase, status.progress, status.is_ready) == ("loading head", 0.25, False)
            with pytest.raises(PeerRefused, match="overloaded: not ready: loading head"):
                await bench.client.extend(extend(1), timeout_s=5)
        finally:
            may_load.set()
        await until(bench.is_ready)


async def test_status_while_a_batch_runs_and_one_batch_for_what_waited(bench: Bench) -> None:
    bench.engine.may_run.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.client.extend(extend(1, "first"), timeout_s=5))
        await until(bench.is_running)
        for name in "bca":
            group.create_task(bench.client.extend(extend(1, name), timeout_s=5))
        await until(lambda: bench.has_waiting(3))
        with pytest.raises(PeerRefused, match="overloaded: 3 messages wait"):
            await bench.client.extend(extend(1, "d"), timeout_s=5)
        bench.engine.may_run.set()
    assert bench.engine.batches == [["first"], ["b", "c", "a"]]


async def test_larger_queues_take_several_batches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_BATCH_REQUESTS", 2)
    bench.engine.may_run.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.client.extend(extend(1, "first"), timeout_s=5))
        await until(bench.is_running)
        for name in "abc":
            group.create_task(bench.client.extend(extend(1, name), timeout_s=5))
        await until(lambda: bench.has_waiting(3))
        bench.engine.may_run.set()
    assert bench.engine.batches == [["first"], ["a", "b"], ["c"]]


async def test_close_reaches_the_engine_and_drops_what_waits(bench: Bench) -> None:
    bench.engine.may_run.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.client.extend(extend(1, "first"), timeout_s=5))
        await until(bench.is_running)
        dropped = group.create_task(_lost(bench.client))
        await until(lambda: bench.has_waiting(1))
        bench.client.close("gone")
        await until(lambda: bench.has_waiting(0))
        bench.engine.may_run.set()
        assert await dropped
    await bench.client.extend(extend(2, "after"), timeout_s=5)
    assert bench.engine.closed == ["gone"]
    assert ["gone"] not in bench.engine.batches


async def _lost(client: DrafterClient) -> bool:
    try:
        await client.extend(extend(1, "gone"), timeout_s=0.3)
    except PeerLate:
        return True
    return False


async def test_bad_messages_and_old_protocols_do_no_harm(bench: Bench, endpoint: str) -> None:
    link = ClientLink(endpoint)
    link._socket.send_multipart([b"\xc1 nonsense"])
    link.send(Hello(protocol_version=999, role="gateway", pid=1))
    assert isinstance(await link.receive(), Refused)
    link.close()
    assert (await bench.client.extend(extend(4), timeout_s=5)).draft_ids == (4,)
    assert (await bench.client.status(timeout_s=5)).counters["bad_messages"] == 1


async def test_a_peer_that_left_is_counted(bench: Bench, endpoint: str) -> None:
    bench.engine.may_run.clear()
    link = ClientLink(endpoint)
    await link.hello(role="gateway", timeout_s=5)
    link.send(extend(1, "left"))
    await until(bench.is_running)
    link.close()
    await asyncio.sleep(0.05)
    bench.engine.may_run.set()
    await bench.client.extend(extend(2, "after"), timeout_s=5)
    assert (await bench.client.status(timeout_s=5)).counters["undelivered"] == 1


async def test_sigterm_ends_it(endpoint: str) -> None:
    engine = ScriptedEngine()
    loaded = LoadedEngine(engine=cast("DraftEngine", engine), info=INFO)
    server = DrafterServer(endpoint, lambda _progress: loaded, max_waiting=3, parent_pid=None)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(server.run())
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
        await task


async def test_a_gone_parent_ends_it(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    loaded = LoadedEngine(engine=cast("DraftEngine", engine), info=INFO)
    parents = iter([1234, 1234])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    monkeypatch.setattr(server_module, "_PARENT_CHECK_S", 0.01)
    server = DrafterServer(endpoint, lambda _progress: loaded, max_waiting=3, parent_pid=1234)
    async with asyncio.timeout(5):
        await server.run()


async def test_a_failing_load_ends_it_with_its_error(endpoint: str) -> None:
    def load(_progress: LoadProgress) -> LoadedEngine:
        raise HeadFileError("there is no head")

    server = DrafterServer(endpoint, load, max_waiting=3, parent_pid=os.getppid())
    with pytest.RaisesGroup(pytest.RaisesExc(HeadFileError, match="no head")):
        await server.run()


def test_messages_stay_encodable() -> None:
    assert msgspec.msgpack.encode(INFO)
