"""``docker compose up`` without docker: the file's own commands, environment, health and order, as processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose_file import read_services, select
from tests.deploy.packages import Built
from tests.deploy.processes import Processes, in_thread
from tests.integration.stack import write_head, write_target

HEAD = Path(__file__).parents[2] / "drafter" / "heads" / "smollm2-135m-instruct"
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]

TINY = {
    "MODEL_NAME": "tiny",
    "TARGET_MODEL": "/var/cache/breakeven/target",
    "DRAFT_HEAD": "/var/cache/breakeven/head",
    "DRAIN_TIMEOUT_S": "0.1",
    "API_KEYS": "a-key-of-the-test",
}


@contextmanager
def compose_up(
    environ: dict[str, str],
    *,
    cache_dir: Path,
    targets: tuple[str, ...] = (),
    patience_s: float = 200.0,
    **options: Any,
) -> Iterator[Processes]:
    """The stack, healthy."""
    services = select(read_services(environ), targets=targets)
    with Processes(services, volumes={"cache": cache_dir}, hurry=5, **options) as processes:
        processes.up(patience_s=patience_s)
        yield processes


def ask(processes: Processes, path: str, body: dict[str, Any] | None = None, *, key: str = TINY["API_KEYS"]) -> Any:
    """Whole answer as JSON, or a stream's events, through the port the gateway publishes."""
    url = f"http://127.0.0.1:{processes.ports[8000]}{path}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(
        url, data, headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            if body is None or not body.get("stream"):
                return json.loads(answer.read())
            return [line[6:].strip().decode() for line in answer if line.startswith(b"data: ")]
    except urllib.error.HTTPError as error:
        error.add_note(f"{error.read().decode()}\n{processes.log('gateway')}")
        raise


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache volume with a tiny target and head in it."""
    root = tmp_path_factory.mktemp("cache")
    write_head(root / "head", write_target(root / "target"))
    return root


def test_the_default_services_stream_share_memory_and_stop_in_order(cache_dir: Path) -> None:
    with compose_up(TINY, cache_dir=cache_dir) as processes:
        assert processes.started == ["verifier", "drafter", "gateway"]
        body = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 3, "stream": True, "ignore_eos": True}
        body["speculation"] = {"mode": "on", "num_draft_tokens": 3}
        events = ask(processes, "/v1/completions", body)
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"

        stats = ask(processes, "/stats")
        assert (stats["verifier"]["pid"], stats["drafter"]["pid"]) == (
            processes.pid("verifier"),
            processes.pid("drafter"),
        )
        assert stats["speculation"]["num_accepted_tokens"] > 0

        # The features went through the volume, and nothing but the two sockets and the ring is in it.
        shared = processes.root / "run"
        assert sorted(path.name for path in shared.iterdir()) == ["drafter.sock", "ring", "verifier.sock"]
        assert stat.S_IMODE((shared / "ring").stat().st_mode) == 0o600
        for name in ("verifier", "drafter"):
            assert str(shared / "ring") in Path(f"/proc/{processes.pid(name)}/maps").read_text()

        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(processes, "/stats", key="another-key")
        assert caught.value.code == 401
        assert processes.probe("gateway") == "healthy"  # which has no key

        # Streams that don't end within the drain end with an error event, and nothing needs SIGKILL.
        body |= {"max_tokens": 480, "n": 8, "speculation": {"mode": "off"}}
        endless: list[str] = []
        reader = in_thread(lambda: endless.extend(ask(processes, "/v1/completions", body)))
        while ask(processes, "/stats")["requests"]["running"] == 0:
            time.sleep(0.02)
        order: list[str] = []
        stopped = processes.down(on_stopping=order.append)
        reader.join()
        assert order == ["gateway", "drafter", "verifier"]
        assert [(end.exit_code, end.was_killed) for end in stopped] == [(0, False)] * 3, processes.log("gateway")
        assert '"event": "stopped"' in processes.log("gateway")
        errors = [json.loads(event).get("error") for event in endless if event != "[DONE]"]
        assert {error["code"] for error in errors if error} == {"draining"}
        assert not (shared / "ring").exists()


@pytest.mark.weights
@pytest.mark.skipif(not (HEAD / "config.json").exists(), reason="no trained head in the repository yet")
def test_nothing_set_serves_smollm2() -> None:
    # The user's own cache: the conversion of the weights is paid once.
    cache = os.environ.get("BREAKEVEN_VERIFIER_CACHE_DIR", str(Path.home() / ".cache" / "breakeven"))
    with compose_up({}, cache_dir=Path(cache)) as processes:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": 16, "temperature": 0}
        body |= {"stream": True, "speculation": {"mode": "on", "num_draft_tokens": 3}}
        events = ask(processes, "/v1/chat/completions", body)
        chunks = [json.loads(event) for event in events[:-1]]
        assert "Paris" in "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert ask(processes, "/stats")["speculation"]["num_accepted_tokens"] > 0
        assert all(end.exit_code == 0 and not end.was_killed for end in processes.down())


@pytest.mark.sglang
@pytest.mark.weights
@pytest.mark.timeout(1000)
@pytest.mark.skipif("BREAKEVEN_SGLANG_PYTHON" not in os.environ, reason="set BREAKEVEN_SGLANG_PYTHON")
def test_the_sglang_services_draft_through_the_plugin(built: Built, tmp_path: Path) -> None:
    """The profile for one CPU in place of the one for eight GPUs; everything else is the file's.

    As in deploy/sglang/Dockerfile, the wheel without its dependencies is all that is added to SGLang's environment.
    """
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(built.wheel)], check=True)
    cache = Path.home() / ".cache" / "breakeven"
    extra = {"BREAKEVEN_SGLANG_PYTHON": os.environ["BREAKEVEN_SGLANG_PYTHON"], "PYTHONPATH": str(tmp_path)}
    extra |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    stack = compose_up(
        {"SGLANG_PROFILE": "cpu-smollm2"},
        cache_dir=cache,
        targets=("sglang-gateway",),
        patience_s=800.0,
        extra_environ=extra,
    )
    with stack as processes:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": "smollm2-135m-instruct", "messages": messages, "max_tokens": 24, "temperature": 0}
        body |= {"speculation": {"mode": "on", "num_draft_tokens": 3}}
        answer = ask(processes, "/v1/chat/completions", body)
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert ask(processes, "/stats")["speculation"]["num_accepted_tokens"] > 0
        assert (processes.root / "sglang-run" / "tap").exists()
        assert all(not end.was_killed for end in processes.down())
