"""A profile and a plan for the scripted engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from verifier.sglang.config import SGLangConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    """A directory that makes ``-m sglang.launch_server`` start the scripted engine, and a model directory in it."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    script = Path(__file__).with_name("scripted_sglang.py")
    (package / "launch_server.py").write_text(f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "llama", "num_hidden_layers": 12, "vocab_size": 1000, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
    return tmp_path


def scripted_config(engine_dir: Path, port: int, *, base_s: float = 0.06) -> SGLangConfig:
    """``base_s``: what a token takes; short where speed is not the question."""
    return SGLangConfig(
        url=f"http://127.0.0.1:{port}",
        python=sys.executable,
        model_path=str(engine_dir / "model"),
        env=(f"PYTHONPATH={engine_dir / 'site'}", f"BASE_S={base_s}"),
        features="off",
        state_dir=str(engine_dir / "state"),
        stall_timeout_s=3.0,
        load_timeout_s=30.0,
    )


def profile_text(config: SGLangConfig) -> str:
    """The same as a profile file."""
    keys = ("url", "python", "model_path", "env", "features", "state_dir", "stall_timeout_s", "load_timeout_s")
    values = {key: getattr(config, key) for key in keys}
    lines = [f"{key} = {json.dumps(list(v) if isinstance(v, tuple) else v)}" for key, v in values.items()]
    return "[sglang]\n" + "\n".join(lines) + "\n"


@pytest.fixture
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher and measurement wait less than a real engine needs."""
    monkeypatch.setattr("verifier.sglang.launcher._LOOK_S", 0.05)
    monkeypatch.setattr("verifier.tuning.workload._SETTLE_S", 0.05)


PLAN = """
title = "scripted"
[rules]
repeats = 2
min_gain = 0.05
hang_timeout_s = 2.0
measure_timeout_s = 30.0
[workload]
prompt_tokens = 8
batch_sizes = [2]
plain_tokens = 4
windows = 3
num_draft_tokens = [2]
verify_rounds = 4
"""


def experiment_text(name: str, rank: int, key: str, value: str, kind: str = "arg") -> str:
    return f'[[experiment]]\nname = "{name}"\nrank = {rank}\nwhy = "test"\n{kind} = "{key}"\nvalue = "{value}"\n'


def living_children() -> list[psutil.Process]:
    """Processes this one started, directly or not, and that still run."""
    return [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
