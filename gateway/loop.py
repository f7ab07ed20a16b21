"""The gateway's engine: admission, one RequestRun per generation, drain, and the snapshot of it all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Protocol

from gateway.drain_rate import DrainRate
from gateway.engine_config import EngineConfig
from gateway.errors import Draining, NotReady, QueueFull, TargetTimeout
from gateway.ports import GenerationRequest, LoadPhase, ModelCard
from gateway.request_run import Output, RequestRun, RunParts
from gateway.stats import PeerStats, StatsSnapshot
from wire.messages import VerifierInfo

__all__ = ["GatewayEngine", "PeerView"]

# How long the edge may take to send the error of a generation that outlived the drain.
_FAREWELL_S = 2.0


class PeerView(Protocol):
    """What the engine reads of the supervision of another process."""

    @property
    def is_up(self) -> bool:
        """It is connected and has loaded."""
        ...

    @property
    def progress(self) -> float | None:
        """Share of its current load phase that is done."""
        ...

    def stats(self) -> PeerStats:
        """For /stats."""
        ...


class GatewayEngine:
    """Implements ports.Engine over one verifier and one drafter.

    Args:
        parts: what requests run on.
        verifier_peer, drafter_peer: how the other processes are.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: RunParts,
        *,
        verifier_peer: PeerView,
        drafter_peer: PeerView,
        version: str,
    ) -> None:
        self._config = config
        self._parts = parts
        self._verifier_peer = verifier_peer
        self._drafter_peer = drafter_peer
        self._version = version
        self._begin_s = parts.clock()
        self._created_s = int(time.time())
        self._num_admitted = 0
        self._drain_rate = DrainRate()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._slots = asyncio.Semaphore(config.max_running)
        self._info: VerifierInfo | None = None
        self._is_draining = False
        self._is_over = False
        self._runs: set[RequestRun] = set()

    # ------------------------------------------------------------ for the composition root

    def set_target(self, info: VerifierInfo | None) -> None:
        """The target came up with these properties, or went down."""
        self._info = info or self._info

    async def drain(self) -> None:
        """Take no new requests, wait for the running ones as long as the config allows, end the rest with an error.

        A stream that is merely cut off looks complete to a careless client; the error event says that it is not.
        """
        self._is_draining = True
        for limit_s in (self._config.drain_timeout_s, _FAREWELL_S):
            try:
                async with asyncio.timeout(limit_s):
                    await self._is_idle.wait()
                return
            except TimeoutError:
                self._is_over = True
                for run in self._runs:
                    run.end_early(_shut_down())

    # ------------------------------------------------------------ ports.Engine

    def admit(self, num_choices: int) -> None:
        """See Engine.admit."""
        if self._is_draining:
            raise Draining("the server is shutting down", retry_after_s=5.0)
        phase = self.load_phase()
        if not phase.is_ready:
            raise NotReady(f"the model is not ready: {phase.phase}", retry_after_s=2.0)
        limit = self._config.max_running + self._config.max_waiting
        if self._num_admitted + num_choices > limit:
            raise QueueFull(
                f"{self._num_admitted} requests are running or waiting, the limit is {limit}",
                retry_after_s=self._drain_rate.wait_s(self._num_admitted + num_choices - limit, self._parts.clock()),
            )
        self._num_admitted += num_choices
        self._is_idle.clear()

    def release(self, num_choices: int) -> None:
        """See Engine.release."""
        self._num_admitted -= num_choices
        self._drain_rate.observe(num_choices, self._parts.clock())
        if self._num_admitted == 0:
            self._is_idle.set()

    def stats(self) -> StatsSnapshot:
        """See Engine.stats."""
        return self._parts.recorder.snapshot(
            version=self._version,
            model=self._config.model_name,
            uptime_s=self._parts.clock() - self._begin_s,
            reports=self._parts.controller.reports(),
            verifier=self._verifier_peer.stats(),
            drafter=self._drafter_peer.stats(),
        )

    def load_phase(self) -> LoadPhase:
        """See Engine.load_phase."""
        phase = self._verifier_peer.stats().phase
        if self._verifier_peer.is_up and self._info is None:
            phase = "loading tokenizer"  # the target is up, but no prompt could be read yet
        return LoadPhase(
            is_ready=self._verifier_peer.is_up and self._info is not None and not self._is_draining,
            is_draining=self._is_draining,
            phase="draining" if self._is_draining else phase,
            progress=self._verifier_peer.progress,
        )

    def model_card(self) -> ModelCard:
        """See Engine.model_card; sizes are 0 until the target has loaded."""
        return ModelCard(
            name=self._config.model_name,
            aliases=self._config.model_aliases,
            context_len=self._info.context_len if self._info else 0,
            vocab_size=self._info.vocab_size if self._info else 0,
            created_s=self._created_s,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """See Engine.generate."""
        arrived_s = self._parts.clock()
        limit_s = min(request.deadline_s or self._config.request_timeout_s, self._config.request_timeout_s)
        self._parts.recorder.num_waiting += 1
        try:
            await asyncio.wait_for(self._slots.acquire(), timeout=limit_s)
        except TimeoutError:
            self._parts.recorder.failed["queue_timeout"] += 1
            raise TargetTimeout("the request waited too long for its turn", code="queue_timeout") from None
        finally:
            self._parts.recorder.num_waiting -= 1
        if self._is_over:
            self._slots.release()
            self._parts.recorder.failed["draining"] += 1
            raise _shut_down()
        self._parts.recorder.num_running += 1
        context_len = self._info.context_len if self._info else len(request.prompt_ids) + request.max_new_tokens
        run = RequestRun(
            self._parts, request, context_len=context_len, arrived_s=arrived_s, deadline_s=arrived_s + limit_s
        )
        self._runs.add(run)
        try:
            async for output in run.outputs():
                yield output
        finally:
            self._runs.remove(run)
            run.close()
            self._parts.recorder.num_running -= 1
            self._slots.release()


def _shut_down() -> Draining:
    return Draining("the server shut down before the answer was complete", retry_after_s=5.0)
