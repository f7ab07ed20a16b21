"""The tuner over real gloo ranks: it rejects what is wrong, hangs or dies, and decides between the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.verifier.tuning.conftest import living_children
from verifier.allreduce.probe_identity import machine_identity
from verifier.allreduce.tuner import (
    cached_decision,
    decision_key,
    measure_candidate,
    save_decision,
    tune_all_reduce,
    verify_decision,
)
from verifier.allreduce.tuner_records import Candidate, Spec

pytestmark = [pytest.mark.integration, pytest.mark.slow]


HERE = "tests.verifier.allreduce.faulty_backends"
OURS = "verifier.allreduce.tuner_backends"
SPEC = Spec(world=2, hidden=7168, rows=(1, 4), calls=8, replays=6, timeout_s=60.0)


def test_it_rejects_what_is_wrong_hangs_or_dies_and_keeps_the_faster(tmp_path: Path) -> None:
    candidates = (
        Candidate(name="slow", backend=f"{HERE}:Slow"),
        Candidate(name="gather", backend=f"{OURS}:GatherBackend"),
        Candidate(name="wrong", backend=f"{HERE}:Wrong"),
        Candidate(name="dying", backend=f"{HERE}:Dying"),
    )
    key = decision_key(machine_identity(), {}, candidates, SPEC)
    decision = tune_all_reduce(key, candidates, SPEC)
    assert "wrong sum" in decision.rejected["wrong"]
    assert "rank 1 ended with status -6" in decision.rejected["dying"]
    assert decision.table == ((1, "gather"), (4, "gather"))
    assert decision.strategy_for(3) == "gather"
    assert decision.strategy_for(5) is None
    for each in decision.measured["gather"]:
        assert 0 < each.median_us <= each.p99_us
    save_decision(tmp_path, decision)
    kept = cached_decision(tmp_path, key)
    assert kept == decision
    assert kept.digest == decision.digest
    # What is kept is checked at the next start; here the kept times are made too good to be true.
    lies = {"gather": tuple(msgspec.structs.replace(each, median_us=0.01) for each in kept.measured["gather"])}
    reason = verify_decision(msgspec.structs.replace(kept, measured=lies), SPEC)
    assert reason is not None
    assert "when it was tuned" in reason
    assert not living_children()


def test_a_hang_is_ended_and_named() -> None:
    spec = msgspec.structs.replace(SPEC, timeout_s=6.0)
    reports, problem = measure_candidate(Candidate(name="hanging", backend=f"{HERE}:Hanging"), spec)
    assert reports == []
    assert problem.startswith("hangs: ranks [0, 1] not done within 6 s")
    assert not living_children()
