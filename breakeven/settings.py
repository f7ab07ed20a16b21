"""Finds profiles and builds every section from profile, environment and flags."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from drafter.config import DrafterConfig
from gateway.config import GatewayConfig
from gateway.engine_config import EngineConfig, SpeculationConfig
from verifier.embedded.config import VerifierConfig
from verifier.sglang.config import SGLangConfig
from verifier.tuning.config import TuneConfig
from wire.settings import ConfigError, build_section, load_profile

__all__ = ["DEFAULT_PROFILE", "SECTIONS", "Settings", "bundled_head", "find_profile", "load_settings", "profile_names"]

DEFAULT_PROFILE = "cpu-tiny"

# section of the profile: its dataclass
SECTIONS: dict[str, type] = {
    "gateway": GatewayConfig,
    "engine": EngineConfig,
    "speculation": SpeculationConfig,
    "verifier": VerifierConfig,
    "drafter": DrafterConfig,
    "sglang": SGLangConfig,
    "tune": TuneConfig,
}

Section = TypeVar("Section")


class Settings:
    """Sections on demand, all from the same sources.

    Args:
        tables: the profile's. flags: ``section.key`` to value; None values are ignored. profile: its name.
    """

    def __init__(
        self,
        tables: Mapping[str, Mapping[str, Any]],
        environ: Mapping[str, str],
        flags: Mapping[str, Any],
        *,
        profile: str = "",
    ) -> None:
        for name in tables:
            if name not in SECTIONS:
                raise ConfigError(name, f"unknown section; known are {', '.join(SECTIONS)}")
        self._tables, self._environ, self._flags = tables, environ, flags
        self.profile = profile

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """The profile's own tables, without environment and flags."""
        return self._tables

    def switch(self, name: str) -> bool:
        """True if an on/off flag of the command itself was given."""
        return bool(self._flags.get(name))

    def section(self, name: str, cls: type[Section]) -> Section:
        """One section.

        Raises:
            ConfigError: unknown key, wrong type or out of range.
        """
        prefix = name + "."
        flags = {key.removeprefix(prefix): value for key, value in self._flags.items() if key.startswith(prefix)}
        built = build_section(cls, name, profile=self._tables.get(name, {}), environ=self._environ, flags=flags)
        if isinstance(built, DrafterConfig):
            return dataclasses.replace(built, head_dir=bundled_head(built.head_dir))
        return built


def bundled_head(head_dir: Path) -> Path:
    """``head_dir`` itself, or the head of that name that ships with the drafter."""
    shipped = Path(str(resources.files("drafter"))) / "heads" / head_dir.name
    if not head_dir.exists() and len(head_dir.parts) == 1 and shipped.is_dir():
        return shipped
    return head_dir


def find_profile(name: str) -> Path:
    """A path as it is, or a profile of configs/ by its name.

    Raises:
        ConfigError: neither.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return path
    bundled = Path(str(resources.files("configs"))) / f"{name}.toml"
    if not bundled.is_file():
        raise ConfigError("profile", f"{name!r} is not one of {', '.join(profile_names())} and not a .toml file")
    return bundled


def profile_names() -> list[str]:
    """Names of the profiles that ship, sorted."""
    return sorted(path.stem for path in Path(str(resources.files("configs"))).glob("*.toml"))


def load_settings(profile: str, flags: Mapping[str, Any]) -> Settings:
    """Settings of one run.

    Raises:
        ConfigError: the profile can't be used.
    """
    path = find_profile(profile)
    return Settings(load_profile(path), os.environ, flags, profile=path.stem)
