"""The comparison counts tokens and times alike for every system, and its adapter speaks llama.cpp's format."""

from __future__ import annotations

import os

import aiohttp
import pytest
from aiohttp import web

from benchmarks.rivals.llamacpp_adapter import adapted
from benchmarks.rivals.measure import Answer, Ask, measure_cell
from benchmarks.rivals.openai_client import OpenAICompletions
from benchmarks.rivals.processes import listening_pid, resident_mib
from benchmarks.rivals.report import draw, summarise, table

ASK = Ask(prompt="p", temperature=0.0, seed=0, max_tokens=4)


def _count(text: str) -> int:
    return len(text.split())


async def test_delivered_rate_and_tpot_of_two_streams() -> None:
    answers = iter(
        [
            Answer(pieces=((10.0, "a "), (11.0, "b c"))),
            Answer(pieces=((10.5, "a"),), acceptance_length=2.0),
        ]
    )

    async def speak(_: Ask) -> Answer:
        return next(answers)

    cell = await measure_cell(speak, [ASK, ASK], _count)
    assert cell.num_tokens == 4
    assert cell.tpot_ms == (500.0,)  # one second for two tokens; a single token has none
    assert cell.acceptance_length == 2.0


async def test_a_stream_without_text_is_an_error() -> None:
    async def speak(_: Ask) -> Answer:
        return Answer(pieces=())

    with pytest.raises(RuntimeError, match="no text"):
        await measure_cell(speak, [ASK], _count)


@pytest.mark.slow
async def test_ratios_are_taken_within_a_repeat(tmp_path) -> None:
    async def plain(_: Ask) -> Answer:
        return Answer(pieces=((0.0, "a "), (1.0, "b")))

    cell = await measure_cell(plain, [ASK], _count)
    rows = summarise({("plain", 1, 0.0): [cell, cell], ("fast", 1, 0.0): [cell, cell]}, {"plain": 3.4}, plain="plain")
    assert [row["vs_plain"] for row in rows] == [1.0, 1.0]
    assert [row["mib"] for row in rows] == [3, None]
    assert table(rows).count("\n") == 3
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


async def test_the_adapter_gives_ids_and_logprobs_per_token() -> None:
    seen = []

    async def completions(request: web.Request) -> web.Response:
        seen.append(await request.json())
        choice = {"text": "ab", "token_ids": [5, 6], "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2]}}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        assert listening_pid(port) == os.getpid()
        async with aiohttp.ClientSession() as session, adapted(session, f"http://127.0.0.1:{port}", "m") as url:
            body = {"prompt": "p", "max_tokens": 2, "temperature": 0}
            answer = await (await session.post(f"{url}/v1/completions", json=body)).json()
    finally:
        await runner.cleanup()
    assert answer["choices"][0]["logprobs"]["content"] == [
        {"id": 5, "token": "a", "logprob": -0.1},
        {"id": 6, "token": "b", "logprob": -0.2},
    ]
    assert seen[0]["speculation"] == {"mode": "off"}


async def test_an_error_of_a_server_is_raised() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=400)

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            speak = OpenAICompletions(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "m", {})
            with pytest.raises(RuntimeError, match="400"):
                await speak(ASK)
    finally:
        await runner.cleanup()


def test_memory_of_this_process_is_seen() -> None:
    assert 5 < resident_mib(os.getpid()) < 100_000
