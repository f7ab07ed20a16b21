"""Settings of the embedded verifier process, section [verifier]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.settings import ConfigError, setting

__all__ = ["VerifierConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """How the embedded target is loaded and run."""

    model: str = setting("smollm2-135m-instruct", "a bundled model's name, or a directory in Hugging Face layout")
    endpoint: str = setting("auto", "ZeroMQ address to listen on (ipc://path or tcp://host:port); auto = private ipc")
    ring_path: str = setting("auto", "file of the shared-memory tensor ring; auto = in /dev/shm")
    ring_slots: int = setting(256, "slots of the tensor ring")
    ring_slot_rows: int = setting(64, "positions whose features fit one slot")
    cache_dir: str = setting("auto", "converted weights and compiled kernels; auto = ~/.cache/breakeven")
    kernels: Literal["auto", "native", "torch"] = setting("auto", "native = row-invariant C kernels, torch = BLAS")
    compact_weights: bool = setting(
        True,
        "keep weights in 8 bits or bfloat16 where that says them exactly (GGUF conversions, bfloat16 checkpoints): the "
        "same text from fewer bytes; native kernels only",
    )
    num_threads: int = setting(1, "torch threads; more than one only helps with the torch kernels")
    context_len: int = setting(0, "longest prompt + output in tokens; 0 = what the model was trained for")
    aux_layer_ids: tuple[int, ...] = setting((), "layers whose inputs are the drafter's features; empty = 2, n/2, n-3")
    max_requests: int = setting(256, "requests held at once")
    prefill_chunk_tokens: int = setting(
        48, "prompt tokens computed in one pass, so that decoding streams never wait long"
    )
    grammar_timeout_s: float = setting(2.0, "longest time to compile the grammar of one request; beyond it a 400")
    parent_pid: int = setting(0, "process to end with, for a launcher that may die first; 0 = whoever started it")
    prefix_cache_tokens: int = setting(65536, "positions kept of finished requests for reuse; 0 = no reuse")

    @property
    def resolved_cache_dir(self) -> Path:
        """``cache_dir`` with "auto" resolved."""
        return Path.home() / ".cache" / "breakeven" if self.cache_dir == "auto" else Path(self.cache_dir)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the key and what is allowed.
        """
        for key in ("ring_slots", "ring_slot_rows", "num_threads", "max_requests", "prefill_chunk_tokens"):
            if getattr(self, key) < 1:
                raise ConfigError(f"verifier.{key}", "must be at least 1")
        for key in ("context_len", "prefix_cache_tokens"):
            if getattr(self, key) < 0:
                raise ConfigError(f"verifier.{key}", "must be 0 or more")
        if not 0.01 <= self.grammar_timeout_s <= 600:
            raise ConfigError("verifier.grammar_timeout_s", "must be between 0.01 and 600")
        if len(self.aux_layer_ids) not in (0, 3):
            raise ConfigError("verifier.aux_layer_ids", "must name three layers, or none for the default")
