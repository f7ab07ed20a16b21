"""The benchmark itself, on a tiny head and the CPU."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.drafter_gpu import main


def test_every_cell_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    choice = ["--shapes", "tiny", "--contexts", "60", "--batches", "1", "2", "--num-draft-tokens", "2"]
    main(["--device", "cpu", *choice, "--prompts", "1024", "--repeats", "2", "--out", str(out)])
    (tiny,) = json.loads(out.read_text())["results"].values()
    assert [(cell["batch"], cell["temperature"]) for cell in tiny["cells"]] == [(1, 0.0), (2, 0.0), (1, 1.0), (2, 1.0)]
    assert all(cell["draft_ms"] > 0 for cell in tiny["cells"])
    assert tiny["prompts"][0]["read_ms"] > 0
