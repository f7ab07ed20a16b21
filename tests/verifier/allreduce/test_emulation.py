"""The protocol's own headers on CPU threads under the thread sanitizer: right sums, no race; without the fence, one."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[3] / "verifier" / "allreduce" / "csrc"
SOURCE = Path(__file__).with_name("emulation.cpp")
WRAP = 2**32 - 1
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def build(target: Path, *flags: str) -> Path:
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O0", "-fsanitize=thread", "-DAR_SWEEP_PERIOD=16", *flags, f"-I{CSRC}"]
    command += ["-o", str(target), str(SOURCE), str(CSRC / "cpu_rank.cpp"), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulation") / "emulation")


def script(world: int, island: int, calls: int, seed: int, *, only_bulk: bool = False) -> str:
    """A line per call: dtype shape bulk pull ctas num_bytes."""
    rng = random.Random(seed)
    shapes = sorted({0, world, island})
    lines = []
    for _ in range(calls):
        shape = rng.choice(shapes)
        size = rng.choice((rng.randrange(1, 60) * 16, rng.randrange(1, 1000) * 4, 4096, 16))
        if -(-size // 16) < max(1, shape):
            shape = 0
        bulk = 1 if only_bulk else rng.randrange(2)
        lines.append(f"{rng.randrange(3)} {shape} {bulk} {rng.choice((0, 2, 7))} {rng.randrange(1, 5)} {size}")
    return "\n".join(lines)


def run(program: Path, world: int, island: int, start: int, calls: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(program), str(world), str(island), str(start), "7"],
        input=calls,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not start under this kernel's address layout")
    return done


@pytest.mark.parametrize(("world", "island"), [(2, 2), (4, 2), (8, 4)])
@pytest.mark.parametrize("start", [1, WRAP - 9])
def test_mixed_calls_are_right_and_race_free(emulation: Path, world: int, island: int, start: int) -> None:
    done = run(emulation, world, island, start, script(world, island, 25, start))
    assert done.returncode == 0, done.stdout + done.stderr[:2000]
    assert done.stdout == "25 calls right\n"
    assert "WARNING: ThreadSanitizer" not in done.stderr


def test_without_the_release_the_sanitizer_sees_the_race(tmp_path: Path) -> None:
    broken = build(tmp_path / "broken", "-DAR_NO_RELEASE", "-DAR_ONLY_WORLD=2")
    done = run(broken, 2, 2, 1, script(2, 2, 30, 1, only_bulk=True))
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
