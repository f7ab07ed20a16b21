"""The parts of the all-reduce benchmark that need no GPU, and its refusal without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.allreduce import ROWS, Timing, expected_sum, main, print_table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "allreduce"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("mode", [[], ["--virtual"], ["--cpu-peer"]])
def test_without_a_gpu_it_says_so(mode: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--ranks", "2", *mode, "--output", str(tmp_path)]) == 1
    assert "no CUDA device here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_expected_sum_is_the_tree() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    inputs = [big, small, small, small]
    assert expected_sum(inputs, 4).item() == 2.0**24  # 1 is lost against 2^24 each time
    assert expected_sum(inputs, 2).item() == 2.0**24 + 2


def test_the_table_keeps_the_best_grid(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        [
            Timing(what="ll one-shot", num_bytes=14336, us=5.0, ctas=1),
            Timing(what="ll one-shot", num_bytes=14336, us=4.0, ctas=8),
            Timing(what="ll one-shot", num_bytes=28672, us=6.5, ctas=8),
            Timing(what="empty kernel", num_bytes=0, us=0.75),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["us", "per", "call", "14", "K", "28", "K"]
    assert lines[1].split() == ["ll", "one-shot", "4.00", "6.50"]
    assert lines[-1] == "empty kernel: 0.75"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("virtual-?.json")), ids=lambda path: path.stem)
def test_kept_results_cover_every_size_and_say_where_they_are_from(path: Path) -> None:
    result = json.loads(path.read_text())
    assert {"argv", "git_sha", "date_utc"} <= result["provenance"].keys()
    assert result["gpu"]
    for what in ("bulk one-shot", "bulk one-shot + norm", "bulk two-shot"):
        sizes = {timing["bytes"] for timing in result["timings"] if timing["what"] == what}
        assert sizes == {rows * 14336 for rows in ROWS}
