"""Settings of the gateway's engine: sections [engine] and [speculation]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.settings import ConfigError, setting

__all__ = ["EngineConfig", "SpeculationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How many requests run, how long things may take, and which processes the gateway starts itself."""

    backend: Literal["embedded", "sglang"] = setting("embedded", "Where the target runs; sglang: see section [sglang].")
    model_name: str = setting("smollm2-135m-instruct", "Name clients ask for, in /v1/models.")
    model_aliases: tuple[str, ...] = setting((), "Other names that are answered too.")
    max_running: int = setting(64, "Generations decoding at once; more wait.")
    max_waiting: int = setting(256, "Generations that may wait; more are refused with 429.")
    verify_timeout_s: float = setting(60.0, "Longest time for one verify or decode batch.")
    prompt_timeout_s: float = setting(600.0, "Longest time for one prompt.")
    request_timeout_s: float = setting(1800.0, "Longest time for one generation in all, waiting included.")
    drain_timeout_s: float = setting(30.0, "After SIGTERM, running generations get this long to finish.")
    spawn_verifier: bool = setting(True, "Start the embedded verifier as a child; false = it runs elsewhere.")
    spawn_drafter: bool = setting(True, "Start the drafter as a child; false = it runs elsewhere.")
    log_format: Literal["console", "json"] = setting("console", "How log lines are written.")

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the key and what is allowed.
        """
        for key in ("max_running",):
            if getattr(self, key) < 1:
                raise ConfigError(f"engine.{key}", "must be at least 1")
        if self.max_waiting < 0:
            raise ConfigError("engine.max_waiting", "must be 0 or more")
        for key in ("verify_timeout_s", "prompt_timeout_s", "request_timeout_s", "drain_timeout_s"):
            if not 0.0 < getattr(self, key) < 1e6:
                raise ConfigError(f"engine.{key}", "must be above 0 and below a million seconds")
        if not self.model_name:
            raise ConfigError("engine.model_name", "must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """When and how much to speculate."""

    mode: Literal["auto", "on", "off"] = setting("auto", "auto = only while it measurably pays; on or off = pinned.")
    num_draft_tokens: int = setting(3, "Draft length of mode on, and the first one auto tries.")
    candidates: tuple[int, ...] = setting((1, 2, 3, 4, 5, 6, 8), "Draft lengths auto chooses from.")
    trace_path: str = setting("", "Record every decision of the controller in this JSONL file; empty = don't.")
    draft_timeout_s: float = setting(1.0, "A proposal that takes longer is dropped and its round goes plain.")

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the key and what is allowed.
        """
        if not self.candidates or list(self.candidates) != sorted(set(self.candidates)) or self.candidates[0] < 1:
            raise ConfigError("speculation.candidates", "must be ascending, different and at least 1")
        if self.candidates[-1] > 64:
            raise ConfigError("speculation.candidates", "must be at most 64")
        if not 1 <= self.num_draft_tokens <= self.candidates[-1]:
            raise ConfigError("speculation.num_draft_tokens", f"must be between 1 and {self.candidates[-1]}")
        if not 0.0 < self.draft_timeout_s < 1e6:
            raise ConfigError("speculation.draft_timeout_s", "must be above 0 and below a million seconds")
