"""A compose file's services as processes of this machine: what an engine would do with them, minus the containers.

Volumes are directories; their paths in commands and environments are rewritten, published ports become free ones.
Nothing of the tests' own environment gets in.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

import psutil

from tests.deploy.compose_file import ROOT, Healthcheck, Mount, Service

Health = Literal["starting", "healthy", "unhealthy"]


@dataclass(slots=True, kw_only=True)
class HealthState:
    """Failures count after start_period, or once it was healthy; ``retries`` in a row are too many."""

    check: Healthcheck
    health: Health = "starting"
    failures: int = 0

    def observe(self, *, is_ok: bool, age_s: float) -> Health:
        """Take one probe's result, ``age_s`` after the start."""
        if is_ok:
            self.health, self.failures = "healthy", 0
        elif not self.is_starting(age_s):
            self.failures += 1
            if self.failures >= self.check.retries:
                self.health = "unhealthy"
        return self.health

    def is_starting(self, age_s: float) -> bool:
        """True as long as failures don't count and probes come at the start interval."""
        return self.health == "starting" and age_s < self.check.start_period_s

    def pause_s(self, age_s: float) -> float:
        """Until the next probe."""
        return self.check.start_interval_s if self.is_starting(age_s) else self.check.interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """How a service ended. exit_code: negative = by that signal. was_killed: its grace was over."""

    name: str
    exit_code: int
    took_s: float
    was_killed: bool


@dataclass(slots=True, kw_only=True)
class _Running:
    service: Service
    process: subprocess.Popen[bytes]
    log_path: Path
    begin_s: float
    environ: Mapping[str, str]
    state: HealthState | None = None
    probes: list[bool] = field(default_factory=list)


class ServiceFailed(Exception):
    """A service ended or became unhealthy before what depends on it could start."""


class Processes:
    """Runs services, dependencies first.

    Args:
        volumes: directory to use for a named volume, e.g. a warm cache; the others get fresh ones.
        extra_environ: on top of each service's own, for what a container's image would bring.
        hurry: how many times as often as the file says health is probed.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        volumes: Mapping[str, Path] | None = None,
        extra_environ: Mapping[str, str] | None = None,
        hurry: float = 1.0,
    ) -> None:
        # Short: a socket's path has 107 characters.
        self.root = Path(tempfile.mkdtemp(prefix="bec-"))
        self._services = list(services)
        self._volumes = dict(volumes or {})
        self._extra = dict(extra_environ or {})
        self._hurry = hurry
        self._running: dict[str, _Running] = {}
        self.started: list[str] = []
        self.ports = {target: _free_port() for service in services for target in service.ports}
        self._hosts = {address: _free_port() for address in _addresses(services)}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in self._running.values():
            if running.process.poll() is None:
                # With all it started, some of it in sessions of its own: a container leaves nothing behind.
                for child in psutil.Process(running.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                running.process.kill()
                running.process.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def up(self, *, patience_s: float) -> None:
        """Start all, each once its dependencies are as it wants them, and wait until all are healthy.

        Raises:
            ServiceFailed: one did not get there; the message ends with its log.
        """
        end_s = time.monotonic() + patience_s
        for service in self._services:
            for other, condition in service.depends_on.items():
                if condition == "service_healthy":
                    self.wait_healthy(other, until_s=end_s)
            self._start(service)
        for service in self._services:
            if service.healthcheck is not None:
                self.wait_healthy(service.name, until_s=end_s)

    def wait_healthy(self, name: str, *, until_s: float) -> None:
        """Probe as often as its healthcheck says until it is healthy."""
        running = self._running[name]
        assert running.state is not None, f"{name} has no healthcheck to wait for"
        while running.state.health != "healthy":
            time.sleep(running.state.pause_s(time.monotonic() - running.begin_s) / self._hurry)
            health = self.probe(name)
            if running.process.poll() is not None:
                raise ServiceFailed(f"{name} exited with {running.process.returncode}:\n{self.log(name)}")
            if health == "unhealthy" or time.monotonic() > until_s:
                raise ServiceFailed(f"{name} is {health}:\n{self.log(name)}")

    def probe(self, name: str) -> Health:
        """Run the healthcheck's command once."""
        running = self._running[name]
        assert running.state is not None
        check = running.state.check
        try:
            command = self.mapped(running.service, check.test)
            done = subprocess.run(
                command, env=running.environ, cwd=self.root, capture_output=True, timeout=check.timeout_s
            )
            is_ok = done.returncode == 0
        except subprocess.TimeoutExpired:
            is_ok = False
        running.probes.append(is_ok)
        return running.state.observe(is_ok=is_ok, age_s=time.monotonic() - running.begin_s)

    def down(self, *, on_stopping: Callable[[str], None] | None = None) -> list[Stopped]:
        """Stop all, dependents first: the stop signal, the grace period, then SIGKILL."""
        stopped = []
        for service in reversed(self._services):
            running = self._running.get(service.name)
            if running is None:
                continue
            if on_stopping is not None:
                on_stopping(service.name)
            begin_s, was_killed = time.monotonic(), False
            running.process.send_signal(signal.Signals[service.stop_signal])
            try:
                running.process.wait(service.stop_grace_s)
            except subprocess.TimeoutExpired:
                was_killed = True
                running.process.kill()
                running.process.wait()
            took_s = time.monotonic() - begin_s
            code = running.process.returncode
            stopped.append(Stopped(name=service.name, exit_code=code, took_s=took_s, was_killed=was_killed))
        return stopped

    def directory(self, service: Service, mount: Mount) -> Path:
        """Where a mount's files are on this machine; a tmpfs is a service's own."""
        if mount.source.startswith((".", "/")):
            return (ROOT / mount.source).resolve()
        path = self._volumes.get(mount.source) or self.root / (mount.source or f"{service.name}{mount.target}")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def mapped(self, service: Service, words: Sequence[str]) -> list[str]:
        """Words with what is the containers' own replaced by this machine's.

        Paths inside a mount, published ports that stand alone, and other services' names in URLs.
        """
        mounts = sorted(service.mounts, key=lambda mount: len(mount.target), reverse=True)
        paths = {mount.target: str(self.directory(service, mount)) for mount in mounts}
        pattern = re.compile("|".join(rf"{re.escape(path)}(?![\w.-])" for path in paths) or r"(?!)")
        result = [self._with_hosts(service, pattern.sub(lambda match: paths[match.group()], word)) for word in words]
        return [str(self.ports[int(word)]) if word.isdigit() and int(word) in self.ports else word for word in result]

    def _with_hosts(self, service: Service, word: str) -> str:
        for (name, port), free in self._hosts.items():
            word = word.replace(f"//{name}:{port}", f"//127.0.0.1:{free}")
            if name == service.name:
                word = word.replace(f"//0.0.0.0:{port}", f"//127.0.0.1:{free}")
        return word

    def log(self, name: str) -> str:
        """The end of a service's output."""
        return self._running[name].log_path.read_text(errors="replace")[-6000:]

    def probes(self, name: str) -> list[bool]:
        """Results of all probes so far."""
        return self._running[name].probes

    def pid(self, name: str) -> int:
        """Process id of a service."""
        return self._running[name].process.pid

    def _start(self, service: Service) -> None:
        environ = self._environ(service)
        log_path = self.root / f"{service.name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                self.mapped(service, service.command),
                env=environ,
                cwd=self.root,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        state = HealthState(check=service.healthcheck) if service.healthcheck is not None else None
        self.started.append(service.name)
        self._running[service.name] = _Running(
            service=service, process=process, log_path=log_path, begin_s=time.monotonic(), environ=environ, state=state
        )

    def _environ(self, service: Service) -> dict[str, str]:
        own = dict(zip(service.environment, self.mapped(service, list(service.environment.values())), strict=True))
        # The image's part. A home that can't be written stands for the read-only root.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": "/nonexistent", **self._extra, **own}


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Run beside the test; joined by the caller."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _addresses(services: Sequence[Service]) -> set[tuple[str, int]]:
    """(service, port) of every URL in an environment that names a service."""
    names = "|".join(re.escape(service.name) for service in services)
    pattern = re.compile(rf"//({names}):(\d+)")
    values = [value for service in services for value in service.environment.values()]
    return {(name, int(port)) for value in values for name, port in pattern.findall(value)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
