"""The real process over ipc: load, propose, die, come back, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from drafter.client import DrafterClient
from drafter.compose import head_overrides, load_engine, run
from drafter.config import DrafterConfig
from drafter.errors import HeadFileError
from drafter.head.config import HeadOverrides
from drafter.server import LoadProgress
from tests.drafter.engine_rig import Story
from tests.drafter.heads import FEATURES, TinyHead
from wire.errors import PeerLost, PeerRefused
from wire.settings import ConfigError
from wire.tensor_ring import TensorRingWriter

START_S = 30.0


class Process:
    """``python -m drafter`` on a tiny head."""

    def __init__(self, tiny: TinyHead, directory: Path, kernel_dir: Path) -> None:
        self.endpoint = f"ipc://{directory}/drafter.sock"
        self.ring_path = directory / "ring"
        settings = {
            "head-dir": tiny.head_dir,
            "target-model-dir": tiny.target_dir,
            "endpoint": self.endpoint,
            "ring-path": self.ring_path,
            "cache-dir": kernel_dir,
            "max-context-len": 128,
        }
        flags = [text for key, value in settings.items() if value for text in ("--" + key, str(value))]
        self.command = [sys.executable, "-m", "drafter", *flags]
        self.environ = os.environ | {"OMP_NUM_THREADS": "1"}
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        self.popen = subprocess.Popen(self.command, env=self.environ, stdout=subprocess.DEVNULL)
        return self.popen

    def kill(self) -> None:
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()


@pytest.fixture
def process(tiny_heads: dict[str, TinyHead], tmp_path: Path, kernel_dir: Path) -> Iterator[Process]:
    process = Process(tiny_heads["specforge, embedding from the target"], tmp_path, kernel_dir)
    yield process
    process.kill()


@pytest.fixture
async def client(process: Process) -> AsyncIterator[DrafterClient]:
    client = DrafterClient(process.endpoint)
    task = asyncio.create_task(client.run())
    yield client
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    client.peer_lost()


async def until_phase(client: DrafterClient, phase: str) -> None:
    async with asyncio.timeout(START_S):
        while (await client.status(timeout_s=5)).phase != phase:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.02)


@pytest.mark.integration
@pytest.mark.slow
async def test_propose_die_and_come_back(
    process: Process, client: DrafterClient, tiny_heads: dict[str, TinyHead]
) -> None:
    reference = tiny_heads["specforge, embedding from the target"].reference
    story = Story("a", 40)
    first = process.start()
    await client.connect(timeout_s=START_S)
    await until_phase(client, "ready")
    with TensorRingWriter(process.ring_path, num_slots=64, slot_bytes=64 * FEATURES * 4) as ring:
        drafted = await client.extend(story.message(ring, 10), timeout_s=5)
        assert drafted.draft_ids == story.expected(reference, 10)

        first.kill()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_unavailable(client, story, ring))
            await asyncio.sleep(0)
            first.wait()
            client.peer_lost()
        assert waiting.result()

        second = process.start()
        welcome = await client.connect(timeout_s=START_S)
        assert welcome.pid == second.pid != first.pid
        await until_phase(client, "ready")
        with pytest.raises(PeerRefused, match="unknown_request"):
            await client.extend(story.message(ring, 14, start=12), timeout_s=5)
        drafted = await client.extend(story.message(ring, 14), timeout_s=5)
        assert drafted.draft_ids == story.expected(reference, 14)
        second.terminate()
        assert second.wait(10) == 0


async def _unavailable(client: DrafterClient, story: Story, ring: TensorRingWriter) -> bool:
    with pytest.raises(PeerLost):
        await client.extend(story.message(ring, 12, start=10), timeout_s=30)
    return True


@pytest.mark.integration
@pytest.mark.slow
async def test_status_while_loading(process: Process, client: DrafterClient, tmp_path: Path) -> None:
    """config.json is a pipe, so loading stands still until we write."""
    head_dir = tmp_path / "head"
    head_dir.mkdir()
    source = Path(process.command[process.command.index("--head-dir") + 1])
    (head_dir / "model.safetensors").symlink_to(source / "model.safetensors")
    os.mkfifo(head_dir / "config.json")
    process.command[process.command.index("--head-dir") + 1] = str(head_dir)
    process.start()
    await client.connect(timeout_s=START_S)
    await until_phase(client, "loading head")
    assert not (await client.status(timeout_s=5)).is_ready
    (head_dir / "config.json").write_text((source / "config.json").read_text())
    await until_phase(client, "ready")
    info = (await client.status(timeout_s=5)).drafter
    assert info is not None
    assert (info.head_format, info.aux_layer_ids) == ("flat, llama, 1 layer", (2, 5, 8))


@pytest.mark.integration
@pytest.mark.slow
def test_it_ends_with_its_parent(process: Process) -> None:
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen(json.loads(sys.argv[1]), stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"  # it listens
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", code, json.dumps(process.command)]
    with subprocess.Popen(argv, env=process.environ, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline_s = time.monotonic() + 10
    while _is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_settings_become_overrides() -> None:
    assert head_overrides(DrafterConfig()) == HeadOverrides()
    config = DrafterConfig(norm_before_residual="yes", feedback="pre_norm", rope_theta=5.0, aux_layer_ids=(1, 2, 3))
    assert head_overrides(config) == HeadOverrides(
        norm_before_residual=True, feeds_back_normed=False, rope_theta=5.0, aux_layer_ids=(1, 2, 3)
    )


def test_loading_reports_what_it_loaded(tiny_heads: dict[str, TinyHead], kernel_dir: Path) -> None:
    progress = LoadProgress()
    config = DrafterConfig(
        head_dir=tiny_heads["speculators"].head_dir, cache_dir=kernel_dir, kernels="torch", max_context_len=64
    )
    loaded = load_engine(config, progress)
    assert (loaded.info.feature_size, loaded.info.draft_vocab_size, loaded.info.target_vocab_size) == (96, 40, 96)
    assert progress.phase == "packing head"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_plain_error(tiny_heads: dict[str, TinyHead], tmp_path: Path) -> None:
    config = DrafterConfig(
        head_dir=tiny_heads["speculators"].head_dir,
        endpoint=f"ipc://{tmp_path}/d.sock",
        device="cuda:1",
        exit_with_parent=False,
    )
    with pytest.raises(ConfigError, match=r"drafter\.device: is 'cuda:1', but"):
        run(config)


def test_no_head_or_a_broken_one_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.head_dir"):
        run(DrafterConfig())
    config = DrafterConfig(
        head_dir=tmp_path / "nowhere", endpoint=f"ipc://{tmp_path}/d.sock", kernels="torch", exit_with_parent=False
    )
    with pytest.raises(HeadFileError, match="nowhere"):
        run(config)
