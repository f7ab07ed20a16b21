"""The two benchmarks of the edge run, small, and report what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import disconnect, edge

pytestmark = pytest.mark.slow


def test_disconnect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    disconnect.main(["--repeats", "3", "--output", str(output)])
    record = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == record
    assert set(record["results"]) == {"stream", "silent prefill", "not streamed"}
    assert all(row["max_ms"] < 5000 for row in record["results"].values())
    assert record["provenance"]["git_sha"]


def test_edge(capsys: pytest.CaptureFixture[str]) -> None:
    edge.main(["--streams", "4", "--tokens", "6", "--repeats", "1", "--pace-s", "0.001"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    for scenario in ("saturated", "paced"):
        assert record["scenarios"][scenario]["gateway"]["tok_per_s"] > 0
        assert "added_percent" in record["scenarios"][scenario]
