"""The comparison counts tokens and times alike for every system, and its adapter speaks llama.cpp's format."""

from __future__ import annotations

import os
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web

from benchmarks.rivals.llamacpp_adapter import adapted
from benchmarks.rivals.measure import Answer, Ask, measure_cell
from benchmarks.rivals.openai_client import OpenAICompletions
from benchmarks.rivals.processes import device_mib, listening_pid, resident_mib
from benchmarks.rivals.report import Memory, draw, summarise, table
from benchmarks.rivals.sglang_acceptance import SGLangAcceptance
from benchmarks.rivals.sglang_engines import OWN_EAGLE3, PLAIN_ENGINE, TARGET_ENGINE, SGLangSetup, engine_configs
from benchmarks.sglang.entry_points import PLUGIN, plugin_python_path
from verifier.sglang.command import render_command

_LIST_PLUGINS = (
    "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='sglang.srt.plugins')])"
)
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
    memory = {"plain": Memory(mib=3.4, device_mib=7.6)}
    rows = summarise({("plain", 1, 0.0): [cell, cell], ("fast", 1, 0.0): [cell, cell]}, memory, plain="plain")
    assert [row["vs_plain"] for row in rows] == [1.0, 1.0]
    assert [(row["mib"], row["device_mib"]) for row in rows] == [(3, 8), (None, None)]
    assert table(rows).count("\n") == 3
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


async def test_who_failed_is_compared_as_far_as_it_came() -> None:
    async def plain(_: Ask) -> Answer:
        return Answer(pieces=((0.0, "a "), (1.0, "b")))

    cell = await measure_cell(plain, [ASK], _count)
    cells = {
        ("plain", 1, 0.0): [cell, cell],
        ("failed", 1, 0.0): [cell],
        ("at once", 1, 0.0): [],
        ("alone", 4, 0.0): [cell],
    }
    rows = summarise(cells, {}, plain="plain")
    assert [(row["system"], row["vs_plain"], row["cells"]) for row in rows] == [
        ("plain", 1.0, 2),
        ("failed", 1.0, 1),
        ("alone", None, 1),
    ]
    assert "alone |" in table(rows)


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
    assert 5 < resident_mib([os.getpid()]) < 100_000
    assert resident_mib([os.getpid(), os.getpid()]) < 2 * resident_mib([os.getpid()])


@pytest.mark.parametrize(("listed", "expected"), [("{pid}, 512\n1, 99\n", 512.0), ("1, 99\n", None), ("[N/A]\n", None)])
def test_gpu_memory_is_what_the_driver_lists_for_the_own_processes(listed, expected, tmp_path, monkeypatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{listed.format(pid=os.getpid())}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device_mib([os.getpid()]) == expected


def test_without_a_gpu_there_is_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_mib([os.getpid()]) is None


def test_the_three_engines_differ_only_in_what_is_compared(tmp_path) -> None:
    setup = SGLangSetup(
        python="py",
        model_dir=tmp_path / "model",
        head_dir=tmp_path / "head",
        args=("--dtype", "bfloat16"),
        target_args=("--disable-overlap-schedule",),
        port=31000,
        num_drafts=3,
        start_timeout_s=1.0,
        directory=tmp_path,
    )
    commands = {
        name: render_command(config, model_path="m")
        for name, config in engine_configs(setup, captures_by_flag=False).items()
    }
    plain, own, target = (commands[name] for name in (PLAIN_ENGINE, OWN_EAGLE3, TARGET_ENGINE))
    assert dict(plain.environ) == dict(own.environ) == {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    assert {"BREAKEVEN_TAP_RING", "BREAKEVEN_LANE", "BREAKEVEN_CAPTURE_AUX"} < set(dict(target.environ))
    assert set(own.argv) - set(plain.argv) == {
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(tmp_path / "head")),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        "31001",
    }
    assert "--disable-overlap-schedule" in target.argv
    assert "--disable-overlap-schedule" not in own.argv


def test_the_plugin_is_found_without_being_installed(tmp_path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _LIST_PLUGINS],
        env={**os.environ, "PYTHONPATH": plugin_python_path(tmp_path, PLUGIN)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "verifier.sglang.plugin.hooks:register" in found.stdout


async def test_the_engines_acceptance_leaves_out_the_prompts_token() -> None:
    told = iter([{"completion_tokens": 9, "spec_verify_ct": 4}, {"completion_tokens": 9}])
    seen = []

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"text": "t", "meta_info": next(told)})

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            acceptance = SGLangAcceptance(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
            assert [await acceptance(ASK), await acceptance(ASK)] == [2.0, None]
    finally:
        await runner.cleanup()
    assert seen[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
