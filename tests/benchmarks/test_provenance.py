"""A result says how it was made, and nothing of the folders of the machine that made it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.provenance import provenance


def test_absolute_paths_are_cut_to_their_names(tmp_path: Path) -> None:
    argv = [str(tmp_path / "bench.py"), "--out", "results/a.json", f"--model={tmp_path}/toy", "--k=3", "x=y"]
    argv += [f"ipc://{tmp_path}/lane", "http://host/a/b"]
    expected = ["bench.py", "--out", "results/a.json", "--model=toy", "--k=3", "x=y", "ipc://lane", "http://host/a/b"]
    assert provenance(argv)["argv"] == expected
