"""Merging of rounds over the tree classes of a real SGLang. Runs only where BREAKEVEN_SGLANG_PYTHON is set."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif("BREAKEVEN_SGLANG_PYTHON" not in os.environ, reason="needs BREAKEVEN_SGLANG_PYTHON"),
]

ROOT = Path(__file__).parents[2]
VERSION = "import sglang; print(sglang.__version__)"
# The tree a version has by default, and its others that are known.
KINDS = (((0, 5, 19), ("radix",)), ((0, 5, 21), ("python",)), ((0, 5, 22), ("python",)), ((0, 6), ("rust", "python")))


def test_random_rounds_find_what_they_would_find_without_merging() -> None:
    python = os.environ["BREAKEVEN_SGLANG_PYTHON"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    found = subprocess.run([python, "-c", VERSION], env=env, capture_output=True, text=True, check=True)
    version = tuple(int(part) for part in found.stdout.split()[-1].split(".")[:3])
    for kind in next(kinds for before, kinds in KINDS if version < before):
        command = [python, "-m", "tests.verifier.sglang.real_tree", "--kind", kind, "--seeds", "10"]
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        done = json.loads(run.stdout.splitlines()[-1])
        assert done["rounds"] > 2000
        assert done["longest"] <= 20 < done["longest_without"]
