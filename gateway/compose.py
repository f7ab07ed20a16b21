"""Composition root of the gateway process: the one place that names concrete classes, from start to stop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from drafter.client import DrafterClient
from drafter.config import DrafterConfig
from gateway.batcher import VerifyBatcher
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from gateway.http.app import create_app, start_server
from gateway.http.edge import EDGE
from gateway.http.key_reload import reload_keys
from gateway.http.otel import open_exporter
from gateway.late_codec import LateCodec
from gateway.loop import GatewayEngine
from gateway.peers import Peer
from gateway.ports import LoadPhase
from gateway.recorder import Recorder
from gateway.request_run import RunParts
from gateway.speculation.controller import Controller, ControllerLimits
from gateway.speculation.trace import TracedController
from gateway.text.tokenizer import load_text_codec
from gateway.trace_file import TraceWriter
from verifier.embedded.client import EmbeddedVerifierClient
from verifier.embedded.config import VerifierConfig
from verifier.sglang.client import SGLangVerifierClient
from verifier.sglang.config import SGLangConfig
from wire.messages import DrafterInfo, Status, VerifierInfo
from wire.settings import ConfigError, env_name, section_environ

__all__ = ["GatewaySettings", "serve"]

log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """All sections of a profile. The verifier's and drafter's are passed on to the children the gateway starts."""

    gateway: GatewayConfig
    engine: EngineConfig
    speculation: SpeculationConfig
    verifier: VerifierConfig
    drafter: DrafterConfig
    version: str
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    def __post_init__(self) -> None:
        """Check what only two sections together can get wrong.

        Raises:
            ConfigError: the tensor ring can't hold a context that is to be drafted for. A re-sync announces the
                features of the whole context at once, and the first would be overwritten before they are read.
        """
        if self.engine.backend != "embedded" or self.speculation.mode == "off":
            return
        longest = min(self.drafter.max_context_len, self.verifier.context_len or self.drafter.max_context_len)
        if self.verifier.ring_slots * self.verifier.ring_slot_rows < longest:
            least = -(-longest // self.verifier.ring_slot_rows)
            raise ConfigError(
                "verifier.ring_slots", f"must be at least {least} for drafter.max_context_len = {longest}"
            )


async def serve(settings: GatewaySettings, *, on_phase: Callable[[LoadPhase], None] | None = None) -> None:
    """Start everything, serve until SIGTERM or SIGINT, drain, stop everything.

    Args:
        on_phase: told where loading stands, several times a second until the model is ready.

    Raises:
        OSError: the port is taken. ProtocolMismatch: another version of verifier or drafter answered.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    with _private_places(settings) as resolved:
        await _serve(resolved, stopped, on_phase)
    log.info("stopped")


async def _serve(
    settings: GatewaySettings, stopped: asyncio.Event, on_phase: Callable[[LoadPhase], None] | None
) -> None:
    async with asyncio.TaskGroup() as group:
        gateway = _Gateway(settings, group)
        tasks = gateway.start()
        # Without a handler the signal would end the process, so it has one with and without a key file.
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGHUP, reload_keys, gateway.app[EDGE].keys, settings.gateway
        )
        runner = await start_server(gateway.app, settings.gateway)
        try:
            host, port = runner.addresses[0][:2]
            log.info("listening", url=f"http://{host}:{port}", model=settings.engine.model_name)
            if on_phase is not None:
                tasks.append(group.create_task(_report_phases(gateway.engine, on_phase)))
            await stopped.wait()
            log.info("draining", running=gateway.engine.stats().requests.running)
            await gateway.engine.drain()
        finally:
            await runner.cleanup()
            if gateway.spans is not None:
                await asyncio.to_thread(gateway.spans.close)
            for task in tasks:
                task.cancel()


async def _report_phases(engine: GatewayEngine, on_phase: Callable[[LoadPhase], None]) -> None:
    while not (phase := engine.load_phase()).is_ready:
        on_phase(phase)
        await asyncio.sleep(0.2)
    on_phase(phase)


@contextlib.contextmanager
def _private_places(settings: GatewaySettings) -> Iterator[GatewaySettings]:
    """Resolve "auto" endpoints and ring path to private names, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="breakeven-"))
    verifier, drafter = settings.verifier, settings.drafter
    if settings.engine.backend == "sglang" and settings.sglang.tap_ring_path:
        verifier = replace(verifier, ring_path=settings.sglang.tap_ring_path)  # the plugin's, which owns the file
    is_private_ring = verifier.ring_path == "auto"
    if verifier.endpoint == "auto":
        verifier = replace(verifier, endpoint=f"ipc://{directory}/verifier.sock")
    if is_private_ring:
        shared = Path("/dev/shm")  # noqa: S108 - a random name, created with mode 0600
        base = shared if shared.is_dir() else directory
        verifier = replace(verifier, ring_path=str(base / f"breakeven-ring-{os.getpid()}-{secrets.token_hex(4)}"))
    if settings.engine.spawn_drafter:
        drafter = replace(drafter, endpoint=f"ipc://{directory}/drafter.sock", ring_path=Path(verifier.ring_path))
    try:
        yield replace(settings, verifier=verifier, drafter=drafter)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if is_private_ring:
            Path(verifier.ring_path).unlink(missing_ok=True)  # a verifier that was killed could not


class _Gateway:
    """The gateway's parts, wired."""

    def __init__(self, settings: GatewaySettings, group: asyncio.TaskGroup) -> None:
        self._settings = settings
        self._group = group
        self._verifier = _verifier_client(settings)
        self._drafter = DrafterClient(settings.drafter.endpoint)
        self._codec = LateCodec()
        self._target: VerifierInfo | None = None
        self._has_target = asyncio.Event()
        speculation = settings.speculation
        recorder = Recorder(max_draft_tokens=speculation.candidates[-1])
        self._controller = _controller(speculation)
        self._batcher = VerifyBatcher(
            self._verifier,
            decode_timeout_s=settings.engine.verify_timeout_s,
            prompt_timeout_s=settings.engine.prompt_timeout_s,
            clock=time.monotonic,
            on_batch=recorder.batch_done,
        )
        self._verifier_peer = Peer(
            "verifier",
            self._verifier,
            command=self._verifier_command if _spawns_verifier(settings.engine) else None,
            on_up=self._verifier_up,
            on_down=self._verifier_down,
            clock=time.monotonic,
        )
        self._drafter_peer = Peer(
            "drafter",
            self._drafter,
            command=self._drafter_command if settings.engine.spawn_drafter else None,
            on_up=self._drafter_up,
            on_down=lambda reason: self._controller.set_drafter(is_up=False, reason=f"drafter down: {reason}"),
            clock=time.monotonic,
        )
        parts = RunParts(
            speculation=speculation,
            verifier=self._verifier,
            drafter=self._drafter,
            batcher=self._batcher,
            controller=self._controller,
            recorder=recorder,
            codec=self._codec,
            clock=time.monotonic,
            spawn=group.create_task,
        )
        self.engine = GatewayEngine(
            settings.engine,
            parts,
            verifier_peer=self._verifier_peer,
            drafter_peer=self._drafter_peer,
            version=settings.version,
        )
        self.spans = open_exporter(settings.gateway.otlp_endpoint, version=settings.version)
        self.app = create_app(self.engine, self._codec, settings.gateway, spans=self.spans)

    def start(self) -> list[asyncio.Task[None]]:
        """Start all loops; the caller cancels them."""
        loops = [self._verifier.run(), self._drafter.run(), self._batcher.run(), self._verifier_peer.run()]
        if self._settings.speculation.mode != "off":
            loops.append(self._run_drafter())
        return [self._group.create_task(loop) for loop in loops]

    async def _run_drafter(self) -> None:
        # The drafter takes its embedding from the target's directory, which the verifier may first have to convert.
        await self._has_target.wait()
        await self._drafter_peer.run()

    def _verifier_command(self) -> tuple[Sequence[str], dict[str, str]]:
        config = replace(self._settings.verifier, parent_pid=os.getpid())
        environ = {**os.environ, **self._log_environ(), **section_environ("verifier", config)}
        return [sys.executable, "-m", "breakeven", "verifier"], environ

    def _drafter_command(self) -> tuple[Sequence[str], dict[str, str]]:
        assert self._target is not None
        config = replace(self._settings.drafter, parent_pid=os.getpid())
        if config.target_model_dir is None:
            config = replace(config, target_model_dir=Path(self._target.model_dir))
        environ = {**os.environ, **self._log_environ(), **section_environ("drafter", config)}
        return [sys.executable, "-m", "breakeven", "drafter"], environ

    def _log_environ(self) -> dict[str, str]:
        return {env_name("engine", "log_format"): self._settings.engine.log_format}

    def _verifier_up(self, status: Status) -> None:
        assert status.verifier is not None
        self._target = status.verifier
        self._group.create_task(self._load_text(status.verifier))

    async def _load_text(self, info: VerifierInfo) -> None:
        codec = await asyncio.to_thread(load_text_codec, Path(info.model_dir))
        self._codec.set(codec)
        self.engine.set_target(info)
        self._has_target.set()
        log.info("ready", kernels=info.kernels, is_row_invariant=info.is_row_invariant, context_len=info.context_len)

    def _verifier_down(self, reason: str) -> None:
        log.error("the target is down", reason=reason)

    def _drafter_up(self, status: Status) -> None:
        assert status.drafter is not None
        assert self._target is not None
        problem = _mismatch(self._target, status.drafter)
        if problem is not None:
            log.error("the head does not fit the target, speculation stays off", reason=problem)
        self._controller.set_drafter(is_up=problem is None, reason=problem or "connected")


def _verifier_client(settings: GatewaySettings) -> EmbeddedVerifierClient | SGLangVerifierClient:
    verifier = settings.verifier
    if settings.engine.backend == "embedded":
        return EmbeddedVerifierClient(verifier.endpoint)
    return SGLangVerifierClient(
        settings.sglang,
        ring_path=Path(verifier.ring_path),
        ring_slots=verifier.ring_slots,
        ring_slot_rows=verifier.ring_slot_rows,
    )


def _controller(speculation: SpeculationConfig) -> Controller:
    limits = ControllerLimits(
        mode=speculation.mode,
        candidates=speculation.candidates,
        default_num_draft_tokens=speculation.num_draft_tokens,
    )
    if not speculation.trace_path:
        return Controller(limits)
    trace = TraceWriter(Path(speculation.trace_path))
    atexit.register(trace.close)
    return TracedController(limits, trace.write)


def _spawns_verifier(engine: EngineConfig) -> bool:
    return engine.backend == "embedded" and engine.spawn_verifier


def _mismatch(target: VerifierInfo, head: DrafterInfo) -> str | None:
    """Why this head can't draft for this target, or None. A wrong layer would not fail, only never be accepted."""
    if head.aux_layer_ids and head.aux_layer_ids != target.aux_layer_ids:
        return f"the head wants the inputs of layers {head.aux_layer_ids}, the target gives {target.aux_layer_ids}"
    if head.feature_size != len(target.aux_layer_ids) * target.hidden_size:
        return f"the head takes features of {head.feature_size}, the target gives {3 * target.hidden_size}"
    if head.target_vocab_size > target.vocab_size:
        return f"the head knows {head.target_vocab_size} ids, the target {target.vocab_size}"
    return None
