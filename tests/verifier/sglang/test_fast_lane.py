"""Both ends of the fast lane over a real socket; SGLang's own classes are stood in for by their fields."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from verifier.sglang.answers import Answer
from verifier.sglang.counters import Counters
from verifier.sglang.fast_lane import FastLane
from verifier.sglang.indexing import Ask, batch_payload, position_lists
from verifier.sglang.plugin.finishing import leave_out_finishing
from verifier.sglang.plugin.lane import SchedulerLane
from verifier.sglang.posting import BatchPoster
from wire.errors import PeerLost, PeerRefused

VOCAB_SIZE = 100
RECEIVER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB_SIZE))


@dataclass(kw_only=True)
class Params:
    """SGLang's SamplingParams, as far as the lane touches it."""

    max_new_tokens: int
    temperature: float
    ignore_eos: bool
    custom_params: dict[str, str] | None = None

    def normalize(self, tokenizer: None) -> None:
        """Nothing to do without one."""

    def verify(self, vocab_size: int) -> None:
        if self.max_new_tokens < 0:
            raise ValueError("max_new_tokens must be at least 0")


@pytest.fixture(autouse=True)
def engine_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lane looks up by name inside the engine."""
    io_struct = ModuleType("sglang.srt.managers.io_struct")
    io_struct.TokenizedGenerateReqInput = SimpleNamespace  # type: ignore[attr-defined]
    io_struct.BatchTokenizedGenerateReqInput = SimpleNamespace  # type: ignore[attr-defined]
    params = ModuleType("sglang.srt.sampling.sampling_params")
    params.SamplingParams = Params  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.sampling"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, io_struct.__name__, io_struct)
    monkeypatch.setitem(sys.modules, params.__name__, params)
    monkeypatch.setattr(sys.modules["sglang.srt.managers"], "io_struct", io_struct, raising=False)
    monkeypatch.setattr(sys.modules["sglang.srt.sampling"], "sampling_params", params, raising=False)
    monkeypatch.setattr(sys.modules["sglang"], "srt", sys.modules["sglang.srt"], raising=False)
    for part in ("managers", "sampling"):
        monkeypatch.setattr(sys.modules["sglang.srt"], part, sys.modules[f"sglang.srt.{part}"], raising=False)


class Request:
    """A scheduler's Req that has computed its one token: every position's likeliest id is the input id + 1."""

    def __init__(self, received: Any) -> None:
        self.rid = received.rid
        self.origin_input_ids = list(received.input_ids)
        self.received = received
        self.output_ids = [self.origin_input_ids[-1] + 1]
        self.cached_tokens = received.logprob_start_len
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length", "length": 1})
        self.finished_output = False
        self.finished_len: int | None = None
        self.return_logprob = received.return_logprob
        self.customized_info = {"breakeven": [1]}
        scored = self.origin_input_ids[received.logprob_start_len :]
        self.logprob = SimpleNamespace(
            input_token_logprobs_val=[None, *(-0.5 for _ in scored[1:])],
            input_token_logprobs_idx=scored,
            input_top_logprobs_val=[None, *([-0.1] for _ in scored[1:])],
            input_top_logprobs_idx=[None, *([i + 1] for i in scored[:-1])],
            output_token_logprobs_val=[-0.2],
            output_token_logprobs_idx=[self.output_ids[0]],
            output_top_logprobs_val=[[-0.2]],
            output_top_logprobs_idx=[[self.output_ids[0]]],
        )

    def finished(self) -> bool:
        return True


@dataclass
class Scheduler:
    """Pulls its inbox and answers what it finds, beside requests of others."""

    lane: SchedulerLane
    is_first_rank: bool = True
    batches: list[Any] = field(default_factory=list)
    left: list[list[str]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            pulled = self.lane.after_pull([] if self.is_first_rank else None, RECEIVER)
            for batch in pulled or ():
                self.batches.append(batch)
                others = [Request(one) for one in batch.batch[:1]]
                others[0].rid = "someone-else"
                self.lane.around_stream_output(self._stream, "streamer", [*others, *map(Request, batch.batch)], True)
            await asyncio.sleep(0.001)

    def _stream(self, streamer: str, reqs: list[Request], return_logprob: bool) -> None:
        self.left.append([request.rid for request in reqs])


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[Scheduler, FastLane]]:
    endpoint = f"ipc://{tmp_path}/lane.sock"
    scheduler, lane = Scheduler(SchedulerLane(endpoint)), FastLane(endpoint)
    tasks = [asyncio.create_task(scheduler.run()), asyncio.create_task(lane.read())]
    try:
        yield scheduler, lane
    finally:
        for task in tasks:
            task.cancel()
        lane.close()
        assert scheduler.lane._socket is not None
        scheduler.lane._socket.close()


def ask(rid: str, ids: list[int], *, base_len: int, cache_key: str = "") -> Ask:
    return Ask(
        rid=rid,
        input_ids=ids,
        base_len=base_len,
        start_len=base_len - 1,
        num_top=1,
        wants_hidden=False,
        cache_key=cache_key,
        is_round=True,
    )


async def test_a_batch_comes_back_as_http_would_bring_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (scheduler, lane):
        asks = [ask("a", [5, 6, 7, 8], base_len=2, cache_key="k"), ask("b", [9, 10], base_len=2)]
        async with asyncio.timeout(5):
            answers = await lane.generate(batch_payload(asks))
        assert [answer.meta_info.id for answer in answers] == ["a", "b"]
        assert [[top[0][0] for top in position_lists(a, answer)] for a, answer in zip(asks, answers, strict=True)] == [
            [7, 8, 9],
            [11],
        ]
        assert [answer.meta_info.cached_tokens for answer in answers] == [1, 1]
        assert all(answer.meta_info.breakeven == [1] and answer.meta_info.e2e_latency > 0 for answer in answers)
        (batch,) = scheduler.batches  # one batch, not one for each
        assert [list(one.input_ids) for one in batch.batch] == [[5, 6, 7, 8], [9, 10]]
        assert [one.extra_key for one in batch.batch] == ["k", None]
        assert batch.batch[0].sampling_params == Params(max_new_tokens=1, temperature=0.0, ignore_eos=True)
        assert scheduler.left == [["someone-else"]]  # the engine's own way stays open to others


async def test_a_refused_call_leaves_the_lane_open(tmp_path: Path) -> None:
    async with running(tmp_path) as (scheduler, lane), asyncio.timeout(5):
        with pytest.raises(PeerRefused, match="between 0 and 99"):
            await lane.generate(batch_payload([ask("bad", [5, VOCAB_SIZE], base_len=2)]))
        (answer,) = await lane.generate(batch_payload([ask("good", [5, 6], base_len=2)]))
        assert answer.output_ids == [7]
        assert len(scheduler.batches) == 1


async def test_garbage_on_the_lane_never_reaches_the_scheduler(tmp_path: Path) -> None:
    async with running(tmp_path) as (scheduler, lane), asyncio.timeout(5):
        other = FastLane(f"ipc://{tmp_path}/lane.sock")
        for data in (b"", b"\xc1", msgspec.msgpack.encode([99, []])):
            await other._socket.send(data)
            await other._socket.recv()  # a refusal, to whom it belongs
        other.close()
        (answer,) = await lane.generate(batch_payload([ask("good", [5, 6], base_len=2)]))
        assert answer.output_ids == [7]
        assert not scheduler.lane._is_broken


async def test_closing_fails_who_waits(tmp_path: Path) -> None:
    lane = FastLane(f"ipc://{tmp_path}/nobody.sock")
    waiting = asyncio.create_task(lane.generate(batch_payload([ask("a", [1, 2], base_len=2)])))
    await asyncio.sleep(0)
    lane.close()
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost):
        await lane.generate(batch_payload([ask("a", [1, 2], base_len=2)]))


def test_other_ranks_have_no_lane(tmp_path: Path) -> None:
    lane = SchedulerLane(f"ipc://{tmp_path}/lane.sock")
    assert lane.after_pull(None, RECEIVER) is None
    assert lane._socket is None


def test_a_lane_that_fails_never_fails_the_scheduler(tmp_path: Path) -> None:
    lane = SchedulerLane(f"ipc://{tmp_path}/{'x' * 200}/too-long.sock")
    assert lane.after_pull(["theirs"], RECEIVER) == ["theirs"]
    assert lane._is_broken
    assert lane.after_pull(["theirs"], RECEIVER) == ["theirs"]
    assert lane._socket is None
    poller = SimpleNamespace(register=lambda socket, events: None)
    assert lane.after_idle_sleeper("result", SimpleNamespace(poller=poller)) == "result"


class Http:
    """Stands where EngineHttp does, and counts."""

    def __init__(self) -> None:
        self.posts: list[list[str]] = []

    async def generate(self, payload: dict[str, Any]) -> list[Answer]:
        self.posts.append(payload["rid"])
        return [msgspec.json.decode(b'{"meta_info":{"id":"%s"}}' % rid.encode(), type=Answer) for rid in payload["rid"]]


async def test_rounds_take_the_lane_prompts_and_refusals_http(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, lane), asyncio.timeout(5):
        http, counters = Http(), Counters()
        poster = BatchPoster(http, counters, overload_retries=0)  # type: ignore[arg-type]
        poster.lane = lane
        await poster.post([ask("round", [5, 6], base_len=2)])
        assert (http.posts, counters["lane_posts"]) == ([], 1)
        await poster.post([dataclasses.replace(ask("prompt", [5, 6], base_len=2), is_round=False)])
        await poster.post([ask("bad", [5, VOCAB_SIZE], base_len=2)])
        assert http.posts == [["prompt"], ["bad"]]
        assert counters["lane_refusals"] == 1


def test_requests_whose_only_token_is_computed_are_left_out() -> None:
    def request(max_new_tokens: int) -> Any:
        return SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens))

    kept: list[list[int]] = []
    batch = SimpleNamespace(
        reqs=[request(1), request(64), request(1)], filter_batch=lambda keep_indices: kept.append(keep_indices)
    )
    leave_out_finishing("scheduler", batch)
    assert kept == [[1]]
    batch.reqs = [request(64)]
    leave_out_finishing("scheduler", batch)
    assert kept == [[1]]
