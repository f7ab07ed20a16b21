"""One joint decision from many measurements."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from verifier.allreduce.tuner import cached_decision, save_decision
from verifier.allreduce.tuner_decision import (
    DecisionMismatch,
    NoCandidate,
    check_agreement,
    decide,
    is_slower,
    merge_ranks,
)
from verifier.allreduce.tuner_records import Candidate, Measured, RankReport, SizeTimes


def at(rows: int, us: float) -> Measured:
    return Measured(rows=rows, median_us=us, p99_us=us * 2, skewed_median_us=us, skewed_p99_us=us * 2)


NCCL = Candidate(name="nccl", backend="m:N")
LL = Candidate(name="nccl LL", backend="m:N", env=(("NCCL_PROTO", "LL"),))
TREE = Candidate(name="nccl tree", backend="m:N", env=(("NCCL_ALGO", "Tree"),))
IPC = Candidate(name="pcie_ipc", backend="m:I")


def test_the_slowest_rank_of_each_replay_counts() -> None:
    reports = [
        RankReport(rank=0, times=(SizeTimes(rows=1, even_us=(1.0, 9.0, 1.0), skewed_us=(2.0, 2.0, 2.0)),)),
        RankReport(rank=1, times=(SizeTimes(rows=1, even_us=(5.0, 1.0, 1.0), skewed_us=(3.0, 1.0, 1.0)),)),
    ]
    (merged,) = merge_ranks(reports)
    assert (merged.median_us, merged.p99_us) == (5.0, 9.0)
    assert merged.skewed_median_us == 2.0


def test_sizes_may_have_different_strategies_but_one_environment() -> None:
    measured = {
        "nccl": (at(1, 200.0), at(64, 900.0)),
        "nccl LL": (at(1, 20.0), at(64, 950.0)),
        "nccl tree": (at(1, 22.0), at(64, 700.0)),
        "pcie_ipc": (at(1, 6.0), at(64, 800.0)),
    }
    decision = decide("k", (NCCL, LL, TREE, IPC), measured, {"own": "hangs"})
    assert decision.env == (("NCCL_ALGO", "Tree"),)
    assert decision.table == ((1, "pcie_ipc"), (64, "nccl tree"))
    assert {candidate.name for candidate in decision.candidates} == {"pcie_ipc", "nccl tree"}
    assert decision.rejected == {"own": "hangs"}


def test_a_tie_goes_to_the_simpler_one() -> None:
    decision = decide("k", (NCCL, IPC), {"nccl": (at(1, 10.0),), "pcie_ipc": (at(1, 9.9),)}, {})
    assert decision.table == ((1, "nccl"),)


def test_nothing_usable_says_why() -> None:
    with pytest.raises(NoCandidate, match="nccl: hangs"):
        decide("k", (NCCL,), {}, {"nccl": "hangs"})


def test_ranks_that_disagree_may_not_start() -> None:
    check_agreement(["a", "a", "a"])
    with pytest.raises(DecisionMismatch, match=r"ranks \[2\]"):
        check_agreement(["a", "a", "b"])


def test_slower_than_when_tuned() -> None:
    assert is_slower([at(1, 10.0)], [at(1, 14.9)]) is None
    assert is_slower([at(1, 10.0)], [at(2, 99.0)]) is None
    assert is_slower([at(1, 10.0)], [at(1, 15.1)]) == "1 rows take 15.1 us, 10.0 when it was tuned"


def test_a_cache_file_that_was_changed_is_not_used(tmp_path: Path) -> None:
    decision = decide("k", (NCCL,), {"nccl": (at(1, 10.0),)}, {})
    path = save_decision(tmp_path, decision)
    assert cached_decision(tmp_path, "k") == decision
    assert cached_decision(tmp_path, "other") is None
    data = msgspec.json.decode(path.read_bytes())
    data["decision"]["table"] = [[1, "pcie_ipc"]]
    path.write_bytes(msgspec.json.encode(data))
    assert cached_decision(tmp_path, "k") is None
    path.write_text("{")
    assert cached_decision(tmp_path, "k") is None
