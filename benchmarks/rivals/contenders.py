"""Starts the contenders: breakeven's three ways in front of the embedded engine or of SGLang, and the rivals."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from benchmarks.rivals.llamacpp_adapter import adapted
from benchmarks.rivals.openai_client import OpenAICompletions
from benchmarks.rivals.processes import Transformers, listening_pid, tightwad, transformers
from benchmarks.rivals.sglang_acceptance import SGLangAcceptance
from benchmarks.rivals.sglang_engines import (
    OWN_EAGLE3,
    PLAIN_ENGINE,
    TARGET_ENGINE,
    SGLangEngines,
    SGLangSetup,
    sglang_engines,
)
from benchmarks.rivals.system import System
from benchmarks.served import served

__all__ = ["MODEL", "PLAIN", "start_contenders"]

PLAIN: Final = "breakeven, plain"
MODEL: Final = "smollm2-135m-instruct"
_NUM_DRAFTS: Final = 3
# The controller tries each K for a few rounds in its first answers at a batch size: once in a server's life, and long
# beside an answer of 128 tokens.
_NUM_LEARNING: Final = 8
_MODES: Final[dict[str, dict[str, Any]]] = {
    PLAIN: {"mode": "off"},
    f"breakeven, always K={_NUM_DRAFTS}": {"mode": "on", "num_draft_tokens": _NUM_DRAFTS},
    "breakeven": {"mode": "auto"},
}


async def start_contenders(
    stack: AsyncExitStack, options: argparse.Namespace, model_dir: Path
) -> tuple[list[System], dict[str, str]]:
    """All that is asked for, running until the stack is closed; and the names of those that failed, with the reason.

    Raises:
        RuntimeError: breakeven's own gateway did not come up. TimeoutError: nor within the time for a start.
    """
    timeout = aiohttp.ClientTimeout(total=600.0)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    )
    systems: list[System] = []
    failed: dict[str, str] = {}
    flags = dict(entry.split("=", 1) for entry in options.set)
    embedded_url: str | None = None
    if options.sglang_python:
        engines = await stack.enter_async_context(sglang_engines(_setup(options, model_dir)))
        failed |= engines.failed
        systems += _engines_alone(session, engines, model_dir)
        if TARGET_ENGINE in engines.engines:
            async with asyncio.timeout(options.start_timeout):
                systems += await _breakeven_on_sglang(stack, session, engines, flags)
    else:
        async with asyncio.timeout(options.start_timeout):
            embedded_url = await stack.enter_async_context(served(options.profile, flags))
        systems += _breakeven(session, embedded_url, ())
    for entry in options.server:
        name, _, url = entry.partition("=")
        models = await (await session.get(f"{url}/v1/models")).json()
        speak = OpenAICompletions(session, url, models["data"][0]["id"], {})
        systems.append(System(name=name, speak=speak, pids=_listening(url)))
    if not options.without_transformers:
        ways: dict[str, Transformers] = await stack.enter_async_context(
            transformers(model_dir, os.cpu_count() or 1, options.device)
        )
        systems += [System(name=name, speak=way, pids=(way.pid,), max_batch=1) for name, way in ways.items()]
    if options.tightwad_python and embedded_url:
        systems.append(await _tightwad(stack, session, options, embedded_url))
    return systems, failed


def _breakeven(session: aiohttp.ClientSession, url: str, below: tuple[int, ...]) -> list[System]:
    told = {"stream_options": {"include_usage": True}, "return_spec_stats": True}
    return [
        System(
            name=name,
            pids=(*_listening(url), *below),
            speak=OpenAICompletions(session, url, MODEL, {**told, "speculation": mode}),
            num_warm_ups=_NUM_LEARNING if mode["mode"] == "auto" else 1,
        )
        for name, mode in _MODES.items()
    ]


async def _breakeven_on_sglang(
    stack: AsyncExitStack, session: aiohttp.ClientSession, engines: SGLangEngines, flags: dict[str, str]
) -> list[System]:
    config, engine = engines.configs[TARGET_ENGINE], engines.engines[TARGET_ENGINE]
    keys = ("url", "model_dir", "tap_ring_path", "tap_socket_path", "lane_endpoint")
    told = {f"sglang.{key}": str(getattr(config, key)) for key in keys}
    url = await stack.enter_async_context(served("cpu-smollm2", {**told, **flags}))
    return _breakeven(session, url, (engine.process.pid,))


def _engines_alone(session: aiohttp.ClientSession, engines: SGLangEngines, model_dir: Path) -> list[System]:
    # A server's model has the name of its path, unless it is told another.
    systems = []
    for name in (PLAIN_ENGINE, OWN_EAGLE3):
        if engine := engines.engines.get(name):
            speak = OpenAICompletions(session, engine.url, str(model_dir), {})
            acceptance = SGLangAcceptance(session, engine.url) if name == OWN_EAGLE3 else None
            systems.append(System(name=name, speak=speak, pids=(engine.process.pid,), acceptance=acceptance))
    return systems


def _setup(options: argparse.Namespace, model_dir: Path) -> SGLangSetup:
    return SGLangSetup(
        python=options.sglang_python,
        model_dir=model_dir,
        head_dir=options.head,
        args=tuple(options.sglang_args.split()),
        target_args=tuple(options.sglang_target_args.split()),
        port=options.sglang_port,
        num_drafts=_NUM_DRAFTS,
        start_timeout_s=options.start_timeout,
        directory=options.work,
    )


async def _tightwad(
    stack: AsyncExitStack, session: aiohttp.ClientSession, options: argparse.Namespace, url: str
) -> System:
    # The target is the engine above; the draft a second one, so that drafting does not wait behind other streams.
    draft = await stack.enter_async_context(served(options.profile, {}))
    target_url = await stack.enter_async_context(adapted(session, url, MODEL))
    draft_url = await stack.enter_async_context(adapted(session, draft, MODEL))
    proxy, pid = await stack.enter_async_context(
        tightwad(options.tightwad_python, target_url, draft_url, options.tightwad_port, _NUM_DRAFTS)
    )
    speak = OpenAICompletions(session, proxy, MODEL, {})
    return System(name="tightwad, perfect draft", speak=speak, pids=(pid,))


def _listening(url: str) -> tuple[int, ...]:
    pid = listening_pid(urlsplit(url).port or 80)
    return () if pid is None else (pid,)
