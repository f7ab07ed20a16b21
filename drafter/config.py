# ruff: noqa: RUF009 - setting() only wraps dataclasses.field
"""Settings of the drafter process. The loader (profile, environment, flags) is wire/settings.py. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.settings import ConfigError, setting

__all__ = ["DrafterConfig"]

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Which head the drafter runs, where it listens, and how much it takes on."""

    head_dir: Path = setting(Path(), "Directory (or weight file) of the EAGLE-3 head.")
    target_model_dir: Path | None = setting(
        None, "Directory of the target model; its embedding, and lm_head rows, serve heads that ship none."
    )
    endpoint: str = setting("ipc:///tmp/breakeven-drafter.sock", "Where to listen: ipc://path or tcp://host:port.")
    ring_path: Path | None = setting(None, "The verifier's tensor ring; may appear, or be replaced, later.")
    device: str = setting("cpu", "Where the head runs: cpu (float32), cuda or cuda:N (bfloat16, caches included).")
    kernels: Literal["auto", "native", "torch"] = setting("auto", "CPU kernels; auto builds the native ones if it can.")
    cache_dir: Path = setting(Path("~/.cache/breakeven"), "Where built kernels are kept.")
    num_threads: int = setting(1, "Threads torch may use; more than one per process loses on shared cores.")
    max_draft_tokens: int = setting(8, "Longest chain per round, K.")
    max_context_len: int = setting(8192, "Longest prompt + output drafted for, in tokens.")
    max_requests: int = setting(256, "Requests whose state is kept; the least recently used one goes first.")
    max_waiting: int = setting(1024, "Messages that may wait for the engine before new ones are refused.")
    shared_noise: bool = setting(True, "At temperature > 0, guess with the target's own noise instead of greedily.")
    exit_with_parent: bool = setting(True, "Exit when the process that started this one is gone.")
    parent_pid: int = setting(0, "The process meant by that, for a launcher that may die first; 0 asks the system.")
    norm_before_residual: Literal["config", "yes", "no"] = setting(
        "config", "Override the head's convention: does the residual start after hidden_norm?"
    )
    feedback: Literal["config", "pre_norm", "post_norm"] = setting(
        "config", "Override the head's convention: which state the next chain step is fed."
    )
    rope_theta: float = setting(0.0, "Override the head's RoPE base; 0 takes its config.")
    aux_layer_ids: tuple[int, ...] = setting(
        (), "Override which target layers' inputs are the features, e.g. 2,15,27; empty takes the head's config."
    )

    def validate(self) -> None:
        """Check every range once.

        Raises:
            ConfigError: names the key path and the allowed range.
        """
        if not self.endpoint.startswith(("ipc://", "tcp://")):
            raise ConfigError("drafter.endpoint", f"must start with ipc:// or tcp://, not {self.endpoint!r}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError("drafter.device", f"must be cpu, cuda or cuda:N, not {self.device!r}")
        _check_range("num_threads", self.num_threads, 1, 256)
        _check_range("max_draft_tokens", self.max_draft_tokens, 1, 64)
        _check_range("max_context_len", self.max_context_len, 16, 1 << 20)
        _check_range("max_requests", self.max_requests, 1, 1 << 16)
        _check_range("max_waiting", self.max_waiting, 1, 1 << 20)
        _check_range("parent_pid", self.parent_pid, 0, 1 << 31)
        _check_range("rope_theta", self.rope_theta, 0.0, 1e12)
        if any(layer < 0 for layer in self.aux_layer_ids):
            raise ConfigError("drafter.aux_layer_ids", "must be 0 or greater")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise ConfigError(f"drafter.{name}", f"must be between {low} and {high}, not {value}")
