"""Chooses the all-reduce of this machine by measurement, keeps the choice, and checks it again at each start.

Every candidate runs in fresh processes, one per rank: libraries read their environment once, and a hang must not be the
tuner's. The choice is made in one place and carries a digest that all ranks compare before they use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import structlog

from verifier.allreduce.probe_identity import MachineIdentity
from verifier.allreduce.tuner_decision import decide, is_slower, merge_ranks
from verifier.allreduce.tuner_records import Candidate, Decision, Job, Measured, RankReport, Spec
from verifier.sglang.config import engine_environ

__all__ = [
    "cached_decision",
    "decision_key",
    "measure_candidate",
    "save_decision",
    "tune_all_reduce",
    "verify_decision",
]

log = structlog.get_logger("tune")

_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.05
_SCRIPT = (
    f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
    "from verifier.allreduce.tuner_rank import main; sys.exit(main(sys.argv[1:]))"
)


def decision_key(
    identity: MachineIdentity, versions: dict[str, str], candidates: Sequence[Candidate], spec: Spec
) -> str:
    """What a decision holds for: GPUs in order, topology, driver, versions, candidates and how they are measured."""
    facts = {
        "machine": asdict(identity),
        "versions": versions,
        "candidates": [msgspec.to_builtins(candidate) for candidate in candidates],
        "spec": msgspec.to_builtins(spec),
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:16]


def tune_all_reduce(
    key: str,
    candidates: Sequence[Candidate],
    spec: Spec,
    *,
    python: str = "",
    on_candidate: Callable[[str], None] = lambda name: None,
) -> Decision:
    """Measure all candidates, one after the other, and decide.

    Raises:
        NoCandidate: none can be used.
    """
    measured: dict[str, tuple[Measured, ...]] = {}
    rejected: dict[str, str] = {}
    for candidate in candidates:
        on_candidate(candidate.name)
        reports, problem = measure_candidate(candidate, spec, python=python)
        if problem:
            rejected[candidate.name] = problem
            log.warning("all-reduce candidate rejected", name=candidate.name, reason=problem)
        else:
            measured[candidate.name] = merge_ranks(reports)
    return decide(key, candidates, measured, rejected)


def measure_candidate(candidate: Candidate, spec: Spec, *, python: str = "") -> tuple[list[RankReport], str]:
    """Run its ranks; returns their reports, or why it can't be used. Whatever happens, no rank is left."""
    with tempfile.TemporaryDirectory(prefix="allreduce-") as directory:
        paths = [Path(directory) / f"rank-{rank}.json" for rank in range(spec.world)]
        logs = [path.with_suffix(".log") for path in paths]
        job = msgspec.json.encode(Job(candidate=candidate, spec=spec))
        ranks = [
            _spawn(python or sys.executable, rank, Path(directory) / "store", path, log_path, job, candidate)
            for rank, (path, log_path) in enumerate(zip(paths, logs, strict=True))
        ]
        try:
            problem = _wait(ranks, paths, spec.timeout_s)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        reports = [msgspec.json.decode(path.read_bytes(), type=RankReport) for path in paths if path.is_file()]
        own = next((report.problem for report in reports if report.problem), "")
        if own or problem:
            # A rank that died explains the others' errors, not the other way round.
            return reports, f"{problem}{_last_line(logs)}" if problem else own
        return sorted(reports, key=lambda report: report.rank), ""


def verify_decision(decision: Decision, spec: Spec, *, python: str = "") -> str | None:
    """Measure the chosen candidates again at three sizes, briefly; why the decision no longer holds, or None."""
    rows = sorted({spec.rows[0], spec.rows[len(spec.rows) // 2], spec.rows[-1]})
    quick = msgspec.structs.replace(spec, rows=tuple(rows), replays=max(5, spec.replays // 10))
    for candidate in decision.candidates:
        reports, problem = measure_candidate(candidate, quick, python=python)
        if problem:
            return f"{candidate.name}: {problem}"
        reason = is_slower(decision.measured[candidate.name], merge_ranks(reports))
        if reason is not None:
            return f"{candidate.name}: {reason}"
    return None


def save_decision(cache_dir: Path, decision: Decision) -> Path:
    """Keep it, with its digest."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / f"allreduce-{decision.key}.json"
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode({"digest": decision.digest, "decision": decision})))
    partial.replace(path)
    return path


def cached_decision(cache_dir: Path, key: str) -> Decision | None:
    """The kept decision for ``key``; None if there is none, or the file is not what was written."""
    path = cache_dir / f"allreduce-{key}.json"
    try:
        data = msgspec.json.decode(path.read_bytes())
        decision = msgspec.convert(data["decision"], Decision)
    except OSError:
        return None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        log.warning("cached all-reduce decision can't be read", path=str(path), reason=str(error))
        return None
    if decision.digest != data.get("digest") or decision.key != key:
        log.warning("cached all-reduce decision was changed, so it is not used", path=str(path))
        return None
    return decision


def _spawn(
    python: str, rank: int, store: Path, report: Path, log_path: Path, job: bytes, candidate: Candidate
) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(  # noqa: S603 - our own module
            [python, "-c", _SCRIPT, str(rank), str(store), str(report)],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env=engine_environ((("OMP_NUM_THREADS", "1"), *candidate.env)),
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(job)
    return process


def _wait(ranks: Sequence[subprocess.Popen[bytes]], paths: Sequence[Path], timeout_s: float) -> str:
    """Until all have reported; one that ends without a report ends the others' waiting too."""
    deadline_s = time.monotonic() + timeout_s
    while not all(path.is_file() for path in paths):
        for rank, (process, path) in enumerate(zip(ranks, paths, strict=True)):
            status = process.poll()
            if status is not None and not path.is_file():
                return f"rank {rank} ended with status {status}"
        if time.monotonic() > deadline_s:
            missing = [rank for rank, path in enumerate(paths) if not path.is_file()]
            return f"hangs: ranks {missing} not done within {timeout_s:g} s"
        time.sleep(_LOOK_S)
    return ""


def _last_line(logs: Sequence[Path]) -> str:
    for path in logs:
        lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        if lines:
            return f" ({lines[-1][:300]})"
    return ""
