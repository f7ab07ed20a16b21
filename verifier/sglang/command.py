"""From a profile to SGLang's command line and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifier.sglang.config import SGLangConfig
from verifier.sglang.plugin.config import PluginConfig, plugin_environ
from wire.settings import ConfigError

__all__ = ["EngineCommand", "fallback_command", "known_good", "remember_good", "render_command"]

_OWN_FLAGS = ("--host", "--port", "--model-path", "--api-key")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommand:
    """What is run. ``environ`` holds only what is added to the launcher's own environment."""

    label: str
    argv: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]

    @property
    def shell_line(self) -> str:
        """For people to copy, and for the log: without the API key."""
        argv = list(self.argv)
        if "--api-key" in argv:
            argv[argv.index("--api-key") + 1] = "***"
        return shlex.join([*(f"{name}={value}" for name, value in self.environ), *argv])


def render_command(config: SGLangConfig, *, model_path: str) -> EngineCommand:
    """The profile's own settings.

    Raises:
        ConfigError: the profile sets a flag twice that the launcher sets itself.
    """
    return _render(config, config.args, config.env, model_path=model_path, label="profile")


def fallback_command(config: SGLangConfig, *, model_path: str) -> EngineCommand | None:
    """The profile's conservative settings, if it has any."""
    if not config.fallback_args:
        return None
    return _render(config, config.fallback_args, config.fallback_env, model_path=model_path, label="fallback")


def _render(
    config: SGLangConfig, args: Sequence[str], env: Sequence[str], *, model_path: str, label: str
) -> EngineCommand:
    for flag in _OWN_FLAGS:
        if any(arg == flag or arg.startswith(flag + "=") for arg in args):
            raise ConfigError("sglang.args", f"{flag} is set from sglang.url, model_path and api_key")
    argv = [config.python, "-m", "sglang.launch_server", "--model-path", model_path]
    argv += ["--host", config.host, "--port", str(config.port)]
    if config.api_key:
        argv += ["--api-key", config.api_key]
    if config.features != "off" and config.aux_capture == "flag":
        # The algorithm only names the layers' convention here: nothing is drafted in the engine.
        argv += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    elif config.features != "off":
        argv.append("--enable-return-hidden-states")
    environ: list[tuple[str, str]] = [(entry.partition("=")[0], entry.partition("=")[2]) for entry in env]
    environ += plugin_environ(_plugin_config(config))
    return EngineCommand(label=label, argv=(*argv, *args), environ=tuple(environ))


def _plugin_config(config: SGLangConfig) -> PluginConfig:
    taps = bool(config.tap_ring_path and config.tap_socket_path) and config.features in ("auto", "tap")
    return PluginConfig(
        ring_path=Path(config.tap_ring_path) if taps else None,
        socket_path=Path(config.tap_socket_path) if taps else None,
        draws_target_ids=config.target_ids == "auto",
        expands_batches=config.batch_expansion == "auto",
        captures_aux=config.features != "off" and config.aux_capture == "plugin",
        all_reduce=config.all_reduce,
        lane_endpoint=config.lane_endpoint,
    )


def remember_good(state_dir: Path, command: EngineCommand) -> None:
    """Keep what came up, for the day when something else does not."""
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / "last-known-good.json"
    path.write_text(json.dumps(asdict(command), indent=2))
    path.chmod(0o600)  # it may hold the API key


def known_good(state_dir: Path, *, like: EngineCommand) -> EngineCommand | None:
    """What came up last for the same model and port, if it was anything else than ``like``."""
    try:
        data: Mapping[str, Any] = json.loads((state_dir / "last-known-good.json").read_text())
        argv = tuple(str(arg) for arg in data["argv"])
        environ = tuple((str(name), str(value)) for name, value in data["environ"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = EngineCommand(label="last known-good", argv=argv, environ=environ)
    if _served(found) != _served(like) or (found.argv, found.environ) == (like.argv, like.environ):
        return None
    return found


def _served(command: EngineCommand) -> tuple[str, ...]:
    values = []
    for flag in ("--model-path", "--host", "--port"):
        at = command.argv.index(flag) if flag in command.argv else -1
        values.append(command.argv[at + 1] if at >= 0 else "")
    return tuple(values)
