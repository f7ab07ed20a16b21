"""Starts SGLang, watches it load, says why it died, and falls back to settings that worked before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import structlog

from verifier.sglang.command import EngineCommand, fallback_command, known_good, remember_good, render_command
from verifier.sglang.config import SGLangConfig, engine_environ
from verifier.sglang.http import EngineHttp
from verifier.sglang.load_watch import LoadWatch
from verifier.sglang.signatures import Diagnosis, diagnose
from wire.errors import PeerError

__all__ = ["EngineLauncher", "EngineStartFailed", "StartFailure"]

log = structlog.get_logger("launcher")

_LOOK_S = 0.5
_STOP_S = 15.0
_WARM_UP_S = 60.0

StartFailure = Literal["exited", "stalled", "late", "not_startable"]


class EngineStartFailed(Exception):
    """It did not come up. ``diagnosis`` is None when no signature matched; ``log_path`` has all it wrote.

    ``kind``: it exited, stalled while loading, was late, or could not be started at all.
    """

    def __init__(
        self, message: str, *, diagnosis: Diagnosis | None, log_path: Path, kind: StartFailure = "exited"
    ) -> None:
        text = message if diagnosis is None else f"{message}: {diagnosis.cause}. Remedy: {diagnosis.remedy}"
        super().__init__(text)
        self.diagnosis = diagnosis
        self.log_path = log_path
        self.kind: StartFailure = kind


class EngineLauncher:
    """One SGLang server.

    Args:
        config: section [sglang]. model_path: what it serves, resolved.
        command: overrides the rendered one, for tests.
    """

    def __init__(self, config: SGLangConfig, *, model_path: str, command: EngineCommand | None = None) -> None:
        self._config = config
        self._first = command or render_command(config, model_path=model_path)
        self._fallback = fallback_command(config, model_path=model_path)
        self._state_dir = config.resolved_state_dir
        self._process: asyncio.subprocess.Process | None = None
        self._pump: asyncio.Task[None] | None = None
        self._watch = LoadWatch(stall_timeout_s=config.stall_timeout_s, now_s=time.monotonic())
        self._answers_since_s: float | None = None
        self.log_path = self._state_dir / "sglang.log"

    async def start(self, *, on_progress: Callable[[str, float], None]) -> EngineCommand:
        """Start it and wait until it serves; tries fallback and last known-good settings after a failure.

        Returns:
            The command that came up.

        Raises:
            EngineStartFailed: nothing came up; the error is that of the profile's own settings.
        """
        commands = [self._first, self._fallback, known_good(self._state_dir, like=self._first)]
        first_error: EngineStartFailed | None = None
        for command in commands:
            if command is None:
                continue
            try:
                await self._start_one(command, on_progress)
            except EngineStartFailed as error:
                log.error("did not come up", settings=command.label, reason=str(error), log=str(self.log_path))
                first_error = first_error or error
                if error.diagnosis is not None and error.diagnosis.name in ("port_taken", "module_missing"):
                    break  # other settings can't help
                continue
            remember_good(self._state_dir, command)
            return command
        assert first_error is not None
        raise first_error

    async def wait(self) -> Diagnosis | None:
        """Wait until it ends, and say why if its log tells."""
        assert self._process is not None
        pump = self._pump
        await self._process.wait()
        if pump is not None:
            await asyncio.wait({pump})  # the rest of its log; not awaited itself, stop() may cancel it
        return diagnose(list(self._watch.lines))

    @property
    def phase(self) -> str:
        """Where it stands, by its log."""
        return self._watch.phase

    @property
    def pid(self) -> int | None:
        """Of its first process, which leads its session and process group; None if it does not run."""
        return None if self._process is None else self._process.pid

    async def stop(self) -> None:
        """End it and all it started."""
        process, self._process = self._process, None
        if process is not None:
            # Its workers share its process group; SGLang's own handler ends some of them, not all.
            for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), patience_s)
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pump

    async def _start_one(self, command: EngineCommand, on_progress: Callable[[str, float], None]) -> None:
        self._require_free_port()
        log.info("starting SGLang", settings=command.label, command=command.shell_line)
        self._watch = LoadWatch(stall_timeout_s=self._config.stall_timeout_s, now_s=time.monotonic())
        self._answers_since_s = None
        await self._spawn(command)
        try:
            await self._until_ready(on_progress)
        except BaseException:
            await self.stop()
            raise

    def _require_free_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._config.host, self._config.port))
            except OSError as error:
                message = f"port {self._config.port} can't be used"
                found = diagnose([str(error)])
                raise EngineStartFailed(
                    message, diagnosis=found, log_path=self.log_path, kind="not_startable"
                ) from None

    async def _spawn(self, command: EngineCommand) -> None:
        self._state_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=engine_environ(command.environ),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                limit=1 << 20,
            )
        except OSError as error:
            found = diagnose(["No module named 'sglang'"])
            message = f"{command.argv[0]} can't be run ({error.strerror})"
            raise EngineStartFailed(message, diagnosis=found, log_path=self.log_path, kind="not_startable") from None
        assert self._process.stdout is not None
        self._pump = asyncio.create_task(self._read_log(self._process.stdout, self._watch))

    async def _read_log(self, stream: asyncio.StreamReader, watch: LoadWatch) -> None:
        pending = ""
        with self.log_path.open("w") as file:
            while data := await stream.read(1 << 16):
                text = data.decode("utf-8", "replace")
                file.write(text)
                file.flush()
                *lines, pending = (pending + text).replace("\r", "\n").split("\n")
                for line in lines:
                    watch.line(line, now_s=time.monotonic())
            if pending:
                watch.line(pending, now_s=time.monotonic())

    async def _until_ready(self, on_progress: Callable[[str, float], None]) -> None:
        process, watch, begin_s = self._process, self._watch, time.monotonic()
        assert process is not None
        http = EngineHttp(self._config.url, api_key=self._config.api_key)
        await http.open()
        try:
            while not await self._is_serving(http):
                now_s = time.monotonic()
                on_progress(watch.phase, watch.progress)
                if process.returncode is not None:
                    await asyncio.sleep(0)
                    if self._pump is not None:
                        await self._pump
                    raise self._failed(f"SGLang exited with status {process.returncode} while {watch.phase}")
                watch.read(_bytes_read(process.pid), now_s=now_s)
                if (still_s := watch.stalled_for_s(now_s)) is not None:
                    raise self._failed(f"SGLang has stalled for {still_s:.0f} s while {watch.phase}", kind="stalled")
                if now_s - begin_s > self._config.load_timeout_s:
                    message = f"SGLang was not ready within {self._config.load_timeout_s:g} s"
                    raise self._failed(message, kind="late")
                await asyncio.sleep(_LOOK_S)
        finally:
            await http.close()
        on_progress("ready", 1.0)

    async def _is_serving(self, http: EngineHttp) -> bool:
        """It answers, and its own warm-up request has passed; where the log is silent about that, a while after."""
        try:
            await http.get("/model_info", timeout_s=5.0)
        except PeerError:
            return False
        now_s = time.monotonic()
        self._answers_since_s = now_s if self._answers_since_s is None else self._answers_since_s
        return self._watch.phase == "ready" or now_s - self._answers_since_s >= _WARM_UP_S

    def _failed(self, message: str, *, kind: StartFailure = "exited") -> EngineStartFailed:
        found = diagnose(list(self._watch.lines))
        return EngineStartFailed(message, diagnosis=found, log_path=self.log_path, kind=kind)


def _bytes_read(session_id: int) -> int:
    """Bytes read so far by all processes of a session, from the page cache or not; 0 where /proc is missing."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session_id:
                continue
            for line in (entry / "io").read_text().splitlines():
                name, _, value = line.partition(":")
                if name in ("rchar", "read_bytes"):
                    total += int(value)
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile, or belongs to someone else
    return total
