"""Settings of the SGLang backend, section [sglang]: how the gateway reaches the engine, how the launcher starts it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from wire.settings import ConfigError, setting

__all__ = ["SGLangConfig", "engine_environ"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangConfig:
    """One SGLang server. The first group is read by the gateway, the second by ``breakeven launch``."""

    url: str = setting("http://127.0.0.1:30000", "Where SGLang listens.")
    api_key: str = setting("", "SGLang's --api-key, if it has one.")
    model_dir: str = setting("auto", "Target's directory with tokenizer and config.json; auto = what the engine says.")
    features: Literal["auto", "json", "tap", "off"] = setting(
        "auto", "How aux hidden states come: tap = the plugin's shared memory, json = in the reply (small models only)."
    )
    tap_ring_path: str = setting("", "Tensor ring the plugin writes; empty = no plugin.")
    tap_socket_path: str = setting("", "Datagram socket on which the plugin announces what it wrote.")
    tap_timeout_s: float = setting(0.25, "How long an announcement may come after its reply.")
    lane_endpoint: str = setting(
        "", "Where the plugin takes verify batches past HTTP, e.g. ipc:///tmp/breakeven-lane; empty = HTTP only."
    )
    target_ids: Literal["auto", "off"] = setting(
        "auto", "Have the plugin draw the target's ids in the engine where it can; off = choose from logprob lists."
    )
    batch_expansion: Literal["auto", "off"] = setting(
        "auto",
        "Have the plugin run verify passes as decode steps, one row a token, where it draws; off = extend passes.",
    )
    top_logprobs_num: int = setting(64, "Most likely ids asked for at each position when sampling; exact at any value.")
    plain_sampling: Literal["engine", "shared_noise"] = setting(
        "engine",
        "Who draws in plain rounds: the engine's stream (fast), or our seeded noise (same seed, same text on or off).",
    )
    stream_tokens: int = setting(
        512, "Most tokens of one plain stream; the engine reserves room for all of them, so it admits fewer the more."
    )
    overload_retries: int = setting(4, "How often a verify that the engine refuses for load is tried again.")
    context_len: int = setting(0, "Longest prompt + output in tokens; 0 = the engine's own limit.")

    python: str = setting("python3", "Interpreter that has SGLang.")
    model_path: str = setting("", "Model to serve: a directory or a hub name; empty = model_dir.")
    aux_layer_ids: tuple[int, ...] = setting(
        (), "Layers whose inputs the engine returns as features; empty = its default, 2, n/2, n-3."
    )
    aux_capture: Literal["flag", "plugin"] = setting(
        "flag", "Who makes the engine capture features: its flag (0.5.23), or the plugin (0.5.17 to 0.5.22)."
    )
    all_reduce: str = setting(
        "", "module:attribute of another all-reduce for the plugin to put in SGLang's place; empty = SGLang's own."
    )
    args: tuple[str, ...] = setting((), "Further arguments of sglang.launch_server.")
    env: tuple[str, ...] = setting((), "Environment of the engine, as NAME=VALUE.")
    fallback_args: tuple[str, ...] = setting((), "Arguments that replace args after a crash at start; empty = none.")
    fallback_env: tuple[str, ...] = setting((), "Environment that replaces env together with fallback_args.")
    load_timeout_s: float = setting(3600.0, "Longest time from start to ready.")
    stall_timeout_s: float = setting(600.0, "A load that logs nothing and reads nothing for so long has stalled.")
    state_dir: str = setting("auto", "Where logs and last known-good settings are kept; auto = ~/.cache/breakeven.")

    @property
    def port(self) -> int:
        """Port of ``url``."""
        return urlsplit(self.url).port or 30000

    @property
    def host(self) -> str:
        """Host of ``url``."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def resolved_state_dir(self) -> Path:
        """``state_dir`` with "auto" resolved."""
        return Path.home() / ".cache" / "breakeven" / "sglang" if self.state_dir == "auto" else Path(self.state_dir)

    def validate(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: naming the key and what is allowed.
        """
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ConfigError("sglang.url", "must be http://host:port")
        if not 2 <= self.top_logprobs_num <= 4096:
            raise ConfigError("sglang.top_logprobs_num", "must be between 2 and 4096")
        if not 1 <= self.stream_tokens <= 1 << 20:
            raise ConfigError("sglang.stream_tokens", "must be between 1 and 1048576")
        if not 0 <= self.overload_retries <= 20:
            raise ConfigError("sglang.overload_retries", "must be between 0 and 20")
        if self.context_len < 0:
            raise ConfigError("sglang.context_len", "must be 0 or more")
        if len(self.aux_layer_ids) not in (0, 3):
            raise ConfigError("sglang.aux_layer_ids", "must name three layers, or none for the default")
        for key in ("tap_timeout_s", "load_timeout_s", "stall_timeout_s"):
            if not 0.0 < getattr(self, key) < 1e6:
                raise ConfigError(f"sglang.{key}", "must be above 0 and below a million seconds")
        if self.features == "tap" and not (self.tap_ring_path and self.tap_socket_path):
            raise ConfigError("sglang.features", "tap needs tap_ring_path and tap_socket_path")
        for key in ("env", "fallback_env"):
            for entry in getattr(self, key):
                if "=" not in entry:
                    raise ConfigError(f"sglang.{key}", f"{entry!r} is not NAME=VALUE")


def engine_environ(added: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The environment of an engine: our own, and what its profile adds."""
    return {**os.environ, **dict(added)}
