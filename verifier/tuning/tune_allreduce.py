"""``breakeven tune --probe`` and ``--allreduce``: look at the machine, and choose its all-reduce by measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from verifier.allreduce.capabilities import capabilities
from verifier.allreduce.probe import probe_machine
from verifier.allreduce.probe_identity import machine_identity
from verifier.allreduce.probe_report import capability_lines, machine_lines
from verifier.allreduce.tuner import cached_decision, decision_key, save_decision, tune_all_reduce, verify_decision
from verifier.allreduce.tuner_candidates import candidates_for, cpu_candidates
from verifier.allreduce.tuner_decision import NoCandidate
from verifier.allreduce.tuner_records import Decision, Spec
from verifier.sglang.config import SGLangConfig
from verifier.tuning.setup import engine_versions
from wire.settings import ConfigError

__all__ = ["probe", "tune_machine"]

log = structlog.get_logger("tune")

# Without GPUs the ranks are processes that share the cores, so fewer and shorter series say the same.
_CPU_SPEC = Spec(world=2, calls=122, replays=5, rows=(1, 4, 16, 64))


def probe(sglang: SGLangConfig, *, write: Callable[[str], None]) -> int:
    """Print the machine and what is possible on it; returns the exit status."""
    machine = probe_machine(python=_python(sglang), versions=_versions(sglang), with_bandwidth=True)
    for line in (*machine_lines(machine), "", *capability_lines(capabilities(machine))):
        write(line)
    return 0


def tune_machine(sglang: SGLangConfig, *, cache_dir: Path, write: Callable[[str], None]) -> int:
    """Choose the all-reduce, or check the kept choice; returns the exit status."""
    versions = _versions(sglang)
    machine = probe_machine(python=_python(sglang), versions=versions, with_bandwidth=True)
    found = capabilities(machine)
    candidates = candidates_for(machine, found, cache_dir=cache_dir / "kernels")
    spec = Spec(world=len(machine.gpus))
    python = _python(sglang)
    if not candidates:
        write("No all-reduce between GPUs is possible here; over host memory, for the sake of trying:")
        candidates, spec, python = cpu_candidates(), _CPU_SPEC, ""
    for each in found:
        if each.possible == "no":
            write(f"not possible: {each.strategy.title}: {'; '.join(each.reasons)}")
    key = decision_key(machine_identity(), versions, candidates, spec)
    kept = cached_decision(cache_dir, key)
    reason = "none is kept" if kept is None else verify_decision(kept, spec, python=python)
    if kept is not None and reason is None:
        write("The kept decision still holds.")
        return _show(kept, write)
    log.info("tuning the all-reduce", because=reason)
    try:
        decision = tune_all_reduce(
            key, candidates, spec, python=python, on_candidate=lambda name: log.info("candidate", name=name)
        )
    except NoCandidate as error:
        write(f"No candidate can be used: {error}")
        return 1
    write(f"Kept in {save_decision(cache_dir, decision)}")
    return _show(decision, write)


def _show(decision: Decision, write: Callable[[str], None]) -> int:
    environment = " ".join(f"{name}={value}" for name, value in decision.env) or "none"
    write(f"decision {decision.digest[:16]}, environment: {environment}")
    write(f"{'rows':>6}{'KiB':>7}  {'strategy':<20}{'median us':>11}{'p99':>9}{'skewed':>9}{'p99':>9}")
    for rows, name in decision.table:
        each = next(one for one in decision.measured[name] if one.rows == rows)
        write(
            f"{rows:>6}{rows * 14:>7}  {name:<20}{each.median_us:>11.1f}{each.p99_us:>9.1f}"
            f"{each.skewed_median_us:>9.1f}{each.skewed_p99_us:>9.1f}"
        )
    for name, why in decision.rejected.items():
        write(f"rejected: {name}: {why}")
    return 0


def _python(sglang: SGLangConfig) -> str:
    return sglang.python


def _versions(sglang: SGLangConfig) -> dict[str, str]:
    try:
        return engine_versions(sglang)
    except ConfigError as error:
        log.warning("the engine's versions are unknown", reason=str(error))
        return {}
