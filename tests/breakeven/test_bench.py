"""The load generator against a scripted server: what it sends, counts, and makes of failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from rich.console import Console
from typer.testing import CliRunner

from breakeven.bench import BenchPlan, read_prompts, run_plan
from breakeven.bench_load import LoadClient, Workload
from breakeven.cli import app

QUIET = Console(quiet=True)
PLAN = BenchPlan(
    model="m",
    prompts=("a", "b", "c"),
    concurrencies=(1, 3),
    modes=("",),
    num_requests=5,
    num_warm_up=1,
    repeats=2,
    max_tokens=7,
    temperature=0.5,
    ignores_eos=True,
)


class Script:
    """A server whose streams are ``answer``: each chunk's content, or bytes sent as they are."""

    def __init__(self, answer: list[str | bytes], *, is_ours: bool = True, usage: int | None = 7) -> None:
        self.answer, self.is_ours, self.usage = answer, is_ours, usage
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.running = self.most_running = 0
        self.rounds = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.rounds += 4
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for piece in self.answer:
            await asyncio.sleep(0.001)
            chunk = {"choices": [{"delta": {"content": piece}}]} if isinstance(piece, str) else None
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n" if chunk else piece)  # type: ignore[arg-type]
        if self.usage is not None:
            chunk = {"choices": [], "usage": {"completion_tokens": self.usage}}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.running -= 1
        return response

    async def stats(self, request: web.Request) -> web.Response:
        counts = {
            "num_rounds": self.rounds,
            "num_draft_tokens": 3 * self.rounds,
            "num_accepted_tokens": 2 * self.rounds,
        }
        return web.json_response({"speculation": counts} if self.is_ours else {"other": 1})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})


@asynccontextmanager
async def client_of(script: Script, *, timeout_s: float = 5.0) -> AsyncIterator[LoadClient]:
    application = web.Application()
    application.add_routes(
        [
            web.post("/v1/chat/completions", script.chat),
            web.get("/stats", script.stats),
            web.get("/v1/models", script.models),
        ]
    )
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with ClientSession() as session:
            yield LoadClient(session, f"http://127.0.0.1:{runner.addresses[0][1]}/v1", timeout_s=timeout_s)
    finally:
        await runner.cleanup()


DONE = b"data: [DONE]\n\n"


async def test_a_plan_runs_every_setting_in_turn_and_counts_only_what_is_measured() -> None:
    script = Script(["", "one", "two", "three", DONE])
    async with client_of(script) as client:
        rows = await run_plan(client, PLAN, console=QUIET)
    assert [row.concurrency for row in rows] == [1, 3]
    for row in rows:
        assert (row.summary.num_ok, row.summary.num_failed, row.summary.num_tokens) == (10, 0, 70)
        assert row.summary.itl_ms is not None
        # Two repeats of five requests of four rounds; the warm-up's rounds are not in it.
        assert row.acceptance is not None
        assert (row.acceptance.num_rounds, row.acceptance.acceptance_length) == (40, 3.0)
    assert len(script.bodies) == 2 * 2 * (1 + 5)
    assert script.most_running == 3
    body = script.bodies[1]
    assert body["messages"] == [{"role": "user", "content": "a"}]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["model"]) == (0.5, True, 7, "m")
    assert "speculation" not in body


async def test_modes_are_sent_and_other_servers_have_no_acceptance() -> None:
    script = Script(["x", DONE], is_ours=False, usage=None)
    plan = PLAN.__class__(**{**{f: getattr(PLAN, f) for f in PLAN.__slots__}, "modes": ("off", "auto"), "repeats": 1})
    async with client_of(script) as client:
        rows = await run_plan(client, plan, console=QUIET)
        assert await client.first_model() == "first"
    assert [row.mode for row in rows] == ["off", "auto", "off", "auto"]
    assert [body["speculation"]["mode"] for body in script.bodies[:7]] == ["off"] * 6 + ["auto"]
    assert all(row.acceptance is None for row in rows)
    assert rows[0].summary.num_tokens == 5  # no usage: events are counted


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["x"], r"without \[DONE\]"),
        (["x", b'data: {"error": {"message": "the target is down"}}\n\n', DONE], "the target is down"),
        ([b"data: {not json\n\n", DONE], "malformed event"),
        ([b"data: [1]\n\n", DONE], "malformed event"),
    ],
)
async def test_a_broken_stream_is_a_failed_request(answer: list[str | bytes], message: str) -> None:
    workload = Workload(model="m", prompts=("p",), max_tokens=1, fields={})
    async with client_of(Script(answer)) as client:
        (one,), _ = await client.run(workload, num_requests=1, concurrency=9)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(one.error)


async def test_a_refusal_and_a_late_answer_are_failed_requests() -> None:
    workload = Workload(model="m", prompts=("p",), max_tokens=1, fields={})
    refusing = Script([b"no room"], usage=None)
    refusing.status = 429
    async with client_of(refusing) as client:
        (one,), _ = await client.run(workload, num_requests=1, concurrency=1)
    assert one.error == "status 429: no room"
    async with client_of(Script(["x"] * 200), timeout_s=0.05) as client:
        (one,), _ = await client.run(workload, num_requests=1, concurrency=1)
    assert "Timeout" in one.error


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \n")
    assert read_prompts(path) == ("one", "two")
    assert len(read_prompts(None)) == 8
    path.write_text("\n")
    with pytest.raises(ValueError, match="no prompt"):
        read_prompts(path)
    with pytest.raises(ValueError, match="can't be read"):
        read_prompts(tmp_path / "none")


def test_the_command_says_what_is_wrong() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["bench", "http://127.0.0.1:9"]).exit_code == 2
    result = runner.invoke(app, ["bench", "http://127.0.0.1:9", "--concurrency", "many"])
    assert result.exit_code == 2
    assert "many" in result.output
