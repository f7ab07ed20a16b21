"""Times a series of all-reduces as a forward pass makes them: many calls with a little compute between, never one.

On a GPU the series is one CUDA graph, since the launch of a single call costs more than the call. Three series per
size: with the calls, with calls and ranks that arrive apart, and without calls, whose time is subtracted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from verifier.allreduce.tuner_backends import Backend

__all__ = ["random_skews", "series_times"]

_GPU_CYCLES_PER_US = 1500  # near enough for every GPU in question; both series have the same sleeps


def series_times(
    backend: Backend,
    data: torch.Tensor,  # [rows, hidden] bfloat16, on the backend's device
    *,
    calls: int,
    replays: int,
    skews_us: Sequence[float],
    barrier: Callable[[], None],
) -> list[float]:
    """Microseconds per call of each replay, without what is not the all-reduce.

    Args:
        skews_us: [calls] how much later this rank comes to each call, zeros for the even series.
        barrier: brings the ranks together before each replay.
    """
    build = _graph if backend.device.type == "cuda" else _loop
    with_calls = build(backend, data, skews_us, True)
    without = build(backend, data, skews_us, False)
    for run in (with_calls, without):  # warm up
        barrier()
        run()
    own_s = sorted(without() for _ in range(max(3, replays // 5)))
    base_s = own_s[len(own_s) // 2]
    times = []
    for _ in range(replays):
        barrier()
        times.append(max(0.0, with_calls() - base_s) / calls * 1e6)
    return times


def _loop(backend: Backend, data: torch.Tensor, skews_us: Sequence[float], has_calls: bool) -> Callable[[], float]:
    work = data.clone()
    side = torch.zeros_like(data)

    def run() -> float:
        begin_s = time.perf_counter()
        for skew_us in skews_us:
            side.add_(1.0)
            if skew_us:
                _spin(skew_us * 1e-6)
            if has_calls:
                work.copy_(data)
                backend.all_reduce(work)
        return time.perf_counter() - begin_s

    return run


def _spin(duration_s: float) -> None:
    until_s = time.perf_counter() + duration_s
    while time.perf_counter() < until_s:
        pass


def _graph(backend: Backend, data: torch.Tensor, skews_us: Sequence[float], has_calls: bool) -> Callable[[], float]:
    work = data.clone()
    side = torch.zeros_like(data)

    def body() -> None:
        for skew_us in skews_us:
            side.add_(1.0)
            if skew_us:
                torch.cuda._sleep(int(skew_us * _GPU_CYCLES_PER_US))  # type: ignore[no-untyped-call]
            if has_calls:
                work.copy_(data)
                backend.all_reduce(work)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # libraries set themselves up at the first call, which may not be captured
        body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def run() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return run


def random_skews(seed: str, calls: int, max_skew_us: float) -> list[float]:
    """[calls] one rank's delays, uniform up to the limit."""
    rng = random.Random(seed)  # noqa: S311 - delays, not secrets
    return [rng.uniform(0.0, max_skew_us) for _ in range(calls)]
