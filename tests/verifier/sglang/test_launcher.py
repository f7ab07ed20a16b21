"""Rendering, log watching and diagnosis, and a launch of small scripts in SGLang's place."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import pytest

from breakeven.settings import SECTIONS, find_profile, load_settings
from verifier.sglang.command import EngineCommand, fallback_command, known_good, remember_good, render_command
from verifier.sglang.config import SGLangConfig
from verifier.sglang.launch import launch
from verifier.sglang.launcher import EngineLauncher, EngineStartFailed
from verifier.sglang.load_watch import LoadWatch
from verifier.sglang.signatures import SIGNATURES, diagnose
from wire.settings import ConfigError

PROFILES = ("kimi-k2.5-8x-rtx-pro-6000", "llama-3.1-8b-1gpu", "cpu-smollm2")

# A server that writes SGLang's log lines and answers /model_info.
SERVER = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"model_path": "x"}')
    def log_message(self, *args): pass
for line in ("Load weight begin.", "Load weight end.", "Uvicorn running on x", "The server is fired up"):
    print(line, flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
CRASH = (
    "print('torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB', flush=True); raise SystemExit(1)"
)
SILENT = "import time; time.sleep(60)"


def section(profile: str) -> SGLangConfig:
    return load_settings(profile, {}).section("sglang", SGLangConfig)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_loads_and_renders(profile: str) -> None:
    settings = load_settings(str(find_profile(profile)), {})
    for name, cls in SECTIONS.items():
        settings.section(name, cls)
    config = section(profile)
    command = render_command(config, model_path="/models/x")
    line = command.shell_line
    assert "--model-path /models/x" in line
    assert "--enable-return-aux-hidden-states --speculative-algorithm EAGLE3" in line
    assert "--page-size 1" in line
    assert str(config.port) in command.argv


def test_the_plugin_is_told_what_the_profile_wants() -> None:
    config = SGLangConfig(
        tap_ring_path="/dev/shm/ring",
        tap_socket_path="/run/tap",
        aux_capture="plugin",
        all_reduce="package.module:provider",
    )
    command = render_command(config, model_path="m")
    assert dict(command.environ) == {
        "BREAKEVEN_TAP_RING": "/dev/shm/ring",
        "BREAKEVEN_TAP_SOCKET": "/run/tap",
        "BREAKEVEN_TARGET_IDS": "1",
        "BREAKEVEN_CAPTURE_AUX": "1",
        "BREAKEVEN_ALL_REDUCE": "package.module:provider",
    }
    assert "--enable-return-hidden-states" in command.argv
    assert "--enable-return-aux-hidden-states" not in command.argv
    bare = render_command(SGLangConfig(target_ids="off", features="off"), model_path="m")
    assert bare.environ == ()
    assert not any("hidden-states" in argument for argument in bare.argv)


def test_kimi_is_tensor_parallel_over_pcie() -> None:
    config = section("kimi-k2.5-8x-rtx-pro-6000")
    command = render_command(config, model_path="m")
    at = command.argv.index("--tp-size")
    assert command.argv[at + 1] == "8"
    environ = dict(command.environ)
    assert environ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == "1"
    assert environ["BREAKEVEN_TAP_RING"] == config.tap_ring_path
    fallback = fallback_command(config, model_path="m")
    assert fallback is not None
    assert "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE" not in dict(fallback.environ)


def test_api_key_is_not_logged() -> None:
    command = render_command(SGLangConfig(api_key="secret"), model_path="m")
    assert "secret" in command.argv
    assert "secret" not in command.shell_line


def test_own_flags_are_not_set_twice() -> None:
    config = dataclasses.replace(SGLangConfig(), args=("--port", "1"))
    with pytest.raises(ConfigError, match="--port"):
        render_command(config, model_path="m")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("url", "ftp://x"),
        ("top_logprobs_num", 1),
        ("overload_retries", -1),
        ("context_len", -1),
        ("aux_layer_ids", (1, 2)),
        ("load_timeout_s", 0.0),
        ("features", "tap"),
        ("env", ("NOVALUE",)),
    ],
)
def test_bad_settings_name_their_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"sglang\.{key}"):
        dataclasses.replace(SGLangConfig(), **{key: value}).validate()


LINES = {
    "jit_architecture": "RuntimeError: No supported CUDA architectures found for major versions [9, 10].",
    "no_kernel_image": "CUDA error: no kernel image is available for execution on the device",
    "symm_mem_unsupported": "SymmMemCommunicator: Device capability 12 not supported",
    "cuda_oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB",
    "kv_pool_too_small": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    "host_oom": "Rank 3 scheduler is dead. Exit code: -9",
    "nccl_hang": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
    "nccl_error": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "custom_allreduce_p2p": "custom_all_reduce.cuh:455: CUDA error: invalid argument",
    "port_taken": "[Errno 98] error while attempting to bind on address: address already in use",
    "expert_parallel_assertion": "AssertionError: num_experts 384 ep_size 5",
    "wrong_head": "eagle3: size mismatch for fc.weight",
    "aux_flag_unknown": "error: unrecognized arguments: --enable-return-aux-hidden-states",
    "unknown_flag": "launch_server.py: error: unrecognized arguments: --no-such-flag",
    "config_conflict": "ValueError: --enable-return-aux-hidden-states only supports pp_size == 1: the",
    "shared_library": "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
    "module_missing": "/usr/bin/python3: No module named sglang.launch_server",
    "no_accelerator": "RuntimeError: No CUDA GPUs are available",
    "weights_missing": "RuntimeError: Cannot find any model weights with `x`",
    "token_out_of_range": "IndexError: index out of range in self",
    "illegal_access": "CUDA error: an illegal memory access was encountered",
}


@pytest.mark.parametrize("name", [signature.name for signature in SIGNATURES])
def test_every_signature_is_recognised(name: str) -> None:
    found = diagnose(["noise", LINES[name], "more noise"])
    assert found is not None
    assert found.name == name
    assert found.remedy
    assert found.source
    assert found.evidence == LINES[name]


def test_unknown_crash_has_no_diagnosis() -> None:
    assert diagnose(["something else entirely"]) is None


def test_progress_and_stall_from_the_log() -> None:
    watch = LoadWatch(stall_timeout_s=10.0, now_s=0.0)
    watch.line("[x] Load weight begin. avail mem=16.79 GB", now_s=1.0)
    watch.line("Multi-thread loading shards:  50% Completed | 32/64 [00:10<00:10]", now_s=2.0)
    assert (watch.phase, round(watch.progress, 2)) == ("loading weights", 0.4)
    assert watch.stalled_for_s(11.0) is None
    watch.read(1 << 30, now_s=11.0)  # reads without a line
    assert watch.stalled_for_s(20.0) is None
    assert watch.stalled_for_s(21.0) == 10.0
    watch.line("The server is fired up and ready to roll!", now_s=22.0)
    assert (watch.phase, watch.progress) == ("ready", 1.0)
    watch.line("Load weight begin", now_s=23.0)
    assert watch.phase == "ready"  # never backwards


def config_for(tmp_path: Path, port: int) -> SGLangConfig:
    return SGLangConfig(
        url=f"http://127.0.0.1:{port}", state_dir=str(tmp_path), stall_timeout_s=0.8, load_timeout_s=20.0
    )


def command_for(script: str, port: int, label: str = "profile") -> EngineCommand:
    argv = (sys.executable, "-c", script, "--model-path", "m", "--host", "127.0.0.1", "--port", str(port))
    return EngineCommand(label=label, argv=argv, environ=(("OMP_NUM_THREADS", "1"),))


async def test_launch_and_stop(tmp_path: Path, unused_tcp_port: int) -> None:
    command = command_for(SERVER, unused_tcp_port)
    launcher = EngineLauncher(config_for(tmp_path, unused_tcp_port), model_path="m", command=command)
    phases: list[tuple[str, float]] = []
    assert await launcher.start(on_progress=lambda phase, share: phases.append((phase, share))) == command
    assert phases[-1] == ("ready", 1.0)
    waiting = asyncio.create_task(launcher.wait())
    await asyncio.sleep(0)
    await launcher.stop()
    assert await waiting is None


async def test_crash_is_diagnosed_and_the_last_known_good_comes_up(tmp_path: Path, unused_tcp_port: int) -> None:
    config = config_for(tmp_path, unused_tcp_port)
    good = command_for(SERVER, unused_tcp_port, label="profile")
    remember_good(tmp_path, good)
    launcher = EngineLauncher(config, model_path="m", command=command_for(CRASH, unused_tcp_port))
    command = await launcher.start(on_progress=lambda phase, share: None)
    assert command.label == "last known-good"
    assert command.argv == good.argv
    await launcher.stop()


async def test_crash_without_fallback_says_why(tmp_path: Path, unused_tcp_port: int) -> None:
    command = command_for(CRASH, unused_tcp_port)
    launcher = EngineLauncher(config_for(tmp_path, unused_tcp_port), model_path="m", command=command)
    with pytest.raises(EngineStartFailed, match="Remedy: lower --mem-fraction-static") as caught:
        await launcher.start(on_progress=lambda phase, share: None)
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.name == "cuda_oom"
    assert "Tried to allocate" in caught.value.log_path.read_text()


async def test_stall_is_recognised(tmp_path: Path, unused_tcp_port: int) -> None:
    command = command_for(SILENT, unused_tcp_port)
    launcher = EngineLauncher(config_for(tmp_path, unused_tcp_port), model_path="m", command=command)
    with pytest.raises(EngineStartFailed, match="stalled"):
        await launcher.start(on_progress=lambda phase, share: None)


async def test_taken_port_and_missing_interpreter(tmp_path: Path, unused_tcp_port: int) -> None:
    config = config_for(tmp_path, unused_tcp_port)
    missing = dataclasses.replace(command_for(SERVER, unused_tcp_port), argv=("/nowhere/python", "-m", "x"))
    with pytest.raises(EngineStartFailed) as caught:
        await EngineLauncher(config, model_path="m", command=missing).start(on_progress=lambda phase, share: None)
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.name == "module_missing"
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", unused_tcp_port)
    async with server:
        launcher = EngineLauncher(config, model_path="m", command=command_for(SERVER, unused_tcp_port))
        with pytest.raises(EngineStartFailed) as caught:
            await launcher.start(on_progress=lambda phase, share: None)
    assert caught.value.diagnosis is not None
    assert caught.value.diagnosis.name == "port_taken"


def test_launch_command_ends_with_status_1_when_nothing_comes_up(tmp_path: Path, unused_tcp_port: int) -> None:
    config = dataclasses.replace(config_for(tmp_path, unused_tcp_port), python="/nowhere/python", model_path="m")
    with pytest.raises(SystemExit) as caught:
        launch(config)
    assert caught.value.code == 1
    with pytest.raises(ConfigError, match="model_path"):
        launch(dataclasses.replace(config, model_path=""))


def test_known_good_is_for_the_same_server_only(tmp_path: Path) -> None:
    command = command_for(SERVER, 5000)
    assert known_good(tmp_path, like=command) is None
    remember_good(tmp_path, command)
    assert known_good(tmp_path, like=command) is None  # the same: nothing to fall back to
    assert known_good(tmp_path, like=command_for(CRASH, 5000)) is not None
    assert known_good(tmp_path, like=command_for(CRASH, 5001)) is None
    (tmp_path / "last-known-good.json").write_text("{")
    assert known_good(tmp_path, like=command_for(CRASH, 5000)) is None
