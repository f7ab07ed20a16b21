"""A real SGLang of two ranks whose all-reduce is ours. Runs only where BREAKEVEN_SGLANG_PYTHON is set."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.counting_all_reduce import COUNTS
from tests.integration.real_sglang import Engine, Http, plain_ids

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif("BREAKEVEN_SGLANG_PYTHON" not in os.environ, reason="needs BREAKEVEN_SGLANG_PYTHON"),
]

RECORDING = Path(__file__).parents[1] / "verifier" / "sglang" / "recordings" / "sglang-0.5.23-cpu.json"


def test_two_ranks_reduce_by_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COUNTS, str(tmp_path))
    monkeypatch.setenv("BREAKEVEN_SGLANG_ALL_REDUCE", "tests.integration.counting_all_reduce:provider")
    exchanges = {exchange["name"]: exchange for exchange in json.loads(RECORDING.read_text())["exchanges"]}
    events = [line[6:] for line in exchanges["stream"]["response"].split("\n\n") if line]
    one_ranks_answer = json.loads(events[-2])["output_ids"]
    prompt = exchanges["stream"]["request"]["input_ids"]
    # Without NCCL: it has no CPU, and SGLang 0.5.23 makes its communicator all the same.
    env = (
        *("SGLANG_USE_CPU_ENGINE=1", "SGLANG_CPU_OMP_THREADS_BIND=0|1", "OMP_NUM_THREADS=1"),
        "SGLANG_NCCL_SO_PATH=/dev/null",
    )
    with Engine(tmp_path, args=("--tp-size", "2"), env=env) as engine:
        counts = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]  # the warm-up's
        assert plain_ids(Http(engine.url), prompt, len(one_ranks_answer)) == one_ranks_answer
        later = [int((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert later[0] == later[1]
    assert later[0] >= counts[0] + 60 * len(one_ranks_answer)  # two in each of 30 layers
