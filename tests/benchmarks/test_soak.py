"""The soak judges answers rightly: what is a fault of the product, what is beside one, and what passes."""

from __future__ import annotations

import random

import aiohttp
import orjson
import pytest
from aiohttp import web

from benchmarks.soak.clients import Behaviour, Outcome, Record, ask
from benchmarks.soak.faults import Fault, MemorySample
from benchmarks.soak.report import draw, is_passed, report, table
from benchmarks.soak.tasks import Expected, Task, make_tasks

TASK = Task(index=0, body={"messages": []})
RIGHT = Expected(text="one two three", finish_reason="stop", completion_tokens=3)
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
ERROR = {"error": {"message": "gone", "type": "server_error", "code": "engine_unavailable"}}


def _chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


STREAMS: dict[str, tuple[list[object], Outcome]] = {
    "right": ([_chunk("one "), _chunk("two three", "stop"), USAGE, "[DONE]"], Outcome.RIGHT),
    "doubled": ([_chunk("one "), _chunk("one "), _chunk("two three", "stop"), USAGE, "[DONE]"], Outcome.WRONG_TEXT),
    "lost": ([_chunk("one "), _chunk("three", "stop"), USAGE, "[DONE]"], Outcome.WRONG_TEXT),
    "short": ([_chunk("one ", "stop"), USAGE, "[DONE]"], Outcome.WRONG_TEXT),
    "wrong usage": ([_chunk("one two three", "stop"), "[DONE]"], Outcome.WRONG_TEXT),
    "wrong finish": ([_chunk("one two three", "length"), USAGE, "[DONE]"], Outcome.WRONG_TEXT),
    "no end": ([_chunk("one ")], Outcome.NO_END),
    "error": ([_chunk("one "), ERROR, "[DONE]"], Outcome.TYPED_ERROR),
    "flat error": ([_chunk("one "), {"error": "gone"}, "[DONE]"], Outcome.NO_END),
    "error after a wrong token": ([_chunk("two "), ERROR, "[DONE]"], Outcome.WRONG_TEXT),
}


async def _ask(handler, behaviour: Behaviour = Behaviour.STREAM) -> Record:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return await ask(session, url, TASK, RIGHT, behaviour, "auto", random.Random(0))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_is_judged(name: str) -> None:
    events, outcome = STREAMS[name]

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            data = event.encode() if isinstance(event, str) else orjson.dumps(event)
            await response.write(b"data: " + data + b"\n\n")
        await response.write_eof()
        return response

    assert (await _ask(handler)).outcome is outcome


@pytest.mark.parametrize(
    ("status", "body", "behaviour", "outcome"),
    [
        (400, ERROR, Behaviour.MALFORMED, Outcome.REFUSED),
        (200, {"choices": []}, Behaviour.MALFORMED, Outcome.NOT_REFUSED),
        (500, ERROR, Behaviour.MALFORMED, Outcome.NOT_REFUSED),
        (400, {"detail": "flat"}, Behaviour.MALFORMED, Outcome.NO_END),
        (503, ERROR, Behaviour.WHOLE, Outcome.TYPED_ERROR),
        (503, ERROR, Behaviour.STREAM, Outcome.TYPED_ERROR),
    ],
)
async def test_an_answer_without_a_stream_is_judged(
    status: int, body: dict[str, object], behaviour: Behaviour, outcome: Outcome
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    assert (await _ask(handler, behaviour)).outcome is outcome


def _record(outcome: Outcome, begin_s: float) -> Record:
    return Record(
        task=0,
        behaviour=Behaviour.STREAM,
        outcome=outcome,
        begin_s=begin_s,
        end_s=begin_s + 1.0,
        ttft_s=0.1,
        gaps_s=(0.01, 0.03),
        detail="d",
    )


@pytest.mark.slow
def test_an_error_counts_as_a_fault_of_the_product_only_away_from_injected_ones(tmp_path) -> None:
    faults = [Fault(kind="kill", process="verifier", begin_s=100.0, end_s=103.0)]
    memory = [MemorySample(at_s=t, process="gateway", pid=1, rss_bytes=1 << 20) for t in (1.0, 50.0, 200.0)]
    beside = report(0.0, [_record(Outcome.RIGHT, 10.0), _record(Outcome.TYPED_ERROR, 101.0)], faults, memory)
    assert is_passed(beside)
    assert beside["faults"] == {"kill verifier": {"count": 1, "up_again_s_median": 3.0, "up_again_s_max": 3.0}}
    assert beside["times"]["without_fault"]["gap_ms_p99"] == 30.0
    assert beside["memory"]["gateway"]["mib_max"] == 1.0
    assert "1 requests" not in table(beside)
    draw(0.0, [_record(Outcome.RIGHT, 10.0)], faults, memory, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    away = report(0.0, [_record(Outcome.TYPED_ERROR, 200.0)], faults, memory)
    assert not is_passed(away)
    assert not is_passed(report(0.0, [_record(Outcome.WRONG_TEXT, 101.0)], faults, memory))
    assert not is_passed(report(0.0, [], faults, memory))


def test_tasks_differ_and_repeat() -> None:
    tasks = make_tasks(40)
    assert len({orjson.dumps(task.body) for task in tasks}) == 40
    assert make_tasks(40) == tasks
