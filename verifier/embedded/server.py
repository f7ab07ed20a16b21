"""The verifier process: an asyncio thread that talks, and one engine thread that loads and computes.

The talking thread answers Hello and StatusRequest at any time, also while the model loads or a pass runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from verifier.embedded.engine import EmbeddedEngine
from wire.codec import VERIFIER_CODEC
from wire.errors import CodecError, LinkClosed, LinkOverflow
from wire.link import ServerLink, answer_hello
from wire.messages import (
    CloseRequest,
    Hello,
    Status,
    StatusRequest,
    ToVerifier,
    VerifierInfo,
    VerifyBatch,
    VerifyReply,
    VerifyResult,
)

__all__ = ["EngineLoader", "LoadedEngine", "VerifierServer"]

# Everything that can be waiting: more than this means the gateway does not bound itself.
_INBOX_LIMIT = 8192
_GRAMMAR_POLL_S = 0.002

log = structlog.get_logger("verifier")


class LoadedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What the loader hands to the server."""

    engine: EmbeddedEngine
    info: VerifierInfo


EngineLoader = Callable[[Callable[[str, float], None]], LoadedEngine]


class VerifierServer:
    """Serves one engine at one endpoint.

    Args:
        endpoint: ZeroMQ address to bind.
        ring_path: told to clients in Welcome and Status.
        load: runs in the engine thread; gets a progress callback (phase, share done).
    """

    def __init__(self, endpoint: str, *, ring_path: str, load: EngineLoader) -> None:
        self._endpoint = endpoint
        self._ring_path = ring_path
        self._load = load
        self._inbox: queue.Queue[tuple[bytes, VerifyBatch | CloseRequest] | None] = queue.Queue(_INBOX_LIMIT)
        self._owners: dict[str, bytes] = {}  # request id -> the peer its results go to; engine thread only
        self._phase, self._progress = "starting", 0.0
        self._loaded: LoadedEngine | None = None
        self._error: str | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, or until loading fails.

        Raises:
            RuntimeError: the model could not be loaded; the reason was reported to clients first.
        """
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        link = ServerLink(self._endpoint, VERIFIER_CODEC)

        def send(peer: bytes, message: msgspec.Struct) -> None:
            loop.call_soon_threadsafe(self._send, link, peer, message)

        def ended() -> None:
            loop.call_soon_threadsafe(stopped.set)

        thread = threading.Thread(target=self._run_engine, args=(send, ended), name="engine", daemon=True)
        thread.start()
        receiver = asyncio.create_task(self._receive(link))
        try:
            await stopped.wait()
        finally:
            receiver.cancel()
            self._inbox.put(None)
            # A pass takes well under a second; loading may not be interruptible, and the process ends anyway.
            await asyncio.to_thread(thread.join, 2.0)
            link.close()
        if self._error is not None:
            raise RuntimeError(self._error)

    async def _receive(self, link: ServerLink[ToVerifier]) -> None:
        while True:
            try:
                peer, message = await link.receive()
            except CodecError as error:
                log.warning("malformed message dropped", error=str(error))
                continue
            match message:
                case Hello():
                    self._send(link, peer, answer_hello(message, role="verifier", ring_path=self._ring_path))
                case StatusRequest():
                    self._send(link, peer, self._status(message.request_number))
                case VerifyBatch() | CloseRequest():
                    try:
                        self._inbox.put_nowait((peer, message))
                    except queue.Full:
                        log.error("inbox is full, message dropped", limit=_INBOX_LIMIT)

    def _send(self, link: ServerLink[ToVerifier], peer: bytes, message: msgspec.Struct) -> None:
        try:
            link.send(peer, message)
        except (LinkClosed, LinkOverflow) as error:
            log.warning("reply dropped", error=str(error), kind=type(message).__name__)

    def _status(self, request_number: int) -> Status:
        loaded = self._loaded
        return Status(
            request_number=request_number,
            phase=self._phase,
            progress=self._progress,
            is_ready=loaded is not None,
            counters=dict(loaded.engine.counters) if loaded else {},
            verifier=loaded.info if loaded else None,
            ring_path=self._ring_path,
            error=self._error,
        )

    def _run_engine(self, send: Callable[[bytes, msgspec.Struct], None], ended: Callable[[], None]) -> None:
        def progress(phase: str, share: float) -> None:
            if phase != self._phase:
                log.info("phase", phase=phase)
            self._phase, self._progress = phase, share

        begin = time.monotonic()
        try:
            loaded = self._load(progress)
        except Exception as error:
            logging.getLogger("verifier").exception("loading failed")
            self._phase, self._error = "failed", str(error)
            time.sleep(1.0)  # let waiting clients read the reason before the endpoint goes
            ended()
            return
        self._loaded = loaded
        progress("ready", 1.0)
        log.info("ready", pid=os.getpid(), seconds=round(time.monotonic() - begin, 1))
        while self._take(loaded.engine):
            self._step(loaded.engine, send)

    def _take(self, engine: EmbeddedEngine) -> bool:
        """Move everything that has arrived into the engine; waits only if it has nothing to do."""
        try:
            # While only grammars are waited for, somebody has to look whether they are there.
            entry = self._inbox.get(block=not engine.has_work, timeout=_GRAMMAR_POLL_S if engine.is_compiling else None)
            while entry is not None:
                peer, message = entry
                match message:
                    case VerifyBatch():
                        self._owners.update((item.request_id, peer) for item in message.items)
                        engine.add(message.items)
                    case CloseRequest():
                        engine.close(message.request_id)
                        self._owners.pop(message.request_id, None)
                entry = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self, engine: EmbeddedEngine, send: Callable[[bytes, msgspec.Struct], None]) -> None:
        try:
            reply = engine.step()
        except Exception:
            logging.getLogger("verifier").exception("a forward pass failed")
            reply = engine.fail_waiting("the target failed to compute this batch")
        if reply is None:
            return
        by_peer: dict[bytes, list[VerifyResult]] = {}
        for result in reply.results:
            peer = self._owners.get(result.request_id)
            if peer is not None:
                by_peer.setdefault(peer, []).append(result)  # type: ignore[arg-type]
        for peer, results in by_peer.items():
            send(peer, VerifyReply(**{**msgspec.structs.asdict(reply), "results": tuple(results)}))
