"""SIGKILL of the tuner at random points: nothing lost, nothing repeated, nothing left running."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.verifier.tuning.conftest import PLAN, ROOT, experiment_text, profile_text, scripted_config

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_KILLS = 10


def processes_of(marker: str) -> list[psutil.Process]:
    """Everything that was started for this test, whoever its parent is now."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and marker in " ".join(process.info["cmdline"] or ()):
            found.append(process)
    return found


def done_trials(path: Path) -> dict[int, str]:
    """Id to everything recorded of the trials that are done; read as another process would."""
    if not path.exists():
        return {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as db:
        try:
            rows = db.execute("SELECT id, begun_at || ended_at || result FROM trials WHERE state = 'done'").fetchall()
        except sqlite3.OperationalError:
            rows = []  # killed before its tables were made
    db.close()
    return dict(rows)


def test_killed_at_ten_random_points_it_resumes(engine_dir: Path, unused_tcp_port: int) -> None:
    (engine_dir / "profile.toml").write_text(profile_text(scripted_config(engine_dir, unused_tcp_port, base_s=0.02)))
    behaviours = ("fast", "crash", "slow")
    experiments = [experiment_text(b, i, "--behave", b) for i, b in enumerate(behaviours)]
    (engine_dir / "plan.toml").write_text(PLAN + "".join(experiments))
    ledger_path = engine_dir / "tune" / "ledger.sqlite"
    command = [sys.executable, "-m", "tests.verifier.tuning.tune_child", "--profile", str(engine_dir / "profile.toml")]
    command += ["--tune.plan", str(engine_dir / "plan.toml"), "--tune.state-dir", str(engine_dir / "tune")]
    rng = random.Random(20261202)
    seen: dict[int, str] = {}
    num_kills, num_starts = 0, 0
    with (engine_dir / "tune.log").open("wb") as log:
        while True:
            num_starts += 1
            assert num_starts < 40, (engine_dir / "tune.log").read_text()[-3000:]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            try:
                process.wait(rng.uniform(0.8, 2.2) if num_kills < NUM_KILLS else 120.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                num_kills += 1
                deadline = time.monotonic() + 10
                while (left := processes_of(str(engine_dir))) and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert not left, [p.cmdline() for p in left]
                now = done_trials(ledger_path)
                assert {key: now[key] for key in seen} == seen  # nothing done is lost or done again
                seen = now
                continue
            break
    assert process.returncode == 0, (engine_dir / "tune.log").read_text()[-3000:]
    assert num_kills == NUM_KILLS
    check_whole(ledger_path, seen)


def check_whole(ledger_path: Path, seen: dict[int, str]) -> None:
    final = done_trials(ledger_path)
    assert {key: final[key] for key in seen} == seen
    with sqlite3.connect(ledger_path) as db:
        verdicts = dict(db.execute("SELECT name, verdict FROM experiments").fetchall())
        counts = dict(
            db.execute(
                "SELECT e.name, count(*) FROM trials t JOIN experiments e ON e.id = t.experiment_id GROUP BY e.id"
            ).fetchall()
        )
        states = {row[0] for row in db.execute("SELECT DISTINCT state FROM trials")}
        setups = db.execute("SELECT count(*) FROM setups").fetchone()[0]
    db.close()
    assert verdicts["crash"] == "crashed"
    assert {verdicts["fast"], verdicts["slow"]} <= {
        "faster",
        "slower",
        "same",
        "undecided",
    }  # how fast is not the question here
    assert counts == {"fast": 4, "crash": 2, "slow": 4}
    assert states == {"done"}
    assert setups == 1
