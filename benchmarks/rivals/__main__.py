"""Who delivers most: one run, one target, the same prompts, all systems interleaved.

    python -m benchmarks.rivals [--server NAME=URL ...] [--tightwad-python PY] [--batches 1,4,16] [--tokens 48]

Always measured: breakeven plain (speculation off), breakeven with K = 3 always, breakeven as it is (auto), and
transformers' generate() plain, with prompt lookup and with early exit (batch 1). ``--server`` adds any server with
OpenAI's API and the same model that runs already (SGLang, with or without its own EAGLE-3). ``--tightwad-python`` adds
tightwad's proxy, from an environment that has it, in front of two plain breakeven engines: its draft model is the
target itself, so that every draft is right. That is the best it can do; drafting then costs as much as decoding.

All servers stay up and idle while another is measured. Each first answers one unmeasured batch of every size, with 128
tokens a stream. The table shows medians over repeats; ``vs plain`` is the median
of the ratios to breakeven plain within the same repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from tokenizers import Tokenizer
from tqdm import tqdm

from benchmarks.embedded import PROMPTS
from benchmarks.provenance import provenance
from benchmarks.rivals.llamacpp_adapter import adapted
from benchmarks.rivals.measure import Ask, Cell, Speak, measure_cell
from benchmarks.rivals.openai_client import OpenAICompletions
from benchmarks.rivals.processes import Transformers, listening_pid, resident_mib, tightwad, transformers
from benchmarks.rivals.report import draw, summarise, table
from benchmarks.served import served
from verifier.embedded.config import VerifierConfig
from verifier.embedded.weights import resolve_model_dir

__all__ = ["main"]

PLAIN = "breakeven, plain"
_MODEL = "smollm2-135m-instruct"
_WARM_UP_TOKENS = 128
_CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One contender. ``max_batch``: assisted generation takes one sequence."""

    name: str
    speak: Speak
    pid: int | None
    max_batch: int = 1 << 30


def main(argv: Sequence[str] | None = None) -> None:
    """Start what is asked for, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--tightwad-python")
    parser.add_argument("--tightwad-port", type=int, default=28088)
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", default="cpu-tiny")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rivals"))
    options = parser.parse_args(argv)
    model_dir = resolve_model_dir(
        _MODEL, cache_dir=VerifierConfig().resolved_cache_dir, progress=lambda phase, share: None
    )
    rows = asyncio.run(_run(options, model_dir))
    print(table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "tightwad_python")}
    result = {"provenance": provenance(sys.argv, seed=0), "settings": settings, "rows": rows}
    (options.out / "rivals.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, options.out / "rivals.png")


async def _run(options: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    batches = [int(batch) for batch in options.batches.split(",")]
    temperatures = [float(temperature) for temperature in options.temperatures.split(",")]
    async with AsyncExitStack() as stack:
        systems = await _start(stack, options, model_dir)
        return await _measure(systems, batches, temperatures, options, count_tokens)


async def _start(stack: AsyncExitStack, options: argparse.Namespace, model_dir: Path) -> list[System]:
    timeout = aiohttp.ClientTimeout(total=600.0)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    )
    url = await stack.enter_async_context(served(options.profile, {}))
    pid = listening_pid(urlsplit(url).port or 80)
    told = {"stream_options": {"include_usage": True}, "return_spec_stats": True}
    modes: dict[str, dict[str, Any]] = {
        PLAIN: {"mode": "off"},
        "breakeven, always K=3": {"mode": "on", "num_draft_tokens": 3},
        "breakeven": {"mode": "auto"},
    }
    systems = [
        System(name=name, pid=pid, speak=OpenAICompletions(session, url, _MODEL, {**told, "speculation": mode}))
        for name, mode in modes.items()
    ]
    for entry in options.server:
        name, _, server_url = entry.partition("=")
        models = await (await session.get(f"{server_url}/v1/models")).json()
        speak = OpenAICompletions(session, server_url, models["data"][0]["id"], {})
        systems.append(System(name=name, speak=speak, pid=listening_pid(urlsplit(server_url).port or 80)))
    if not options.without_transformers:
        ways: dict[str, Transformers] = await stack.enter_async_context(transformers(model_dir, os.cpu_count() or 1))
        systems += [System(name=name, speak=way, pid=way.pid, max_batch=1) for name, way in ways.items()]
    if options.tightwad_python:
        # The target is the engine above; the draft a second one, so that drafting does not wait behind other streams.
        draft = await stack.enter_async_context(served(options.profile, {}))
        target_url = await stack.enter_async_context(adapted(session, url, _MODEL))
        draft_url = await stack.enter_async_context(adapted(session, draft, _MODEL))
        proxy, proxy_pid = await stack.enter_async_context(
            tightwad(options.tightwad_python, target_url, draft_url, options.tightwad_port, 3)
        )
        speak = OpenAICompletions(session, proxy, _MODEL, {})
        systems.append(System(name="tightwad, perfect draft", speak=speak, pid=proxy_pid))
    return systems


async def _measure(
    systems: list[System],
    batches: list[int],
    temperatures: list[float],
    options: argparse.Namespace,
    count_tokens: Callable[[str], int],
) -> list[dict[str, Any]]:
    cells: dict[tuple[str, int, float], list[Cell]] = {}
    for system in systems:
        await _warm_up(system, batches, count_tokens)
    plan = [(b, t, repeat) for repeat in range(options.repeats) for b in batches for t in temperatures]
    for index, (batch, temperature, repeat) in enumerate(tqdm(plan, disable=None)):
        # Batch 1 runs all prompts one after another; a larger one takes them in turn, each with a seed of its own.
        asks = [
            Ask(
                prompt=_CHAT.format(PROMPTS[i % len(PROMPTS)]),
                temperature=temperature,
                seed=100 * repeat + i,
                max_tokens=options.tokens,
            )
            for i in range(max(batch, len(PROMPTS) // 2))
        ]
        turn = index % len(systems)
        for system in systems[turn:] + systems[:turn]:
            if batch > system.max_batch:
                continue
            key = (system.name, batch, temperature)
            for start in range(0, len(asks), batch):
                cells.setdefault(key, []).append(
                    await measure_cell(system.speak, asks[start : start + batch], count_tokens)
                )
    memory = {system.name: resident_mib(system.pid) for system in systems if system.pid}
    return summarise(cells, memory, plain=PLAIN)


async def _warm_up(system: System, batches: list[int], count_tokens: Callable[[str], int]) -> None:
    # Every batch size, long enough for what adapts: a controller that has never seen a batch of four must try drafts.
    for batch in batches:
        if batch <= system.max_batch:
            asks = [
                Ask(prompt=_CHAT.format(PROMPTS[i % len(PROMPTS)]), temperature=0.0, seed=i, max_tokens=_WARM_UP_TOKENS)
                for i in range(batch)
            ]
            await measure_cell(system.speak, asks, count_tokens)


if __name__ == "__main__":
    main()
