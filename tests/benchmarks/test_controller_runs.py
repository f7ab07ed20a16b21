"""The two live benchmarks of the controller, small, with all their real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stack import write_head, write_target

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(240)]


def run(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON line that a smoke run prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.controller.{module}", "--smoke", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_founding_case_runs_through_the_whole_gateway_and_no_token_is_wrong() -> None:
    (case,) = run("seed_replay", "--shift", "0")["cases"].values()
    assert case["wrong_texts"] == 0
    assert case["modes"]["static"]["acceptance_length"] > 1.5
    assert case["modes"]["plain"]["rounds"] == 0
    assert case["modes"]["auto"]["rounds"] + case["modes"]["auto"]["plain_rounds"] > 10
    assert case["passes"]["plain"]["decode"]["count"] >= 59
    assert case["auto"]["fallbacks"] == {}


def test_the_embedded_engine_runs_live_and_all_modes_write_the_same_texts(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    found = run(
        "live",
        *("--model", "tiny", "--set", "engine.model_name=tiny", "--set", f"verifier.model={target}"),
        *("--set", f"drafter.head_dir={write_head(tmp_path / 'head', target)}"),
        *("--set", f"verifier.cache_dir={tmp_path / 'cache'}", "--set", f"drafter.cache_dir={tmp_path / 'cache'}"),
    )
    assert found["differing_texts"] == 0
    assert {row["mode"] for row in found["rows"]} == {"off", "on", "auto"}
    on = next(row for row in found["rows"] if (row["kind"], row["mode"]) == ("all", "on"))
    assert on["plain_share_of_rounds"] < 0.5
