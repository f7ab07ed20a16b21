"""A real SGLang under a real gateway. Runs only where BREAKEVEN_SGLANG_PYTHON names an interpreter that has SGLang.

BREAKEVEN_SGLANG_URL uses a server that runs already; BREAKEVEN_SGLANG_PROMPTS and _TOKENS set how much is compared.
With BREAKEVEN_TAP_RING and BREAKEVEN_TAP_SOCKET, those of its plugin, features come by shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from breakeven.settings import load_settings
from verifier.embedded.weights import resolve_model_dir
from verifier.sglang.config import SGLangConfig
from verifier.sglang.launcher import EngineLauncher

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif("BREAKEVEN_SGLANG_PYTHON" not in os.environ, reason="needs BREAKEVEN_SGLANG_PYTHON"),
]

NUM_PROMPTS = int(os.environ.get("BREAKEVEN_SGLANG_PROMPTS", "20"))
NUM_TOKENS = int(os.environ.get("BREAKEVEN_SGLANG_TOKENS", "64"))
SUBJECTS = (
    "the sea",
    "a clock",
    "prime numbers",
    "a lost dog",
    "rain in spring",
    "old maps",
    "bread",
    "the moon",
    "a bridge",
)
FORMS = ("Write a sentence about {}.", "List three facts about {}.", "Explain {} to a child.", "A short story: {}")
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS][:NUM_PROMPTS]
# Two float32 kernels may order logits that are closer than this differently.
TIE_MARGIN = 1e-3


class Http:
    """Just enough of a client."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def get(self, path: str) -> Any:
        return self._call(urllib.request.Request(self._base_url + path))[1]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        return self._call(urllib.request.Request(self._base_url + path, json.dumps(body).encode(), headers))

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tap_flags() -> dict[str, str]:
    if "BREAKEVEN_TAP_RING" not in os.environ:
        return {}
    ring, socket_path = os.environ["BREAKEVEN_TAP_RING"], os.environ["BREAKEVEN_TAP_SOCKET"]
    return {"sglang.tap_ring_path": ring, "sglang.tap_socket_path": socket_path}


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = os.environ.get("BREAKEVEN_SGLANG_URL")
    if running:
        yield running
        return
    url = f"http://127.0.0.1:{free_port()}"
    flags = {
        "sglang.url": url,
        "sglang.python": os.environ["BREAKEVEN_SGLANG_PYTHON"],
        "sglang.state_dir": str(tmp_path_factory.mktemp("sglang")),
    }
    flags |= tap_flags()
    config = load_settings("cpu-smollm2", flags).section("sglang", SGLangConfig)
    cache_dir = Path.home() / ".cache" / "breakeven"
    model_dir = resolve_model_dir(config.model_path, cache_dir=cache_dir, progress=lambda phase, share: None)
    launcher = EngineLauncher(config, model_path=str(model_dir))
    # A loop of its own thread: the launcher reads the engine's log all the time, or the engine would block on it.
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        start = launcher.start(on_progress=lambda phase, share: None)
        asyncio.run_coroutine_threadsafe(start, loop).result()
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(launcher.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def gateway(engine_url: str, **flags: str) -> Iterator[Http]:
    port = free_port()
    settings = {"gateway.port": str(port), "sglang.url": engine_url, **tap_flags(), **flags}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.sglang_gateway",
            "cpu-smollm2",
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        client = Http(f"http://127.0.0.1:{port}")
        wait_ready(client, with_drafter=flags.get("speculation.mode") != "off")
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def wait_ready(client: Http, *, with_drafter: bool) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            stats = client.get("/stats")
            if stats["verifier"]["state"] == "up" and (not with_drafter or stats["drafter"]["state"] == "up"):
                return
        time.sleep(0.5)
    raise AssertionError("the gateway was not ready in time")


def complete(client: Http, prompt: list[int], **fields: Any) -> list[int]:
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    status, answer = client.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True, **fields})
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


def tokenize(client: Http, prompt: str) -> list[int]:
    return list(client.post("/tokenize", {"model": "smollm2-135m-instruct", "prompt": prompt})[1]["tokens"])


def plain_ids(engine_url: str, prompt: list[int]) -> list[int]:
    params = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
    return list(Http(engine_url).post("/generate", body)[1]["output_ids"])


def margin(engine_url: str, ids: list[int]) -> float:
    """Gap between the two most likely ids after ``ids``, in log-probability."""
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = Http(engine_url).post("/generate", body)[1]["meta_info"]
    first, second = (entry[0] for entry in meta["output_top_logprobs"][0])
    return float(first - second)


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_greedy_is_the_engines_own_answer(engine_url: str, mode: str) -> None:
    divergences = []
    with gateway(engine_url, **{"speculation.mode": mode}) as client:
        for text in PROMPTS:
            prompt = tokenize(client, text)
            own, ours = plain_ids(engine_url, prompt), complete(client, prompt)
            assert len(own) == len(ours) == NUM_TOKENS
            if own != ours:
                at = next(i for i, (a, b) in enumerate(zip(own, ours, strict=True)) if a != b)
                divergences.append((text, at, margin(engine_url, prompt + own[:at])))
        stats = client.get("/stats")
    counters, speculation = stats["verifier"]["counters"], stats["speculation"]
    print(f"mode {mode}: {len(PROMPTS)} prompts, divergences {divergences}")  # noqa: T201
    print({key: speculation[key] for key in ("acceptance_length", "num_rounds", "num_plain_rounds")})  # noqa: T201
    print(counters, {key: stats[key] for key in ("plain_ms", "verify_ms", "draft_ms", "overhead_ms")})  # noqa: T201
    assert all(gap < TIE_MARGIN for _, _, gap in divergences), divergences
    assert counters.get("cached_tokens_differ", 0) == 0
    if mode == "on":
        assert speculation["num_accepted_tokens"] > 0


def test_same_seed_same_text_with_drafts_and_without(engine_url: str) -> None:
    with gateway(engine_url, **{"speculation.mode": "auto", "sglang.plain_sampling": "shared_noise"}) as client:
        for text in PROMPTS[:4]:
            prompt = tokenize(client, text)
            common = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
            on = complete(client, prompt, **common, speculation={"mode": "on", "num_draft_tokens": 3})
            off = complete(client, prompt, **common, speculation={"mode": "off"})
            assert on == off


def test_over_long_prompt_and_penalties(engine_url: str) -> None:
    with gateway(engine_url, **{"speculation.mode": "on"}) as client:
        body = {"model": "smollm2-135m-instruct", "prompt": [5] * 9000, "max_tokens": 4}
        assert client.post("/v1/completions", body)[0] == 400
        prompt = tokenize(client, PROMPTS[0])
        assert complete(client, prompt, logit_bias={"17": 100}, max_tokens=5) == [17] * 5
        assert len(complete(client, prompt, repetition_penalty=1.2, max_tokens=8)) == 8
