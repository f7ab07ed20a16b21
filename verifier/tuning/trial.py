"""One engine start: launch, measure, stop, and say how it ended; if anything of it is left, the result says so."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from verifier.sglang.client import SGLangVerifierClient
from verifier.sglang.command import EngineCommand, render_command
from verifier.sglang.config import SGLangConfig
from verifier.sglang.launcher import EngineLauncher, EngineStartFailed
from verifier.sglang.signatures import Diagnosis, diagnose
from verifier.tuning.plan import Rules, Workload
from verifier.tuning.process_tree import Leader, cpu_share, end_new_children, end_session, leader_of
from verifier.tuning.records import Diagnosed, Outcome, TrialResult
from verifier.tuning.warden import descendants
from verifier.tuning.workload import Measured, measure
from wire.errors import PeerError, PeerLate, PeerRefused

__all__ = ["EngineTrials"]

log = structlog.get_logger("tune")

_TAIL_LINES = 40
_READ_TAIL_BYTES = 256 * 1024
_CONNECT_S = 30.0
_DEATH_WAIT_S = 5.0
_WARDEN = Path(__file__).with_name("warden.py")


class EngineTrials:
    """Runs trials of one profile, one at a time.

    Args:
        config: section [sglang] of the profile. model_path: what it serves, resolved.
        rules, workload: of the plan. dir_path: where each trial gets a directory for its log.
    """

    def __init__(
        self, config: SGLangConfig, *, model_path: str, rules: Rules, workload: Workload, dir_path: Path
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._rules = rules
        self._workload = workload
        self._dir_path = dir_path

    def command(self, config: SGLangConfig) -> EngineCommand:
        """The profile's command under a warden, which ends with us and takes the engine along."""
        rendered = render_command(config, model_path=self._model_path)
        argv = (sys.executable, "-I", str(_WARDEN), str(os.getpid()), *rendered.argv)
        return dataclasses.replace(rendered, argv=argv)

    async def run(
        self,
        trial_id: int,
        config: SGLangConfig,
        *,
        on_started: Callable[[Leader], None],
        on_phase: Callable[[str, float], None],
    ) -> TrialResult:
        """One start with ``config``; every failure of the engine is a result.

        Args:
            on_started: called once with the engine's first process. on_phase: what happens, and the share loaded.
        """
        state_dir = self._dir_path / f"trial-{trial_id}"
        isolated = dataclasses.replace(config, state_dir=str(state_dir), fallback_args=(), fallback_env=())
        launcher = EngineLauncher(isolated, model_path=self._model_path, command=self.command(isolated))
        before, leaders = frozenset(descendants(os.getpid())), list[Leader]()

        def progress(phase: str, share: float) -> None:
            if not leaders and launcher.pid is not None and (leader := leader_of(launcher.pid)) is not None:
                leaders.append(leader)
                on_started(leader)
            on_phase(phase, share)

        begin_s = time.monotonic()
        try:
            result = await self._start_and_measure(launcher, isolated, progress, begin_s)
        finally:
            await launcher.stop()
            left = [pid for leader in leaders for pid in end_session(leader)] + end_new_children(before)
        is_reverted = not left and _port_is_free(isolated.host, isolated.port)
        if not is_reverted:
            log.error("not reverted", processes=left, port=isolated.port)
        return _with_log(result, launcher.log_path, is_reverted=is_reverted)

    async def _start_and_measure(
        self,
        launcher: EngineLauncher,
        config: SGLangConfig,
        on_phase: Callable[[str, float], None],
        begin_s: float,
    ) -> TrialResult:
        try:
            await launcher.start(on_progress=on_phase)
        except EngineStartFailed as error:
            outcomes: dict[str, Outcome] = {"stalled": "stalled", "late": "late"}
            outcome = outcomes.get(error.kind, "crashed")
            return _failure(outcome, str(error), launcher.phase, error.diagnosis)
        load_s = round(time.monotonic() - begin_s, 2)
        phases = ["ready"]

        def enter(phase: str) -> None:
            phases.append(phase)
            on_phase(phase, 1.0)

        try:
            measured = await self._measure(launcher, config, enter)
        except PeerRefused as error:
            return _failure("crashed", f"it refused while {phases[-1]}: {error}", phases[-1], _diagnosed(launcher))
        except PeerLate as error:
            busy = cpu_share(launcher.pid) if launcher.pid is not None else 0.0
            message = f"no answer while {phases[-1]} ({error}); its processes used {busy:.1f} cores meanwhile"
            return _failure("hung", message, phases[-1], _diagnosed(launcher))
        except PeerError as error:
            return _failure("crashed", f"it went away while {phases[-1]} ({error})", phases[-1], _diagnosed(launcher))
        return TrialResult(outcome="measured", series=measured.series, answer=measured.answer, load_s=load_s)

    async def _measure(
        self, launcher: EngineLauncher, config: SGLangConfig, on_phase: Callable[[str], None]
    ) -> Measured:
        """Measure, and stop as soon as the engine's process ends.

        Raises:
            PeerError: it died, hung or refused.
        """
        ring_path = launcher.log_path.with_name("ring")
        client = SGLangVerifierClient(dataclasses.replace(config, features="off"), ring_path=ring_path)
        running = asyncio.create_task(client.run())
        work = asyncio.create_task(self._work(client, on_phase))
        death = asyncio.create_task(launcher.wait())
        try:
            await asyncio.wait({work, death, running}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                client.peer_lost("the engine's process ended")
                await asyncio.wait({work}, timeout=_DEATH_WAIT_S)
            if work.done() and isinstance(work.exception(), PeerError) and not isinstance(work.exception(), PeerLate):
                await asyncio.wait({death}, timeout=_DEATH_WAIT_S)  # its log tells more once it is dead
            return await work
        finally:
            for task in (work, death, running):
                task.cancel()
            await asyncio.gather(work, death, running, return_exceptions=True)

    async def _work(self, client: SGLangVerifierClient, on_phase: Callable[[str], None]) -> Measured:
        await client.connect(timeout_s=_CONNECT_S)
        deadline_s = time.monotonic() + _CONNECT_S
        while not (await client.status(timeout_s=_CONNECT_S)).is_ready:
            if time.monotonic() > deadline_s:
                raise PeerLate("it says it is not ready")
            await asyncio.sleep(0.1)
        limit_s = self._rules.measure_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await measure(
                    client, self._workload, hang_timeout_s=self._rules.hang_timeout_s, on_phase=on_phase
                )
        except TimeoutError:
            raise PeerLate(f"the workload took more than {limit_s:g} s") from None


def _failure(outcome: Outcome, message: str, phase: str, found: Diagnosis | None) -> TrialResult:
    if found is not None and found.name == "nccl_hang":
        outcome = "hung"  # the watchdog's abort looks like a crash
    diagnosis = None if found is None else Diagnosed(**dataclasses.asdict(found))
    return TrialResult(outcome=outcome, message=message, phase=phase, diagnosis=diagnosis)


def _diagnosed(launcher: EngineLauncher) -> Diagnosis | None:
    return diagnose(_tail(launcher.log_path, 400))


def _with_log(result: TrialResult, log_path: Path, *, is_reverted: bool) -> TrialResult:
    tail = () if result.outcome == "measured" else tuple(_tail(log_path, _TAIL_LINES))
    return TrialResult(
        outcome=result.outcome,
        message=result.message,
        phase=result.phase,
        diagnosis=result.diagnosis,
        series=result.series,
        answer=result.answer,
        load_s=result.load_s,
        is_reverted=is_reverted,
        log_path=str(log_path),
        log_tail=tail,
    )


def _tail(path: Path, num_lines: int) -> list[str]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_TAIL_BYTES))
        text = file.read().decode("utf-8", "replace").replace("\r", "\n")
        return [line[:400] for line in text.split("\n") if line.strip()][-num_lines:]
    return []


def _port_is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
