"""One rank of a candidate's measurement: correctness first, then times. A process of its own, killed if it hangs.

python -m verifier.allreduce.tuner_rank RANK STORE_PATH REPORT_PATH      candidate and spec as JSON on stdin
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from verifier.allreduce.tuner_backends import Backend, make_backend
from verifier.allreduce.tuner_decision import check_agreement
from verifier.allreduce.tuner_records import Job, RankReport, SizeTimes, Spec
from verifier.allreduce.tuner_series import random_skews, series_times

__all__ = ["main"]

# One rounding of the result and one of a partial sum, relative to the largest term: bfloat16 keeps 8 bits.
_TOLERANCE = 2.0**-7


def main(argv: Sequence[str]) -> int:
    """Measure and write the report."""
    rank, store_path, report_path = int(argv[0]), argv[1], Path(argv[2])
    told = sys.stdin.buffer.read()
    job = msgspec.json.decode(told, type=Job)
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, job.spec.world)  # type: ignore[attr-defined]
    limit = timedelta(seconds=job.spec.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.spec.world, timeout=limit)
    try:
        # Half a group with another candidate or size would hang, and not say why.
        check_agreement(_gathered(hashlib.sha256(told).hexdigest()))
        report = _measure(job, rank)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the report
        report = RankReport(rank=rank, problem=f"{type(error).__name__}: {error}"[:500])
    partial = report_path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(report))
    partial.replace(report_path)
    if not report.problem:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _measure(job: Job, rank: int) -> RankReport:
    spec, candidate = job.spec, job.candidate
    backend = make_backend(candidate.backend)
    options = {"hidden": spec.hidden, **candidate.options}
    backend.open(rank=rank, world=spec.world, max_numel=max(spec.rows) * spec.hidden, options=options)
    problem = _first_problem([_wrong(backend, spec, rows, rank) for rows in spec.rows])
    if problem:
        return RankReport(rank=rank, problem=problem)
    times = []
    for rows in spec.rows:
        data = _input(spec, rows, rank).to(backend.device)
        skews = random_skews(f"{spec.seed} {rank} {rows}", spec.calls, spec.max_skew_us)
        even, skewed = (
            series_times(
                backend, data, calls=spec.calls, replays=spec.replays, skews_us=delays, barrier=lambda: dist.barrier()
            )
            for delays in ([0.0] * spec.calls, skews)
        )
        times.append(SizeTimes(rows=rows, even_us=tuple(even), skewed_us=tuple(skewed)))
    backend.close()
    return RankReport(rank=rank, times=tuple(times))


def _input(spec: Spec, rows: int, rank: int) -> torch.Tensor:
    """[rows, hidden] bfloat16; every rank can make every rank's."""
    generator = torch.Generator().manual_seed(spec.seed * 1_000_003 + rows * 1009 + rank)
    return torch.randn(rows, spec.hidden, generator=generator).to(torch.bfloat16)


def _wrong(backend: Backend, spec: Spec, rows: int, rank: int) -> str:
    """Why the sum is not right, or not the same bits on every rank; "" if it is. Twice: buffers are used in turn."""
    inputs = torch.stack([_input(spec, rows, other) for other in range(spec.world)]).double()  # [world, rows, hidden]
    expected, scale = inputs.sum(0), inputs.abs().sum(0)
    for _ in range(2):
        data = _input(spec, rows, rank).to(backend.device)
        found = backend.all_reduce(data).cpu()
        digests = _gathered(hashlib.sha256(found.contiguous().view(torch.int16).numpy().tobytes()).hexdigest())
        error = ((found.double() - expected).abs() / scale.clamp_min(1e-9)).max().item()
        if not error <= _TOLERANCE:
            return f"wrong sum at {rows} rows: off by {error:.2g} of its terms"
        if len(set(digests)) > 1:
            return f"ranks hold different bits at {rows} rows"
    return ""


def _first_problem(problems: list[str]) -> str:
    """The same answer on every rank, or some would go on and wait for the others."""
    own = next((problem for problem in problems if problem), "")
    return next((problem for problem in _gathered(own) if problem), "")


def _gathered(own: str) -> list[str]:
    """Every rank's text, in rank order."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return [each or "" for each in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
