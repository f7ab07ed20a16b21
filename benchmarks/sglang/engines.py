"""Variants of one SGLang server to be compared, and starting them beside each other on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.sglang.entry_points import PLUGIN, plugin_python_path
from verifier.sglang.http import EngineHttp
from wire.errors import PeerError

__all__ = [
    "SHAPES",
    "Engine",
    "Variant",
    "lane_endpoint",
    "plan_variants",
    "ring_path",
    "sglang_version",
    "spawn_engine",
    "start_engine",
    "write_shape",
]

# config.json of a Llama of 8 billion parameters, and of an EAGLE-3 head for it: sizes as published for Llama-3.1-8B.
_LLAMA_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 16384,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_TINY: Final[dict[str, Any]] = {
    **_LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {"llama-8b": _LLAMA_8B, "tiny": _TINY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the engine.

    Fields:
        args, env: beside the common ones. has_tap: our plugin writes features. has_draws: it draws target ids too.
        speculates: the engine drafts itself, so only its own decoding is measured. max_total_tokens: of the KV cache.
        is_wide: measured at every cell.
    """

    name: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    has_tap: bool = False
    has_draws: bool = False
    speculates: bool = False
    max_total_tokens: int = 20_000
    is_wide: bool = False


@dataclass(slots=True, kw_only=True)
class Engine:
    """A started server. ``directory`` holds its log, the probe's events, the tap's ring and socket."""

    variant: Variant
    url: str
    directory: Path
    process: subprocess.Popen[bytes]
    started_s: float
    ready_s: float | None = None

    async def wait_ready(self, *, timeout_s: float) -> bool:
        """True once it serves; False if it ended or took too long."""
        http = EngineHttp(self.url)
        await http.open()
        try:
            while time.monotonic() - self.started_s < timeout_s:
                if self.process.poll() is not None:
                    return False
                try:
                    await http.get("/server_info", timeout_s=5.0)
                    ids = [[5, 6, 7, 8]]
                    await http.generate({"input_ids": ids, "sampling_params": [{"max_new_tokens": 4}]})
                except PeerError:
                    await asyncio.sleep(0.5)
                    continue
                self.ready_s = time.monotonic() - self.started_s
                return True
            return False
        finally:
            await http.close()

    def log_tail(self, num_chars: int = 3000) -> str:
        """The end of its log, for a report of a failure."""
        return (self.directory / "engine.log").read_text(errors="replace")[-num_chars:]

    def stop(self) -> None:
        """End it and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, 15)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, 9)
                self.process.wait(15)


def sglang_version(python: str) -> tuple[int, ...]:
    """Version of the SGLang that an interpreter has."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return tuple(int(part) for part in found.split(".")[:3])


def write_shape(directory: Path, shape: str) -> tuple[Path, Path]:
    """Model and head directories with config.json alone: weights are dummies, ids need no tokenizer."""
    config = SHAPES[shape]
    draft_vocab = min(32000, config["vocab_size"] // 2)
    head = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
    }
    for name, content in (("target", config), ("head", head)):
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "config.json").write_text(json.dumps(content, indent=1))
    return directory / "target", directory / "head"


def plan_variants(
    head: Path, *, device: str, captures_by_flag: bool, num_steps: int, tokenizer: Path | None
) -> list[Variant]:
    """What is compared. ``captures_by_flag``: this SGLang has --enable-return-aux-hidden-states (0.5.23)."""
    ids_only = ("--skip-tokenizer-init",)
    if captures_by_flag:
        tap_args: tuple[str, ...] = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3")
        tap_env: dict[str, str] = {}
    else:
        tap_args, tap_env = ("--enable-return-hidden-states",), {"BREAKEVEN_CAPTURE_AUX": "1"}
    speculation = (
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        str(head),
        "--speculative-draft-load-format",
        "dummy",
        "--speculative-eagle-topk",
        "1",
        "--speculative-num-steps",
        str(num_steps),
        "--speculative-num-draft-tokens",
        str(num_steps + 1),
    )
    variants = [Variant(name="ids_only", args=ids_only, max_total_tokens=80_000, is_wide=True)]
    if tokenizer is not None:
        variants.append(Variant(name="with_text", args=("--tokenizer-path", str(tokenizer))))
    if device == "cuda":
        variants.append(Variant(name="eager_prefill", args=(*ids_only, "--disable-prefill-cuda-graph")))
    variants += [
        Variant(
            name="plugin",
            args=(*ids_only, *tap_args),
            env=tap_env,
            has_tap=True,
            max_total_tokens=24_000,
            is_wide=True,
        ),
        Variant(
            name="no_overlap",
            args=(*ids_only, *tap_args, "--disable-overlap-schedule"),
            env=tap_env,
            has_tap=True,
            max_total_tokens=24_000,
            is_wide=True,
        ),
        *(
            Variant(
                name=name,
                args=(*ids_only, *tap_args, *more),
                env={**tap_env, **env},
                has_tap=True,
                has_draws=True,
                max_total_tokens=24_000 if is_wide else 10_000,
                is_wide=is_wide,
            )
            for name, more, env, is_wide in (
                ("drawn", (), {"BREAKEVEN_EXPAND": "0"}, False),
                ("expanded", (), {}, True),
                ("expanded_no_overlap", ("--disable-overlap-schedule",), {}, True),
            )
        ),
        Variant(name="rust_server", args=ids_only, env={"SGLANG_RUST_SERVER": "1"}),
    ]
    if device == "cuda":
        # Dummy weights accept nothing, so an acceptance length is simulated; the time of a step does not depend on it.
        simulated = {"SGLANG_SIMULATE_ACC_LEN": "2"}
        variants.append(
            Variant(
                name=f"own_eagle3_k{num_steps}",
                args=(*ids_only, *speculation),
                env=simulated,
                speculates=True,
                max_total_tokens=24_000,
                is_wide=True,
            )
        )
    return variants


def ring_path(directory: Path) -> Path:
    """Where the tap of the engine in ``directory`` writes: memory, not a disk."""
    shared = Path("/dev/shm")  # noqa: S108 - a name of its own, removed at the end
    return (shared if shared.is_dir() else directory) / f"breakeven-bench-{directory.name}-{os.getpid()}"


def lane_endpoint(directory: Path) -> str:
    """Where the fast lane of the engine in ``directory`` is bound."""
    return f"ipc://{directory / 'lane.sock'}"


def start_engine(
    variant: Variant, *, python: str, target: Path, port: int, directory: Path, common: list[str], env: dict[str, str]
) -> Engine:
    """Start it; the plugins are found through an entry point written beside its log."""
    directory.mkdir(parents=True, exist_ok=True)
    environ = {**os.environ, **env, **variant.env}
    environ |= {
        "PYTHONPATH": plugin_python_path(
            directory / "plugins", {**PLUGIN, "probe": "benchmarks.sglang.probe:register"}
        ),
        "BREAKEVEN_PROBE_DIR": str(directory),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    if variant.has_tap:
        environ |= {
            "BREAKEVEN_TAP_RING": str(ring_path(directory)),
            "BREAKEVEN_TAP_SOCKET": str(directory / "tap.sock"),
            "BREAKEVEN_TAP_SLOTS": "64",
            "BREAKEVEN_LANE": lane_endpoint(directory),
        }
    if variant.has_draws:
        environ |= {"BREAKEVEN_TARGET_IDS": "1"}
    command = [python, "-m", "sglang.launch_server", "--model-path", str(target), "--load-format", "dummy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--page-size", "1", "--sampling-backend", "pytorch"]
    command += ["--max-total-tokens", str(variant.max_total_tokens), *common, *variant.args]
    return spawn_engine(variant, command, environ, url=f"http://127.0.0.1:{port}", directory=directory)


def spawn_engine(
    variant: Variant, command: Sequence[str], environ: Mapping[str, str], *, url: str, directory: Path
) -> Engine:
    """Run the command in a session of its own, its output in engine.log of the directory."""
    with (directory / "engine.log").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environ, start_new_session=True, cwd=directory
        )
    return Engine(variant=variant, url=url, directory=directory, process=process, started_s=time.monotonic())
