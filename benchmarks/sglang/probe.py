"""A second plugin inside SGLang, for measuring only: writes when a request passes each station, on the shared clock.

One line per event, ``<monotonic ns> <event> [number]``, into ``$BREAKEVEN_PROBE_DIR/<pid>.log``. CLOCK_MONOTONIC is one
clock for all processes of a machine, so the client can lay its own times beside these. An event costs about 2 us.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["STATIONS", "register"]

log = logging.getLogger("breakeven.probe")

# Where a request passes, in this order: event, target, kind of hook.
STATIONS: Final[tuple[tuple[str, str, str], ...]] = (
    ("tokenizer_in", "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", "BEFORE"),
    ("scheduler_sent", "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler", "BEFORE"),
    ("scheduler_in", "sglang.srt.managers.scheduler.Scheduler.handle_generate_request", "BEFORE"),
    ("scheduler_in", "sglang.srt.managers.scheduler.Scheduler.handle_batch_generate_request", "BEFORE"),
    ("batch_begin", "sglang.srt.managers.scheduler.Scheduler.run_batch", "BEFORE"),
    ("pass", "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", "AROUND"),
    (
        "pass_done",
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor.move_logprobs_to_cpu",
        "BEFORE",
    ),
    (
        "reply_sent",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "AFTER",
    ),
    (
        "detokenizer_in",
        "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out",
        "BEFORE",
    ),
    ("tokenizer_out", "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output", "BEFORE"),
)


class _Log:
    """Opened at the first event of a process: plugins are loaded before workers are forked off."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = -1

    def write(self, event: str, number: float | None = None) -> None:
        now_ns = time.monotonic_ns()
        if self._file < 0:
            path = self._directory / f"{os.getpid()}.log"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        text = f"{now_ns} {event}\n" if number is None else f"{now_ns} {event} {number:.6g}\n"
        os.write(self._file, text.encode())


class _PassTimer:
    """Times passes on the host, and on the GPU by events that are read once they have happened.

    Args:
        sync_mode: "warn" = the engine's log names each line of a pass that waits for the GPU; "default" = it doesn't.
    """

    def __init__(self, probe: _Log, sync_mode: str) -> None:
        self._probe = probe
        self._sync_mode = sync_mode
        self._running: deque[tuple[Any, Any]] = deque(maxlen=64)

    def around(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        import torch  # lazy: this module loads without torch

        self._probe.write("pass_begin")
        if not torch.cuda.is_available():
            result = original(*args, **kwargs)
            self._probe.write("pass_launched")
            return result
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda.set_sync_debug_mode(self._sync_mode)
        try:
            result = original(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        end.record()
        self._probe.write("pass_launched")
        self._running.append((begin, end))
        return result

    def report(self) -> None:
        """Write the GPU time of every pass that has ended."""
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._probe.write("pass_gpu_ms", begin.elapsed_time(end))


def register() -> None:
    """Entry point, group ``sglang.srt.plugins``."""
    directory = os.environ.get("BREAKEVEN_PROBE_DIR")
    if not directory:
        return
    registry = pkgutil.resolve_name("sglang.srt.plugins.hook_registry")
    probe = _Log(Path(directory))
    timer = _PassTimer(probe, os.environ.get("BREAKEVEN_PROBE_SYNC", "default"))
    for event, target, kind in STATIONS:
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            log.warning("no station %s: %s", event, error)
            continue
        hook = timer.around if kind == "AROUND" else _marker(probe, event, timer if event == "reply_sent" else None)
        registry.HookRegistry.register(target, hook, registry.HookType[kind])


def _marker(probe: _Log, event: str, timer: _PassTimer | None) -> Callable[..., None]:
    def mark(*args: Any, **kwargs: Any) -> None:
        probe.write(event)
        if timer is not None:
            timer.report()

    return mark
