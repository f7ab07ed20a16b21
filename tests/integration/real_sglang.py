"""A real SGLang and a real gateway in front of it, for the marked suite.

BREAKEVEN_SGLANG_PYTHON names an interpreter that has SGLang. The plugin is put beside it without installing anything:
by an entry point on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from breakeven.settings import load_settings
from verifier.embedded.weights import resolve_model_dir
from verifier.sglang.config import SGLangConfig
from verifier.sglang.launcher import EngineLauncher

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"


class Http:
    """Just enough of a client."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def get(self, path: str) -> Any:
        return self._call(urllib.request.Request(self._base_url + path))[1]

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"}
        return self._call(urllib.request.Request(self._base_url + path, json.dumps(body).encode(), headers))

    def complete(self, prompt: list[int], **fields: Any) -> tuple[int, Any]:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/completions", {**body, **fields})

    def ids(self, prompt: list[int], **fields: Any) -> list[int]:
        status, answer = self.complete(prompt, **fields)
        assert status == 200, answer
        return list(answer["choices"][0]["token_ids"])

    def tokenize(self, prompt: str) -> list[int]:
        return list(self.post("/tokenize", {"model": MODEL, "prompt": prompt})[1]["tokens"])

    def _call(self, request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=900) as response:
                body = response.read()
                return response.status, json.loads(body) if body[:1] in b"[{" else body
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Engine:
    """An engine under the launcher, in a loop of its own thread: its log is read all the time, or it would block."""

    def __init__(self, directory: Path, *, args: tuple[str, ...] = (), env: tuple[str, ...] = ()) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        place_plugin(directory)
        self.gateway_flags = {
            "sglang.url": self.url,
            "sglang.tap_ring_path": str(directory / "ring"),
            "sglang.tap_socket_path": str(directory / "tap"),
        }
        flags = {"sglang.python": os.environ["BREAKEVEN_SGLANG_PYTHON"], "sglang.state_dir": str(directory)}
        config = load_settings("cpu-smollm2", {**self.gateway_flags, **flags}).section("sglang", SGLangConfig)
        config = dataclasses.replace(config, args=(*config.args, *args), env=env or config.env)
        cache_dir = Path.home() / ".cache" / "breakeven"
        model_dir = resolve_model_dir(config.model_path, cache_dir=cache_dir, progress=lambda phase, share: None)
        self._config, self._model_dir = config, str(model_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._launcher: EngineLauncher | None = None

    def __enter__(self) -> Engine:
        self._thread.start()
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self) -> None:
        self._launcher = EngineLauncher(self._config, model_path=self._model_dir)
        self._run(self._launcher.start(on_progress=lambda phase, share: None))

    def stop(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            self._run(launcher.stop())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def place_plugin(directory: Path) -> None:
    """Make every interpreter started from here find the plugin's entry point, and this repository."""
    info = directory / "plugin" / "breakeven-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breakeven\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreakeven = verifier.sglang.plugin.hooks:register\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(info.parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


@contextlib.contextmanager
def gateway(engine_flags: dict[str, str], **flags: str) -> Iterator[Http]:
    """A gateway of profile cpu-smollm2 in front of an engine. Patient: a busy machine is no fault."""
    port = free_port()
    settings = {
        "gateway.port": str(port),
        "engine.verify_timeout_s": "600",
        "speculation.draft_timeout_s": "60",
        **engine_flags,
        **flags,
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.integration.sglang_gateway",
            "cpu-smollm2",
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    try:
        client = Http(f"http://127.0.0.1:{port}")
        wait_ready(client, with_drafter=flags.get("speculation.mode") != "off")
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_ready(client: Http, *, with_drafter: bool, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            stats = client.get("/stats")
            if stats["verifier"]["state"] == "up" and (not with_drafter or stats["drafter"]["state"] == "up"):
                return
        time.sleep(0.5)
    raise AssertionError("the gateway was not ready in time")


def plain_ids(engine: Http, prompt: list[int], num_tokens: int) -> list[int]:
    """SGLang's own greedy answer."""
    params = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    return list(engine.post("/generate", {"input_ids": prompt, "sampling_params": params})[1]["output_ids"])


def margin(engine: Http, ids: list[int]) -> float:
    """Gap between the two most likely ids after ``ids``, in log-probability."""
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    meta = engine.post("/generate", body)[1]["meta_info"]
    first, second = (entry[0] for entry in meta["output_top_logprobs"][0])
    return float(first - second)
