"""The real thing as child processes: a random tiny target, a random EAGLE-3 head, and ``breakeven serve`` over them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.toy_pair import write_head, write_target

__all__ = ["Server", "serving", "write_head", "write_target"]

START_S = 90.0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A running gateway with its children."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path, model: str) -> None:
        self.process, self.url, self.log_path, self.model = process, url, log_path, model

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
        """Status and JSON of a POST."""
        request = urllib.request.Request(self.url + path, data=body, headers={"Content-Type": content_type})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stats(self) -> Any:
        """/stats."""
        return self.get("/stats")[1]

    def wait_for(self, what: str, patience_s: float = START_S) -> Any:
        """Poll /stats until this peer is up; real processes announce nothing to us."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                stats = self.stats()
                if stats[what]["state"] == "up":
                    return stats
            time.sleep(0.1)
        raise AssertionError(f"the {what} did not come up:\n{self.log()}")

    def log(self) -> str:
        """The end of the log, for failures."""
        return self.log_path.read_text(errors="replace")[-6000:]


@contextlib.contextmanager
def serving(
    directory: Path, *, model: str, head: str, model_name: str, cache_dir: str, **changes: Any
) -> Iterator[Server]:
    """Start ``breakeven serve`` and stop it at the end, whatever happened."""
    port = _free_port()
    tables: dict[str, dict[str, Any]] = {
        "gateway": {"port": port},
        "engine": {"model_name": model_name, "max_running": 64, "log_format": "json", "drain_timeout_s": 30.0},
        "speculation": {"mode": "on", "num_draft_tokens": 3},
        "verifier": {"model": model, "cache_dir": cache_dir},
        "drafter": {"head_dir": head, "cache_dir": cache_dir, "max_draft_tokens": 8},
    }
    for section, values in changes.items():
        tables[section] |= values
    lines = []
    for section, values in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    profile = directory / "profile.toml"
    profile.write_text("\n".join(lines) + "\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BREAKEVEN_")}
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "breakeven", "serve", "--profile", str(profile)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        server = Server(process, f"http://127.0.0.1:{port}", log_path, model_name)
        try:
            server.wait_for("verifier")
            server.wait_for("drafter")
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
